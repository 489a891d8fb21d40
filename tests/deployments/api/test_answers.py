"""Answers of every kind, whole and streamed. The `openai` package is a client like any other."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from duo_ray.models.scripted import random_table
from tests.deployments.api.calls import CHAT, TEXT, USER, chat, complete
from tests.deployments.scripted import ANSWER, VOCAB, ScriptedEngine, events, served, tokenizer


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=USER)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len(tokenizer().encode_part(ANSWER)) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_text_is_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="Greet.<|answer|>")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.object == "text_completion"


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="scripted", messages=USER, stream=True, stream_options=options))
    *parts, last = chunks
    assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(last.id, "chat.completion.chunk")}
    assert (last.choices, last.usage.completion_tokens) == ([], len(tokenizer().encode_part(ANSWER)) + 1)


def test_a_text_is_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="scripted", prompt="Greet.<|answer|>", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [{}, {"include_usage": False}])
def test_usage_is_streamed_on_demand_only(http: httpx.Client, stream: dict[str, bool]) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": stream})
    assert all("usage" not in event and event["choices"] for event in events(response.text))


def test_a_character_split_over_tokens_is_held_back(http: httpx.Client) -> None:
    """Case 20."""
    streamed = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in streamed]
    assert "".join(pieces) == ANSWER
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("count", range(1, 24))
def test_half_a_character_at_the_end_is_not_shown(http: httpx.Client, count: int) -> None:
    """Case 20, where max_tokens cuts a character."""
    streamed = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": count}).text)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed)
    assert ANSWER.startswith(text)
    assert text == chat(http, max_tokens=count)["choices"][0]["message"]["content"]


def test_all_tokens_of_a_step_are_one_chunk(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=TEXT | {"stream": True, "duo": {"trace": True}})
    steps = [{token["step"] for token in event["duo"]["tokens"]} for event in events(response.text)]
    (*shown, last) = [next(iter(step)) if len(step) == 1 else step for step in steps]
    assert shown == sorted(set(shown))
    assert last == set()


def test_timings_have_the_names_of_llama_cpp(http: httpx.Client) -> None:
    whole = chat(http)
    timings = whole["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == whole["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["predicted_per_second"] == pytest.approx(
        1000 * timings["predicted_n"] / timings["predicted_ms"], rel=1e-3
    )
    streamed = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
    assert streamed[-1]["timings"].keys() == timings.keys()
    assert not any("timings" in event for event in streamed[:-1])


def test_every_response_has_a_request_id_of_its_own(http: httpx.Client) -> None:
    paths = ["/v1/models", "/v1/models", "/nowhere", "/v1/chat/completions"]
    assert len({http.get(path).headers["x-request-id"] for path in paths}) == len(paths)


def test_the_request_id_of_a_proxy_is_left_to_it(http: httpx.Client) -> None:
    assert "x-request-id" not in http.get("/version", headers={"x-request-id": "mine"}).headers


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    first = client.chat.completions.create(model="scripted", messages=USER).choices[0].message
    second = client.chat.completions.create(model="scripted", messages=[*USER, first, *USER])
    assert second.choices[0].message.content == ANSWER
    assert ANSWER in tokenizer().decode(engine.requests[-1].prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_n_answers_each_in_order(http: httpx.Client, stream: bool) -> None:
    prompts = ["one<|answer|>", "two and more<|answer|>"]
    body = {"prompt": prompts, "n": 2, "echo": True, "stream": stream, "stream_options": None}
    if not stream:
        choices = complete(http, **body)["choices"]
        texts = {choice["index"]: choice["text"] for choice in choices}
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    else:
        texts = dict.fromkeys(range(4), "")
        for event in events(http.post("/v1/completions", json=TEXT | body).text):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == {i: prompts[i // 2] + ANSWER for i in range(4)}


def test_a_prompt_counts_once_in_the_usage_of_n_answers(http: httpx.Client) -> None:
    one, three = complete(http)["usage"], complete(http, n=3)["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_a_prompt_may_be_ids(http: httpx.Client, engine: ScriptedEngine, prompt: Any) -> None:
    answer = complete(http, prompt=prompt, echo=True, max_tokens=1)
    assert engine.requests[-1].prompt == (5, 6, 7)
    assert answer["choices"][0]["text"].startswith(tokenizer().decode([5, 6, 7]))


@pytest.mark.parametrize(
    ("stop", "text"),
    [("Two", "Grüße, 世界! "), (["zz", "界! T"], "Grüße, 世"), ("\u200d👧", "Grüße, 世界! Two emoji: 👩")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut(http: httpx.Client, stop: Any, text: str, stream: bool) -> None:
    response = http.post("/v1/completions", json=TEXT | {"stop": stop, "stream": stream})
    shown = events(response.text) if stream else [response.json()]
    assert "".join(event["choices"][0]["text"] for event in shown) == text
    assert shown[-1]["choices"][0]["finish_reason"] == "stop"


def test_n_answers_are_those_of_consecutive_seeds() -> None:
    engine = ScriptedEngine(random_table(VOCAB, seed=3))
    options = {"temperature": 1.5, "max_tokens": 12, "seed": -2}
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        together = [choice["text"] for choice in complete(http, n=4, **options)["choices"]]
        alone = [complete(http, **(options | {"seed": seed}))["choices"][0]["text"] for seed in (-2, -1, 0, 1)]
    assert together == alone
    assert len(set(together)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_tells_the_origin_of_every_token(http: httpx.Client, stream: bool) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | {"duo": {"trace": True}, "stream": stream})
    shown = events(response.text) if stream else [response.json()]
    tokens = [token for event in shown if "duo" in event for token in event["duo"]["tokens"]]
    assert "".join(token["text"] for token in tokens) == ANSWER
    assert {"accepted", "correction"} <= {token["origin"] for token in tokens}
    assert [token["step"] for token in tokens] == sorted(token["step"] for token in tokens)
    stats = [event["duo"]["stats"] for event in shown if "stats" in event.get("duo", {})]
    assert [figures["target_steps"] > 0 for figures in stats] == [True]


def test_without_a_trace_nothing_is_added(http: httpx.Client) -> None:
    assert "duo" not in chat(http)
