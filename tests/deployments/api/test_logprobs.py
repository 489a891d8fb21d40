"""Log probabilities in both of the API's shapes."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest

from duo_ray.models.scripted import random_table
from duo_ray.types import Delta, Finished, Origin, Token, TokenLogprobs
from tests.deployments.api.calls import CHAT, TEXT, chat, complete
from tests.deployments.scripted import ANSWER, VOCAB, ScriptedEngine, events, served, tokenizer


def test_logprobs_of_a_chat_cover_the_text_with_their_bytes(http: httpx.Client) -> None:
    content = chat(http, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == ANSWER
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)
    assert not any("\ufffd" in entry["token"] for entry in content)
    halves = [entry for entry in content if entry["token"].startswith("\\x")]
    assert all(entry["token"] == "".join(f"\\x{byte:02x}" for byte in entry["bytes"]) for entry in halves)
    assert halves


def test_logprobs_of_a_completion_have_the_other_shape(http: httpx.Client) -> None:
    choice = complete(http, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    count = len(tokenizer().encode_part(ANSWER))
    assert {len(column) for column in logprobs.values()} == {count}
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:\\x") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize(
    ("shown", "alternatives"), [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 2}, 2)]
)
def test_alternatives_are_as_many_as_asked_for(http: httpx.Client, shown: dict[str, Any], alternatives: int) -> None:
    content = chat(http, **shown)["choices"][0]["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in content} == {alternatives}


def test_logprobs_that_nobody_asked_for_are_null(http: httpx.Client) -> None:
    assert chat(http)["choices"][0]["logprobs"] is None


def test_streamed_they_are_those_of_the_whole(http: httpx.Client) -> None:
    body = {"logprobs": True, "top_logprobs": 1}
    whole = chat(http, **body)["choices"][0]["logprobs"]["content"]
    streamed = events(http.post("/v1/chat/completions", json=CHAT | body | {"stream": True}).text)
    parts = [event["choices"][0]["logprobs"] or {"content": []} for event in streamed]
    assert [entry for part in parts for entry in part["content"]] == whole
    body = {"logprobs": 1}
    flat = complete(http, **body)["choices"][0]["logprobs"]
    chunks = events(http.post("/v1/completions", json=TEXT | body | {"stream": True}).text)
    for column, values in flat.items():
        parts = [event["choices"][0]["logprobs"] or {column: []} for event in chunks]
        assert [value for part in parts for value in part[column]] == values


def test_the_impossible_is_a_number_too() -> None:
    class Certain(ScriptedEngine):
        async def stream(self, request):
            logprobs = TokenLogprobs(0.0, ((3, 0.0), (4, -math.inf)))
            yield Delta((Token(3, "!", Origin.PLAIN, 0, logprobs),))
            async for item in super().stream(request):
                if isinstance(item, Finished):
                    yield item

    with served(Certain()) as url, httpx.Client(base_url=url, timeout=60) as http:
        (entry,) = chat(http, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [other["logprob"] for other in entry["top_logprobs"]] == [0.0, -9999.0]


def test_they_are_of_the_distribution_before_temperature() -> None:
    engine = ScriptedEngine(random_table(VOCAB, seed=3))
    body = {"logprobs": True, "temperature": 1.7, "top_k": 5, "max_tokens": 20, "seed": 1}
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        content = chat(http, **body)["choices"][0]["logprobs"]["content"]
    ids = list(engine.requests[-1].prompt)
    for entry in content:
        logits = engine.table(tuple(ids))
        log_p = logits - np.log(np.exp(logits).sum())
        (token,) = np.flatnonzero(np.isclose(log_p, entry["logprob"], atol=1e-9))
        assert list(tokenizer().piece(int(token))) == entry["bytes"]
        ids.append(int(token))
    assert len(content) == 20
