"""Whatever ends a request: nothing of it goes on, and the client is told why."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from duo_ray.types import ContextOverflow, DuoRayError, Overloaded
from tests.deployments.api.calls import CHAT, ENDLESS, USER, refused
from tests.deployments.scripted import ANSWER, ScriptedEngine, events, not_finite_from, says, served


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_closed_connection_ends_the_work_within_a_step(stream: bool, n: int) -> None:
    engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000)
    body = json.dumps(CHAT | ENDLESS | {"stream": stream, "n": n}).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with served(engine) as url:
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)) as connection:
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
            eventually(lambda: engine.steps > 3 * n)
            assert len(engine.running) == n
        eventually(lambda: not engine.running)
        steps = engine.steps
        time.sleep(0.1)
        assert engine.steps == steps


@pytest.mark.parametrize("n", [1, 3])
def test_the_time_limit_ends_a_whole_answer(n: int) -> None:
    engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000, settings={"serving.limits.timeout_s": 1.0})
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        error = refused(http, CHAT | ENDLESS | {"n": n}, status=408)
        assert "limit of 1 s for one request" in error.message
        assert not engine.running


def test_the_official_client_does_not_repeat_what_took_too_long() -> None:
    engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000, settings={"serving.limits.timeout_s": 1.0})
    with served(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.APIStatusError, match="not complete within"):
            client.chat.completions.create(
                model="scripted", messages=USER, max_tokens=1000, extra_body={"ignore_eos": True}
            )
        assert len(engine.requests) == 1


def test_the_time_limit_ends_a_stream_with_an_error_event() -> None:
    engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000, settings={"serving.limits.timeout_s": 1.0})
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        response = http.post("/v1/chat/completions", json=CHAT | ENDLESS | {"stream": True})
        *_, last = events(response.text)
        assert last["error"]["code"] == "timeout"
        assert "event: error\ndata: " in response.text
        assert not engine.running


def test_a_failure_in_mid_stream_reaches_the_official_client() -> None:
    engine = ScriptedEngine(not_finite_from(says(ANSWER), 30))
    with served(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        text = ""
        with pytest.raises(openai.APIError, match="logits is nan: the model's weights"):  # noqa: PT012
            for chunk in client.chat.completions.create(model="scripted", messages=USER, stream=True):
                text += chunk.choices[0].delta.content or ""
        assert text
        assert ANSWER.startswith(text)
        assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_a_status(stream: bool) -> None:
    engine = ScriptedEngine(not_finite_from(says(ANSWER), 0))
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        error = refused(http, CHAT | {"stream": stream}, status=500)
        assert "logits is nan" in error.message
        assert "Traceback" not in error.message
        assert refused(http, CHAT | {"n": 3}, status=500).type == "server_error"


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (Overloaded(7, 2), 503, "overloaded"),
        (ContextOverflow("too long"), 400, "context_length_exceeded"),
        (DuoRayError("the target is gone"), 500, "generation_failed"),
        (RuntimeError("secret"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_raises_has_its_status(raised: Exception, status: int, code: str | None, stream: bool) -> None:
    class Failing(ScriptedEngine):
        async def stream(self, request):
            raise raised
            yield

    with served(Failing()) as url, httpx.Client(base_url=url, timeout=60) as http:
        response = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "secret" not in response.text
    if status == 503:
        assert response.headers["retry-after"] == "2"


def test_a_stream_without_its_end_says_so() -> None:
    class Ending(ScriptedEngine):
        async def stream(self, request):
            return
            yield

    with served(Ending()) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert "shutting down" in refused(http, CHAT, status=503).message
