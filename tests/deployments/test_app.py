"""The running application: HTTP and handles, streams that are closed, a full queue, a replica that dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import struct
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest
from ray import serve
from ray.exceptions import RayActorError

from deployments.runner import PULSE_S
from duo_ray.config import load_config
from duo_ray.models.catalog import resolve_target
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.session import build_request
from duo_ray.types import Delta, Finished, Overloaded
from tests.actors.conftest import SMALL
from tests.deployments.conftest import QUEUE
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.ray, pytest.mark.models]

SLOTS = SMALL["models.target.slots"]
LONG = {"max_tokens": 560, "temperature": 0.0, "ignore_eos": True}


def chat(prompt, **options):
    """Body of a chat request that streams."""
    return {"model": "demo", "messages": [{"role": "user", "content": prompt}], "stream": True, **options}


def stats(url):
    return httpx.get(f"{url}/stats", timeout=60).json()


def wait_for_load(url, running, queued):
    """Work on a closed stream ends within a step, but a busy machine takes its time to tell."""
    deadline = time.monotonic() + 60
    while (now := stats(url))["running"] != running or now["queued"] != queued:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)


@contextmanager
def one_cancelled(url):
    """What is done in this block must end one answer before its end, and leave no work behind."""
    before = stats(url)["totals"]["requests"]
    yield
    wait_for_load(url, 0, 0)
    after = stats(url)["totals"]["requests"]
    assert after == {**before, "cancelled": before.get("cancelled", 0) + 1}


@pytest.fixture(scope="module")
def handle(connected):
    return serve.get_app_handle("default")


def test_a_handles_answer_is_the_targets_own_greedy_text(handle, reference):
    pieces = list(handle.options(stream=True).stream.remote(PROMPTS[0], temperature=0.0, max_tokens=24))
    ids = [token.id for piece in pieces[:-1] for token in piece.tokens]
    tokenizer = Tokenizer.load(resolve_target("demo").tokenizer_path)
    (wanted,) = reference([build_request(load_config(), tokenizer, PROMPTS[0]).prompt], 24)
    assert ids == wanted
    assert all(isinstance(piece, Delta) for piece in pieces[:-1])
    assert isinstance(pieces[-1], Finished)
    assert pieces[-1].stats["draft_tokens"] > 0


def test_generate_gives_a_plain_dict(handle):
    answer = handle.generate.remote("Hi", temperature=0.0, max_tokens=4).result()
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 4
    assert json.loads(json.dumps(answer))["text"] == answer["text"]


def test_describe_tells_the_processes_and_their_cores(handle):
    pipeline = handle.describe.remote().result()["pipeline"]
    pids = [pipeline["target"]["pid"], pipeline["drafts"][0]["pid"], pipeline["coordinator_pid"]]
    assert all(map(psutil.pid_exists, pids))
    assert not set(pipeline["target"]["cores"]) & set(pipeline["drafts"][0]["cores"])


def test_an_unknown_option_of_a_handle_call_is_named(handle):
    with pytest.raises(Exception, match="temprature is not an option; did you mean temperature"):
        handle.generate.remote("Hi", temprature=1.0).result()


def test_a_closed_connection_frees_its_slot(service):
    """Case 18."""
    body = chat("Tell a long story.", **LONG)
    with one_cancelled(service.url), httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body) as response:
        next(response.iter_lines())


def test_a_cancelled_handle_stream_frees_its_slot(handle, service):
    with one_cancelled(service.url):
        stream = handle.options(stream=True).stream.remote("Tell a long story.", **LONG)
        next(stream)
        stream.cancel()


def test_a_handle_stream_that_is_dropped_frees_its_slot(handle, service):
    with one_cancelled(service.url):
        stream = handle.options(stream=True).stream.remote("Tell a long story.", **LONG)
        next(stream)
        del stream


def test_another_application_that_is_killed_frees_its_slot(handle, service):
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Asker:
        def __init__(self):
            self.model = serve.get_app_handle("default")

        def pid(self):
            return os.getpid()

        async def ask(self):
            await self.model.generate.remote("Tell a long story.", **LONG)

    asker = serve.run(Asker.bind(), name="asker", route_prefix=None)
    try:
        pid = asker.pid.remote().result()
        with one_cancelled(service.url):
            answer = asker.ask.remote()
            wait_for_load(service.url, 1, 0)
            psutil.Process(pid).kill()
        with pytest.raises(RayActorError):
            answer.result()
    finally:
        serve.delete("asker")


def test_fifty_streams_closed_at_random_moments_leave_every_slot_free(service):
    """Cases 18 and 19: closed before the first token, in the queue, in mid-stream; some are refused."""
    moments = random.Random(5)

    async def one(client):
        await asyncio.sleep(moments.uniform(0.0, 4.0))
        body = chat(moments.choice(PROMPTS), **LONG)
        try:
            async with asyncio.timeout(moments.uniform(0.0, 2.0)):
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        pass
        except TimeoutError:
            return None
        return response.status_code

    async def all_of_them():
        async with httpx.AsyncClient(base_url=service.url, timeout=120, limits=httpx.Limits()) as client:
            return await asyncio.gather(*(one(client) for _ in range(50)))

    assert set(asyncio.run(all_of_them())) <= {None, 503}
    wait_for_load(service.url, 0, 0)

    async def at_once():
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            body = chat("Hi", max_tokens=4, temperature=0.0)
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(SLOTS)))

    assert [response.status_code for response in asyncio.run(at_once())] == [200] * SLOTS
    wait_for_load(service.url, 0, 0)


def test_connections_that_break_anywhere_leave_every_slot_free(service):
    """Case 18: before, within and after the request, closed, half-closed and reset."""
    body = json.dumps(chat("Tell a long story.", **LONG)).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body
    url, moments = httpx.URL(service.url), random.Random(7)
    for _ in range(60):
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(request[: moments.choice([0, 30, len(request) - 5, len(request)])])
            time.sleep(moments.choice([0.0, 0.1]))
            match moments.choice(["close", "half-close", "reset"]):
                case "half-close":
                    connection.shutdown(socket.SHUT_WR)
                case "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for_load(service.url, 0, 0)
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=chat("Hi", max_tokens=2), timeout=120)
    assert answer.is_success


def test_a_full_queue_refuses_with_the_time_to_come_again(handle, service):
    streams = [handle.options(stream=True).stream.remote("Tell a long story.", **LONG) for _ in range(SLOTS + QUEUE)]
    try:
        wait_for_load(service.url, SLOTS, QUEUE)
        refused = httpx.post(f"{service.url}/v1/chat/completions", json=chat("Hi"), timeout=120)
        assert refused.status_code == 503
        metrics = httpx.get(f"{service.url}/metrics", timeout=60).text
        assert re.search(r'^duo_ray_requests_total\{.*outcome="refused".*\} [1-9]', metrics, re.MULTILINE)
        assert int(refused.headers["Retry-After"]) >= 1
        with pytest.raises(Overloaded, match="try again in"):
            list(handle.options(stream=True).stream.remote("Hi"))
        assert httpx.get(f"{service.url}/stats", timeout=60).status_code == 200  # what generates nothing gets through
        time.sleep(PULSE_S)  # no client has had a token over HTTP for so long, but those at the handle get them
        assert httpx.get(f"{service.url}/health", timeout=120).status_code == 200
        wait_for_load(service.url, SLOTS, QUEUE)
    finally:
        for stream in streams:
            stream.cancel()
    wait_for_load(service.url, 0, 0)
    assert httpx.post(f"{service.url}/v1/chat/completions", json=chat("Hi", max_tokens=2), timeout=120).is_success


def test_another_application_asks_through_a_handle(handle, service):
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Shout:
        def __init__(self):
            self.model = serve.get_app_handle("default")

        async def __call__(self, prompt):
            answer = await self.model.generate.remote(prompt, temperature=0.0, max_tokens=6)
            return answer["text"].upper()

        async def letters(self, prompt):
            async for item in self.model.options(stream=True).stream.remote(prompt, temperature=0.0, max_tokens=6):
                if isinstance(item, Delta):
                    yield "".join(token.text for token in item.tokens).upper()

    shout = serve.run(Shout.bind(), name="shout", route_prefix="/shout")
    try:
        loud = shout.remote("Name three colours.").result()
        assert loud
        assert loud == loud.upper()
        assert "".join(shout.options(stream=True).letters.remote("Name three colours.")) == loud
    finally:
        serve.delete("shout")
    wait_for_load(service.url, 0, 0)


def test_a_replica_that_dies_takes_its_models_with_it_and_another_one_answers(handle, service):
    """Last here. The new pipeline has room only because all of the old one is gone."""
    before = handle.describe.remote().result()
    old = [before["pid"], before["pipeline"]["target"]["pid"], before["pipeline"]["drafts"][0]["pid"]]
    psutil.Process(before["pid"]).kill()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        response = httpx.post(f"{service.url}/v1/chat/completions", json=chat("Hi", max_tokens=2), timeout=300)
        if response.is_success:
            break
        time.sleep(1)
    assert response.is_success
    assert handle.describe.remote().result()["pid"] != before["pid"]
    assert not any(map(alive, old))


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
