"""What operators ask: figures, the version, the documentation, and whether it works at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from deployments import runner
from duo_ray.types import Delta, DuoRayError, Finished, Overloaded, Request
from tests.deployments.api.calls import chat
from tests.deployments.scripted import ANSWER, ScriptedEngine, not_finite_from, says, served


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("scripted").id == "scripted"


def test_metrics_are_prometheus_text(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'duo_ray_running{model_name="scripted",replica="only"} 0.0' in response.text


def test_stats_are_json_for_people(http: httpx.Client) -> None:
    stats = http.get("/stats").json()
    assert (stats["model_name"], stats["running"], stats["queued"]) == ("scripted", 0, 0)
    assert [each["replica"] for each in stats["replicas"]] == ["only"]


def test_the_version_is_the_packages(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": "0.1.0"}


def test_the_documentation_needs_nothing_from_outside(http: httpx.Client) -> None:
    page = http.get("/docs").text
    addresses = [part.split('"')[0] for part in page.replace("src=", "href=").split('href="')[1:]]
    assert addresses
    assert all(address.startswith("/") and http.get(address).status_code == 200 for address in addresses)
    assert "http" not in page.replace("http-equiv", "")


def test_health_generates_a_token_without_a_draft() -> None:
    engine = ScriptedEngine()
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ok"}
    (probe,) = engine.requests
    assert (probe.max_tokens, probe.draft) == (1, False)


def test_one_token_answers_many_checks() -> None:
    engine = ScriptedEngine()
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert {http.get("/health").status_code for _ in range(20)} == {200}
    assert len(engine.requests) == 1


def test_a_clients_token_is_proof_enough() -> None:
    engine = ScriptedEngine()
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        chat(http)
        assert http.get("/health").status_code == 200
    assert len(engine.requests) == 1


def test_a_model_that_gives_no_token_is_not_healthy() -> None:
    engine = ScriptedEngine(not_finite_from(says(ANSWER), 0))
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        responses = [http.get("/health") for _ in range(5)]
    assert {response.status_code for response in responses} == {503}
    assert all("logits is nan" in response.json()["error"]["message"] for response in responses)
    assert len(engine.requests) == 1


def test_a_check_that_was_refused_a_place_asks_again() -> None:
    """Those who had the places may have left without a token."""

    class FullAtFirst(ScriptedEngine):
        async def stream(self, request: Request) -> AsyncIterator[Delta | Finished]:
            if not self.requests:
                self.requests.append(request)
                raise Overloaded(3, 1)
            async for item in super().stream(request):
                yield item

    engine = FullAtFirst()
    with served(engine) as url, httpx.Client(base_url=url, timeout=120) as http:
        assert http.get("/health").status_code == 200
    assert len(engine.requests) == 2


class Full(ScriptedEngine):
    """Others have all places; they get a token now and then, if at all."""

    def __init__(self, tokens_every: float | None) -> None:
        super().__init__()
        self.tokens_every = tokens_every

    async def stream(self, request: Request) -> AsyncIterator[Delta | Finished]:
        self.requests.append(request)
        if self.tokens_every is not None:
            asyncio.get_running_loop().call_later(self.tokens_every, self.give_others_a_token)
        raise Overloaded(3, 1)
        yield

    def give_others_a_token(self) -> None:
        self.last_token = time.monotonic()


@pytest.mark.parametrize(("tokens_every", "status"), [(0.3, 200), (None, 503)])
def test_a_full_server_is_healthy_while_others_get_tokens(
    tokens_every: float | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PROBE_LIMIT_S", 60.0 if status == 200 else 0.5)
    engine = Full(tokens_every)
    with served(engine) as url, httpx.Client(base_url=url, timeout=120) as http:
        response = http.get("/health")
    assert response.status_code == status
    assert status == 200 or "no token could be generated within 0.5 s" in response.json()["error"]["message"]


def test_an_engine_that_says_it_cannot_work_is_not_healthy() -> None:
    engine = ScriptedEngine()
    engine.health = DuoRayError("the target will not come back")
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        response = http.get("/health")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the target will not come back")
    assert not engine.requests


def test_checks_at_the_same_time_share_one_token() -> None:
    engine = ScriptedEngine(pause=lambda: 0.05)

    async def check(url: str) -> set[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            responses = await asyncio.gather(*(http.get("/health") for _ in range(10)))
            return {response.status_code for response in responses}

    with served(engine) as url:
        assert asyncio.run(check(url)) == {200}
    assert len(engine.requests) == 1
