"""Before anything is asked of the engine: keys, sizes, bodies that are no requests, paths that lead nowhere."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest

from deployments import gateway
from deployments.openai_api import create_api
from tests.deployments.api.calls import CHAT, chat
from tests.deployments.scripted import ANSWER, ScriptedEngine, served


def test_a_key_is_asked_for_where_models_work_and_figures_are_shown() -> None:
    with served(ScriptedEngine(settings={"serving.api_key": "s3cret"})) as url:
        with httpx.Client(base_url=url, timeout=60) as http:
            for path in ("/", "/docs", "/health", "/version"):
                assert http.get(path).status_code == 200
            for path in ("/v1/models", "/stats", "/metrics"):
                assert http.get(path).status_code == 401
                assert http.get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
                response = http.post("/v1/chat/completions", content=b"{", headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "s3cret" not in response.text
            assert http.get("/v1/models", headers={"Authorization": "bearer s3cret"}).status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret") as client:
            assert client.models.list().data[0].id == "scripted"


def test_the_key_is_asked_for_below_a_prefix_too() -> None:
    async def status(root_path: str) -> int:
        api = create_api(ScriptedEngine(settings={"serving.api_key": "s3cret"}))
        transport = httpx.ASGITransport(api, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.get(f"{root_path}/v1/models")).status_code

    assert [asyncio.run(status(prefix)) for prefix in ("", "/llm")] == [401, 401]


@pytest.mark.parametrize("stated", [True, False])
def test_a_body_over_the_limit_is_too_large(stated: bool) -> None:
    body = json.dumps(CHAT | {"user": "x" * 2000}).encode()
    content = body if stated else (body[i : i + 100] for i in range(0, len(body), 100))
    headers = {"Content-Type": "application/json"}
    engine = ScriptedEngine(settings={"serving.limits.body_bytes": 1024})
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        response = http.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "limit of 1024 bytes" in response.json()["error"]["message"]
        assert chat(http)["choices"]


def test_a_body_that_does_not_come_is_not_waited_for(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "BODY_LIMIT_S", 0.5)
    head = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=60) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{{".encode())
        status, *_, body = connection.makefile("rb").read().decode().split("\r\n")
    assert status.split()[1] == "408"
    assert json.loads(body)["error"]["message"] == "the body was not complete within 0.5 s"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the body is missing"),
        (b"{", "the body is not JSON"),
        (b"[]", "the body must be a JSON object, got a list of 0"),
        (b"null", "the body must be a JSON object, got null"),
        (b'"x"', "the body must be a JSON object, got 'x'"),
        (b"\xff\xfe\xfa", "no valid UTF-8, nests too deeply or"),
        (b'{"model": "\xff"}', "no valid UTF-8, nests too deeply or"),
        (b"[" * 100_000, "no valid UTF-8, nests too deeply or"),
        (b'{"user": ' + b"9" * 5000 + b"}", "no valid UTF-8, nests too deeply or"),
        (b'{"model": "scripted", "stop": ' + b"[" * 900 + b"]" * 900 + b"}", "stop[0]"),
        (b'{"model": "scripted", "logit_bias": ' + b"[" * 900 + b"]" * 900 + b"}", "got a list of 1"),
        (b'{"model": "scripted", "temperature": NaN}', "temperature: should be a finite number, got nan"),
        (b'{"model": "scripted", "top_p": -Infinity}', "top_p: should be a finite number, got -inf"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_broken_body_is_refused(http: httpx.Client, content: bytes, words: str, path: str) -> None:
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_is_not_json_is_refused_by_its_type(http: httpx.Client, kind: str) -> None:
    response = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind})
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_json_may_state_its_encoding(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/files", 404),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_what_is_not_there_is_said_in_openais_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert (response.headers.get("allow") is not None) == (status == 405)


def test_what_is_ignored_may_be_anything(http: httpx.Client) -> None:
    content = json.dumps(CHAT | {"user": "deep"}).replace('"deep"', "[" * 900 + "NaN" + "]" * 900)
    response = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("text", ["\0", "a\0b", "\u2028", "\r\n\r\n", "<|im_end|>", "\ufffd", "🙂" * 40])
def test_odd_text_is_text(http: httpx.Client, text: str) -> None:
    assert chat(http, messages=[{"role": "user", "content": text}])["choices"][0]["message"]["content"] == ANSWER


def test_a_failure_of_our_own_is_told_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedEngine):
        async def figures(self):
            raise RuntimeError("secret")

    with served(Broken()) as url, httpx.Client(base_url=url, timeout=60) as http:
        response = http.get("/stats")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert "secret" in caplog.text
