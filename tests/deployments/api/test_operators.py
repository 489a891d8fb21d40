"""What operators ask: figures, the version, the documentation, and whether it works at all."""

from __future__ import annotations

import asyncio

import httpx
import openai

from duo_ray.types import DuoRayError
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
