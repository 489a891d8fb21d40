"""What callers get when there is no place for one more request, from the router that runs in the caller's process."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import openai
import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError

from deployments.routing import Router

pytestmark = [pytest.mark.ray, pytest.mark.models]

QUEUE = 2
ROUTER = RequestRouterConfig(request_router_class=Router, request_router_kwargs={"queue": QUEUE, "retry_after_s": 7})


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1, request_router_config=ROUTER)
class OneAtATime:
    """Takes one request and answers it when there is a certain file."""

    def __init__(self, gate):
        self.gate = gate

    async def __call__(self, request=None):
        while not self.gate.exists():
            await asyncio.sleep(0.05)
        return {"object": "list", "data": []}


@pytest.fixture
def full(connected, tmp_path):
    """Handle and address of such an application, and the file."""
    gate = tmp_path / "open"
    handle = serve.run(OneAtATime.bind(gate), name="full", route_prefix="/full")
    yield handle, f"{connected.url}/full", gate
    gate.touch()
    serve.delete("full")


def test_serves_own_refusal_is_as_openai_clients_want_it_and_who_waits_is_answered(full):
    _, url, gate = full

    async def ask():
        answers = []
        async with httpx.AsyncClient(timeout=300) as http:
            while not any(answer.done() for answer in answers):
                assert len(answers) < 20
                answers.append(asyncio.create_task(http.get(f"{url}/v1/models")))
                await asyncio.sleep(0.5)
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
            with pytest.raises(openai.InternalServerError, match="requests wait already") as refused:
                await client.models.list()
            gate.touch()
            return refused.value, [answer.status_code for answer in await asyncio.gather(*answers)]

    refused, statuses = asyncio.run(ask())
    assert (refused.status_code, refused.code) == (503, "overloaded")
    assert refused.response.headers["Retry-After"] == "7"
    assert refused.body.keys() == {"message", "type", "param", "code"}
    assert statuses == sorted(statuses)
    assert statuses.count(200) >= QUEUE


def test_a_handle_raises_serves_error(full):
    handle, _, _ = full
    waiting = []
    with pytest.raises(BackPressureError, match="try again in 7 s"):  # noqa: PT012
        while len(waiting) < 20:
            waiting.append(handle.remote())
            with suppress(TimeoutError):
                waiting[-1].result(timeout_s=1)


def test_a_burst_is_not_refused_while_there_is_place(connected):
    async def burst():
        async with httpx.AsyncClient(base_url=connected.url, timeout=300, limits=httpx.Limits()) as http:
            return await asyncio.gather(*(http.get("/v1/models") for _ in range(60)))

    assert {answer.status_code for answer in asyncio.run(burst())} == {200}
