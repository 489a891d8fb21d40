"""The HTTP API over scripted models and a real server: shapes, limits, ends. The `openai` package is the client."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

from deployments.openai_api import create_api
from deployments.schema import ChatRequest, CompletionRequest
from duo_ray.models.scripted import random_table
from duo_ray.types import ContextOverflow, Delta, DuoRayError, Finished, Origin, Overloaded, Token, TokenLogprobs
from tests.deployments.scripted import (
    ANSWER,
    VOCAB,
    ScriptedEngine,
    events,
    not_finite_from,
    says,
    served,
    tokenizer,
)

USER = [{"role": "user", "content": "Greet."}]
CHAT = {"model": "scripted", "messages": USER}
TEXT = {"model": "scripted", "prompt": "Greet.<|answer|>"}
ENDLESS = {"ignore_eos": True, "max_tokens": 100_000}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=CHAT | body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=TEXT | body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx.Client, body: dict[str, Any], path: str = "/v1/chat/completions", status: int = 400) -> Any:
    """The error of a request that must be refused."""
    # httpx itself cannot send half a surrogate pair.
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    return SimpleNamespace(**response.json()["error"])


class TestAnswers:
    def test_a_chat_is_answered(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="scripted", messages=USER)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
        assert answer.object == "chat.completion"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.completion_tokens == len(tokenizer().encode_part(ANSWER)) + 1
        assert answer.usage.prompt_tokens_details.cached_tokens == 3

    def test_a_text_is_continued(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="scripted", prompt="Greet.<|answer|>")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER, "stop")
        assert answer.object == "text_completion"

    def test_a_chat_is_streamed(self, client: openai.OpenAI) -> None:
        options = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(model="scripted", messages=USER, stream=True, stream_options=options)
        )
        *parts, last = chunks
        assert (parts[0].choices[0].delta.role, parts[0].choices[0].delta.content) == ("assistant", "")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == ANSWER
        assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert {(chunk.id, chunk.object) for chunk in chunks} == {(last.id, "chat.completion.chunk")}
        assert (last.choices, last.usage.completion_tokens) == ([], len(tokenizer().encode_part(ANSWER)) + 1)

    def test_a_text_is_streamed(self, client: openai.OpenAI) -> None:
        chunks = list(client.completions.create(model="scripted", prompt="Greet.<|answer|>", stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]

    @pytest.mark.parametrize("stream", [{}, {"include_usage": False}])
    def test_usage_is_streamed_on_demand_only(self, http: httpx.Client, stream: dict[str, bool]) -> None:
        response = http.post("/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": stream})
        assert all("usage" not in event and event["choices"] for event in events(response.text))

    def test_a_character_split_over_tokens_is_held_back(self, http: httpx.Client) -> None:
        """Case 20."""
        streamed = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
        pieces = [event["choices"][0]["delta"].get("content", "") for event in streamed]
        assert "".join(pieces) == ANSWER
        assert not any("\ufffd" in piece for piece in pieces)

    @pytest.mark.parametrize("count", range(1, 24))
    def test_half_a_character_at_the_end_is_not_shown(self, http: httpx.Client, count: int) -> None:
        """Case 20, where max_tokens cuts a character."""
        streamed = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": count}).text)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed)
        assert ANSWER.startswith(text)
        assert text == chat(http, max_tokens=count)["choices"][0]["message"]["content"]

    def test_all_tokens_of_a_step_are_one_chunk(self, http: httpx.Client) -> None:
        response = http.post("/v1/completions", json=TEXT | {"stream": True, "duo": {"trace": True}})
        steps = [{token["step"] for token in event["duo"]["tokens"]} for event in events(response.text)]
        (*shown, last) = [next(iter(step)) if len(step) == 1 else step for step in steps]
        assert shown == sorted(set(shown))
        assert last == set()

    def test_timings_have_the_names_of_llama_cpp(self, http: httpx.Client) -> None:
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

    def test_every_response_has_a_request_id_of_its_own(self, http: httpx.Client) -> None:
        paths = ["/v1/models", "/v1/models", "/nowhere", "/v1/chat/completions"]
        assert len({http.get(path).headers["x-request-id"] for path in paths}) == len(paths)

    def test_the_request_id_of_a_proxy_is_left_to_it(self, http: httpx.Client) -> None:
        assert "x-request-id" not in http.get("/version", headers={"x-request-id": "mine"}).headers

    def test_a_conversation_goes_on_with_the_answer_as_it_came(
        self, client: openai.OpenAI, engine: ScriptedEngine
    ) -> None:
        first = client.chat.completions.create(model="scripted", messages=USER).choices[0].message
        second = client.chat.completions.create(model="scripted", messages=[*USER, first, *USER])
        assert second.choices[0].message.content == ANSWER
        assert ANSWER in tokenizer().decode(engine.requests[-1].prompt)


class TestParameters:
    @pytest.mark.parametrize(
        ("schema", "official"),
        [
            (ChatRequest, chat_params.CompletionCreateParamsBase),
            (ChatRequest, chat_params.CompletionCreateParamsStreaming),
            (CompletionRequest, CompletionCreateParamsNonStreaming),
        ],
    )
    def test_every_official_parameter_is_known(self, schema: type, official: type) -> None:
        assert set(official.__annotations__) <= set(schema.model_fields)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({"temperature": 1.5}, {"temperature": 1.5}),
            ({"temperature": 0}, {"temperature": 0.0}),
            ({"temperature": 5e-324}, {"temperature": 0.0}),
            ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
            ({"top_k": -1}, {"top_k": 0}),
            ({"top_p": 0}, {"top_p": 1e-6}),
            ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2, "frequency_penalty": 2}),
            ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
            ({"logit_bias": {"5": -100, "0": 1.5}}, {"logit_bias": ((5, -100.0), (0, 1.5))}),
            ({"seed": 7}, {"seed": 7}),
            ({"seed": -1}, {"seed": 2**63 - 1}),
            ({"seed": -(2**63)}, {"seed": 0}),
            ({"logprobs": True}, {"logprobs": 1}),
            ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
            ({"logprobs": False}, {"logprobs": 0}),
            ({"temperature": None, "top_p": None, "top_k": None, "seed": None, "logit_bias": None}, {"top_p": 1.0}),
        ],
    )
    def test_sampling_reaches_the_engine(
        self, http: httpx.Client, engine: ScriptedEngine, given: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        chat(http, max_tokens=1, **given)
        assert {name: getattr(engine.requests[-1].sampling, name) for name in expected} == expected

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({"max_tokens": 3}, {"max_tokens": 3}),
            ({"max_completion_tokens": 4}, {"max_tokens": 4}),
            ({"stop": "x"}, {"stop": ("x",)}),
            ({"stop": ["x", "yz"]}, {"stop": ("x", "yz")}),
            ({"stop": []}, {"stop": ()}),
            ({"ignore_eos": True, "max_tokens": 1}, {"ignore_eos": True}),
            ({"seed": 3, "temperature": 1, "max_tokens": 1}, {"reproducible": True}),
            ({"seed": 3}, {"reproducible": False}),
            ({"duo": {"draft": False, "draft_budget": 5}}, {"draft": False, "draft_budget": 5}),
            ({"duo": {"max_sequences": 3, "trace": True}}, {"max_sequences": 3, "trace": True, "draft": True}),
            ({"duo": {}}, {"max_sequences": None, "draft_budget": None, "trace": False, "draft": True}),
        ],
    )
    def test_options_reach_the_engine(
        self, http: httpx.Client, engine: ScriptedEngine, given: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        chat(http, **given)
        assert {name: getattr(engine.requests[-1], name) for name in expected} == expected

    def test_what_is_not_given_comes_from_the_configuration(self) -> None:
        settings = {"sampling.temperature": 0.3, "sampling.max_tokens": 5, "sampling.stop": ["!"], "sampling.seed": 9}
        engine = ScriptedEngine(settings=settings)
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            chat(http)
        request = engine.requests[-1]
        assert (request.sampling.temperature, request.sampling.seed) == (0.3, 9)
        assert (request.max_tokens, request.stop, request.reproducible) == (5, ("!",), True)

    @pytest.mark.parametrize(
        "given",
        [
            {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"},
            {
                "prompt_cache_key": "k",
                "prompt_cache_retention": "24h",
                "prediction": {"type": "content", "content": "x"},
            },
            {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "function_call": "none", "functions": []},
            {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None, "reasoning_effort": None},
            {"stream": False, "stream_options": None, "n": None, "stop": None, "duo": None, "logprobs": None},
        ],
    )
    def test_what_asks_for_nothing_more_is_accepted(self, http: httpx.Client, given: dict[str, Any]) -> None:
        assert chat(http, **given)["choices"][0]["message"]["content"] == ANSWER

    @pytest.mark.parametrize(
        ("parameter", "value"),
        [
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("tool_choice", "required"),
            ("functions", [{"name": "f"}]),
            ("function_call", {"name": "f"}),
            ("response_format", {"type": "json_object"}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
            ("modalities", ["text", "audio"]),
            ("audio", {"voice": "alloy", "format": "wav"}),
            ("reasoning_effort", "low"),
            ("verbosity", "low"),
            ("web_search_options", {}),
            ("moderation", {"model": "x"}),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, http: httpx.Client, parameter: str, value: Any) -> None:
        error = refused(http, CHAT | {parameter: value})
        assert error.param == parameter
        assert f"{parameter} is not supported by this server" in error.message

    @pytest.mark.parametrize(
        ("body", "parameter", "words"),
        [
            ({"max_tokns": 5}, "max_tokns", "did you mean max_tokens?"),
            ({"zzzzz": 5}, "zzzzz", "known: model, stream"),
            ({"duo": {"drafts": False}}, "duo.drafts", "did you mean draft?"),
            ({"messages": [{"rol": "user"}]}, "messages[0].rol", "did you mean role?"),
            ({"temperature": 2.5}, "temperature", "less than or equal to 2, got 2.5"),
            ({"temperature": "hot"}, "temperature", "got 'hot'"),
            ({"temperature": 10**400}, "temperature", "a number of 1329 bits"),
            ({"top_p": -0.1}, "top_p", "got -0.1"),
            ({"n": 0}, "n", "got 0"),
            ({"n": 9}, "n", "up to 8 answers"),
            ({"max_tokens": 0}, "max_tokens", "got 0"),
            ({"max_tokens": -1}, "max_tokens", "got -1"),
            ({"max_tokens": 1e99}, "max_tokens", "integer, got 1e+99"),
            ({"max_tokens": True}, "max_tokens", "got true"),
            ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "give one of them"),
            ({"seed": 2**63}, "seed", "got 9223372036854775808"),
            ({"stop": ["x"] * 1000}, "stop", "at most 16 items"),
            ({"stop": ""}, "stop[0]", "at least 1 character"),
            ({"stop": "x" * 257}, "stop[0]", "at most 256 characters"),
            ({"stop": [["x"]]}, "stop[0]", "got a list of 1"),
            ({"stop": "\ud83d"}, "stop[0]", "unicode string, got '\\ud83d'"),
            ({"logit_bias": {"293": 1}}, "logit_bias", "token id 293; ids are 0 to 292"),
            ({"logit_bias": {"\ud800": "x"}}, "logit_bias", "is not a token id"),
            ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is not a token id"),
            ({"logit_bias": {"٣": 1}}, "logit_bias", "is not a token id"),
            ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "is not a token id"),
            ({"logit_bias": {"1": 101}}, "logit_bias.1", "got 101"),
            ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
            ({"top_logprobs": 3}, "top_logprobs", "only allowed when logprobs is true"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
            ({"stream_options": {"include_usage": True}}, "stream_options", "when stream is true"),
            ({"duo": {"trace": True}, "n": 2}, "duo.trace", "n=1 only"),
            ({"duo": {"draft_budget": 0}}, "duo.draft_budget", "got 0"),
            ({"messages": []}, "messages", "at least 1 item"),
            ({"messages": None}, "messages", "got null"),
            ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got null"),
            ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
            ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1 item"),
            ({"messages": [{"role": "user", "content": "a\udc00b"}]}, "messages[0].content[0].text", "at character 1"),
            ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "got 'critic'"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "calls no tools"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "messages[0].content",
                "has a part of type 'image_url': this model reads text only",
            ),
            ({"messages": [*USER, {"role": "system", "content": "x"}]}, "messages", "system messages come first"),
            ({"model": None}, "model", "got null"),
            ({"model": 5}, "model", "got 5"),
            ({"\ud800": 1}, "\\ud800", "is not a parameter"),
        ],
        ids=lambda value: (
            str(value)[:30].encode("ascii", "backslashreplace").decode() if isinstance(value, dict) else ""
        ),
    )
    def test_a_wrong_value_is_named(self, http: httpx.Client, body: Any, parameter: str, words: str) -> None:
        error = refused(http, CHAT | body)
        assert error.param == parameter
        assert words in error.message
        assert len(error.message) < 1000

    @pytest.mark.parametrize(
        ("body", "parameter", "words"),
        [
            ({"prompt": ""}, "prompt", "is empty"),
            ({"prompt": []}, "prompt", "is empty"),
            ({"prompt": [[1], []]}, "prompt", "is empty"),
            ({"prompt": None}, "prompt", "got null"),
            ({"prompt": [1, "x"]}, "prompt", "must be a text"),
            ({"prompt": [1.5]}, "prompt", "must be a text"),
            ({"prompt": [True]}, "prompt", "must be a text"),
            ({"prompt": [293]}, "prompt", "token id 293; ids are 0 to 292"),
            ({"prompt": [-1]}, "prompt", "token id -1"),
            ({"prompt": [10**400]}, "prompt", "token id of 1329 bits"),
            ({"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
            ({"prompt": ["x"] * 9}, "prompt", "up to 8 answers"),
            ({"prompt": ["x"] * 3, "n": 3}, "n", "n=3 answers to 3 prompts"),
            ({"best_of": 2}, "best_of", "give the value of n"),
            ({"suffix": "x"}, "suffix", "is not supported"),
            ({"echo": True, "logprobs": 1}, "echo", "those of the prompt are not computed"),
            ({"logprobs": -1}, "logprobs", "got -1"),
            ({"logprobs": True}, "logprobs", "got true"),
            ({"messages": USER}, "messages", "is not a parameter"),
        ],
    )
    def test_a_wrong_value_of_a_completion_is_named(
        self, http: httpx.Client, body: Any, parameter: str, words: str
    ) -> None:
        error = refused(http, TEXT | body, "/v1/completions")
        assert error.param == parameter
        assert words in error.message

    def test_another_models_name_is_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; 'scripted' is") as caught:
            client.chat.completions.create(model="gpt-4", messages=USER)
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")

    @pytest.mark.parametrize(
        ("path", "body", "length"),
        [
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 50}]}, 60),
            ("/v1/completions", TEXT | {"prompt": "x" * 50}, 50),
        ],
    )
    def test_a_prompt_beyond_the_context_says_both_lengths(self, path: str, body: dict[str, Any], length: int) -> None:
        engine = ScriptedEngine(max_context=12)
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            error = refused(http, body, path)
        assert error.code == "context_length_exceeded"
        assert f"maximum context length is 12 tokens, but the prompt has {length}" in error.message

    def test_an_answer_ends_where_the_context_is_full(self) -> None:
        engine = ScriptedEngine(max_context=20)
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            answer = complete(http, **ENDLESS)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 20

    def test_max_tokens_above_the_servers_limit_is_refused(self) -> None:
        engine = ScriptedEngine(settings={"serving.limits.tokens": 5})
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            assert "max_tokens=6 is above this server's limit of 5" in refused(http, CHAT | {"max_tokens": 6}).message
            assert chat(http)["usage"]["completion_tokens"] == 5

    def test_content_may_be_a_list_of_text_parts(self, http: httpx.Client, engine: ScriptedEngine) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        chat(http, messages=[{"role": "user", "content": parts}])
        assert "user\none\ntwo<|im_end|>" in tokenizer().decode(engine.requests[-1].prompt, skip_special=False)

    def test_a_developer_speaks_as_the_system(self, http: httpx.Client, engine: ScriptedEngine) -> None:
        chat(http, messages=[{"role": "developer", "content": "Be brief."}, *USER])
        text = tokenizer().decode(engine.requests[-1].prompt, skip_special=False)
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGreet.<|im_end|>")


class TestCompletions:
    @pytest.mark.parametrize("stream", [False, True])
    def test_several_prompts_have_n_answers_each_in_order(self, http: httpx.Client, stream: bool) -> None:
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

    def test_a_prompt_counts_once_in_the_usage_of_n_answers(self, http: httpx.Client) -> None:
        one, three = complete(http)["usage"], complete(http, n=3)["usage"]
        assert three["prompt_tokens"] == one["prompt_tokens"]
        assert three["completion_tokens"] == 3 * one["completion_tokens"]

    @pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
    def test_a_prompt_may_be_ids(self, http: httpx.Client, engine: ScriptedEngine, prompt: Any) -> None:
        answer = complete(http, prompt=prompt, echo=True, max_tokens=1)
        assert engine.requests[-1].prompt == (5, 6, 7)
        assert answer["choices"][0]["text"].startswith(tokenizer().decode([5, 6, 7]))

    @pytest.mark.parametrize(
        ("stop", "text"),
        [("Two", "Grüße, 世界! "), (["zz", "界! T"], "Grüße, 世"), ("\u200d👧", "Grüße, 世界! Two emoji: 👩")],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_string_is_cut(self, http: httpx.Client, stop: Any, text: str, stream: bool) -> None:
        response = http.post("/v1/completions", json=TEXT | {"stop": stop, "stream": stream})
        shown = events(response.text) if stream else [response.json()]
        assert "".join(event["choices"][0]["text"] for event in shown) == text
        assert shown[-1]["choices"][0]["finish_reason"] == "stop"

    def test_n_answers_are_those_of_consecutive_seeds(self) -> None:
        engine = ScriptedEngine(random_table(VOCAB, seed=3))
        options = {"temperature": 1.5, "max_tokens": 12, "seed": -2}
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            together = [choice["text"] for choice in complete(http, n=4, **options)["choices"]]
            alone = [complete(http, **(options | {"seed": seed}))["choices"][0]["text"] for seed in (-2, -1, 0, 1)]
        assert together == alone
        assert len(set(together)) == 4


class TestLogprobs:
    def test_of_a_chat_cover_the_text_with_their_bytes(self, http: httpx.Client) -> None:
        content = chat(http, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == ANSWER
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)
        assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)
        assert not any("\ufffd" in entry["token"] for entry in content)
        halves = [entry for entry in content if entry["token"].startswith("\\x")]
        assert all(entry["token"] == "".join(f"\\x{byte:02x}" for byte in entry["bytes"]) for entry in halves)
        assert halves

    def test_of_a_completion_have_the_other_shape(self, http: httpx.Client) -> None:
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
    def test_alternatives_are_as_many_as_asked_for(
        self, http: httpx.Client, shown: dict[str, Any], alternatives: int
    ) -> None:
        content = chat(http, **shown)["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {alternatives}

    def test_none_at_all_are_null(self, http: httpx.Client) -> None:
        assert chat(http)["choices"][0]["logprobs"] is None

    def test_streamed_they_are_those_of_the_whole(self, http: httpx.Client) -> None:
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

    def test_the_impossible_is_a_number_too(self) -> None:
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

    def test_they_are_of_the_distribution_before_temperature(self) -> None:
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


class TestTrace:
    @pytest.mark.parametrize("stream", [False, True])
    def test_every_token_has_its_origin(self, http: httpx.Client, stream: bool) -> None:
        response = http.post("/v1/chat/completions", json=CHAT | {"duo": {"trace": True}, "stream": stream})
        shown = events(response.text) if stream else [response.json()]
        tokens = [token for event in shown if "duo" in event for token in event["duo"]["tokens"]]
        assert "".join(token["text"] for token in tokens) == ANSWER
        assert {"accepted", "correction"} <= {token["origin"] for token in tokens}
        assert [token["step"] for token in tokens] == sorted(token["step"] for token in tokens)
        stats = [event["duo"]["stats"] for event in shown if "stats" in event.get("duo", {})]
        assert [figures["target_steps"] > 0 for figures in stats] == [True]

    def test_without_it_nothing_is_added(self, http: httpx.Client) -> None:
        assert "duo" not in chat(http)


class TestEnds:
    """Whatever ends a request: nothing of it goes on, and the client is told why."""

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    def test_a_closed_connection_ends_the_work_within_a_step(self, stream: bool, n: int) -> None:
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
    def test_the_time_limit_ends_a_whole_answer(self, n: int) -> None:
        engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000, settings={"serving.limits.timeout_s": 1.0})
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            error = refused(http, CHAT | ENDLESS | {"n": n}, status=408)
            assert "limit of 1 s for one request" in error.message
            assert not engine.running

    def test_the_official_client_does_not_repeat_what_took_too_long(self) -> None:
        engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000, settings={"serving.limits.timeout_s": 1.0})
        with served(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
            with pytest.raises(openai.APIStatusError, match="not complete within"):
                client.chat.completions.create(
                    model="scripted", messages=USER, max_tokens=1000, extra_body={"ignore_eos": True}
                )
            assert len(engine.requests) == 1

    def test_the_time_limit_ends_a_stream_with_an_error_event(self) -> None:
        engine = ScriptedEngine(pause=lambda: 0.01, max_context=100_000, settings={"serving.limits.timeout_s": 1.0})
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            response = http.post("/v1/chat/completions", json=CHAT | ENDLESS | {"stream": True})
            *_, last = events(response.text)
            assert last["error"]["code"] == "timeout"
            assert "event: error\ndata: " in response.text
            assert not engine.running

    def test_a_failure_in_mid_stream_reaches_the_official_client(self) -> None:
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
    def test_a_failure_before_the_first_token_has_a_status(self, stream: bool) -> None:
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
    def test_what_the_engine_raises_has_its_status(
        self, raised: Exception, status: int, code: str | None, stream: bool
    ) -> None:
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

    def test_a_stream_without_its_end_says_so(self) -> None:
        class Ending(ScriptedEngine):
            async def stream(self, request):
                return
                yield

        with served(Ending()) as url, httpx.Client(base_url=url, timeout=60) as http:
            assert "shutting down" in refused(http, CHAT, status=503).message


class TestGateway:
    def test_a_key_is_asked_for_under_v1_only(self) -> None:
        with served(ScriptedEngine(settings={"serving.api_key": "s3cret"})) as url:
            with httpx.Client(base_url=url, timeout=60) as http:
                assert http.get("/version").status_code == 200
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
                    response = http.post("/v1/chat/completions", content=b"{", headers=headers)
                    assert response.status_code == 401
                    assert response.json()["error"]["code"] == "invalid_api_key"
                    assert "s3cret" not in response.text
                assert http.get("/v1/models", headers={"Authorization": "bearer s3cret"}).status_code == 200
            with openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret") as client:
                assert client.models.list().data[0].id == "scripted"

    def test_the_key_is_asked_for_below_a_prefix_too(self) -> None:
        async def status(root_path: str) -> int:
            api = create_api(ScriptedEngine(settings={"serving.api_key": "s3cret"}))
            transport = httpx.ASGITransport(api, root_path=root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return (await http.get(f"{root_path}/v1/models")).status_code

        assert [asyncio.run(status(prefix)) for prefix in ("", "/llm")] == [401, 401]

    @pytest.mark.parametrize("stated", [True, False])
    def test_a_body_over_the_limit_is_too_large(self, stated: bool) -> None:
        body = json.dumps(CHAT | {"user": "x" * 2000}).encode()
        content = body if stated else (body[i : i + 100] for i in range(0, len(body), 100))
        headers = {"Content-Type": "application/json"}
        engine = ScriptedEngine(settings={"serving.limits.body_bytes": 1024})
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            response = http.post("/v1/chat/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert "limit of 1024 bytes" in response.json()["error"]["message"]
            assert chat(http)["choices"]

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
    def test_a_broken_body_is_refused(self, http: httpx.Client, content: bytes, words: str, path: str) -> None:
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
    def test_a_body_that_is_not_json_is_refused_by_its_type(self, http: httpx.Client, kind: str) -> None:
        response = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind})
        assert response.status_code == 415
        assert "Content-Type: application/json" in response.json()["error"]["message"]

    def test_json_may_state_its_encoding(self, http: httpx.Client) -> None:
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
    def test_what_is_not_there_is_said_in_openais_shape(
        self, http: httpx.Client, method: str, path: str, status: int
    ) -> None:
        response = http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (response.headers.get("allow") is not None) == (status == 405)

    def test_what_is_ignored_may_be_anything(self, http: httpx.Client) -> None:
        content = json.dumps(CHAT | {"user": "deep"}).replace('"deep"', "[" * 900 + "NaN" + "]" * 900)
        response = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 200

    @pytest.mark.parametrize("text", ["\0", "a\0b", "\u2028", "\r\n\r\n", "<|im_end|>", "\ufffd", "🙂" * 40])
    def test_odd_text_is_text(self, http: httpx.Client, text: str) -> None:
        assert chat(http, messages=[{"role": "user", "content": text}])["choices"][0]["message"]["content"] == ANSWER

    def test_a_failure_of_our_own_is_told_without_details(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(ScriptedEngine):
            def snapshot(self):
                raise RuntimeError("secret")

        with served(Broken()) as url, httpx.Client(base_url=url, timeout=60) as http:
            response = http.get("/stats")
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in response.text
        assert "secret" in caplog.text


class TestOperators:
    def test_the_model_is_listed(self, client: openai.OpenAI) -> None:
        (model,) = client.models.list().data
        assert model.id == client.models.retrieve("scripted").id == "scripted"

    def test_metrics_are_prometheus_text(self, http: httpx.Client) -> None:
        response = http.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "duo_ray_running 0.0" in response.text

    def test_stats_are_the_engines(self, http: httpx.Client) -> None:
        assert http.get("/stats").json() == {"running": 0}

    def test_the_version_is_the_packages(self, http: httpx.Client) -> None:
        assert http.get("/version").json() == {"version": "0.1.0"}

    def test_the_documentation_needs_nothing_from_outside(self, http: httpx.Client) -> None:
        page = http.get("/docs").text
        addresses = [part.split('"')[0] for part in page.replace("src=", "href=").split('href="')[1:]]
        assert addresses
        assert all(address.startswith("/") and http.get(address).status_code == 200 for address in addresses)
        assert "http" not in page.replace("http-equiv", "")


class TestHealth:
    def test_a_token_is_generated_without_a_draft(self) -> None:
        engine = ScriptedEngine()
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            assert http.get("/health").json() == {"status": "ok"}
        (probe,) = engine.requests
        assert (probe.max_tokens, probe.draft) == (1, False)

    def test_one_token_answers_many_checks(self) -> None:
        engine = ScriptedEngine()
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            assert {http.get("/health").status_code for _ in range(20)} == {200}
        assert len(engine.requests) == 1

    def test_a_clients_token_is_proof_enough(self) -> None:
        engine = ScriptedEngine()
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            chat(http)
            assert http.get("/health").status_code == 200
        assert len(engine.requests) == 1

    def test_a_model_that_gives_no_token_is_not_healthy(self) -> None:
        engine = ScriptedEngine(not_finite_from(says(ANSWER), 0))
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            responses = [http.get("/health") for _ in range(5)]
        assert {response.status_code for response in responses} == {503}
        assert all("logits is nan" in response.json()["error"]["message"] for response in responses)
        assert len(engine.requests) == 1

    def test_an_engine_that_says_it_cannot_work_is_not_healthy(self) -> None:
        engine = ScriptedEngine()
        engine.health = DuoRayError("the target will not come back")
        with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
            response = http.get("/health")
        assert (response.status_code, response.json()["error"]["message"]) == (503, "the target will not come back")
        assert not engine.requests

    def test_checks_at_the_same_time_share_one_token(self) -> None:
        engine = ScriptedEngine(pause=lambda: 0.05)

        async def check(url: str) -> set[int]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                responses = await asyncio.gather(*(http.get("/health") for _ in range(10)))
                return {response.status_code for response in responses}

        with served(engine) as url:
            assert asyncio.run(check(url)) == {200}
        assert len(engine.requests) == 1
