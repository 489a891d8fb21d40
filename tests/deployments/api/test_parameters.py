"""What may be asked for, what of it reaches the engine, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

from deployments.schema import ChatRequest, CompletionRequest
from tests.deployments.api.calls import CHAT, ENDLESS, TEXT, USER, chat, complete, refused
from tests.deployments.scripted import ANSWER, ScriptedEngine, served, tokenizer


@pytest.mark.parametrize(
    ("schema", "official"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, CompletionCreateParamsNonStreaming),
    ],
)
def test_every_official_parameter_is_known(schema: type, official: type) -> None:
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
    http: httpx.Client, engine: ScriptedEngine, given: dict[str, Any], expected: dict[str, Any]
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
    http: httpx.Client, engine: ScriptedEngine, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    chat(http, **given)
    assert {name: getattr(engine.requests[-1], name) for name in expected} == expected


def test_what_is_not_given_comes_from_the_configuration() -> None:
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
def test_what_asks_for_nothing_more_is_accepted(http: httpx.Client, given: dict[str, Any]) -> None:
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
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, parameter: str, value: Any) -> None:
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
    ids=lambda value: str(value)[:30].encode("ascii", "backslashreplace").decode() if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_named(http: httpx.Client, body: Any, parameter: str, words: str) -> None:
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
def test_a_wrong_value_of_a_completion_is_named(http: httpx.Client, body: Any, parameter: str, words: str) -> None:
    error = refused(http, TEXT | body, "/v1/completions")
    assert error.param == parameter
    assert words in error.message


def test_another_models_name_is_not_found(client: openai.OpenAI) -> None:
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
def test_a_prompt_beyond_the_context_says_both_lengths(path: str, body: dict[str, Any], length: int) -> None:
    engine = ScriptedEngine(max_context=12)
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        error = refused(http, body, path)
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is 12 tokens, but the prompt has {length}" in error.message


def test_an_answer_ends_where_the_context_is_full() -> None:
    engine = ScriptedEngine(max_context=20)
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        answer = complete(http, **ENDLESS)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 20


def test_max_tokens_above_the_servers_limit_is_refused() -> None:
    engine = ScriptedEngine(settings={"serving.limits.tokens": 5})
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert "max_tokens=6 is above this server's limit of 5" in refused(http, CHAT | {"max_tokens": 6}).message
        assert chat(http)["usage"]["completion_tokens"] == 5


def test_content_may_be_a_list_of_text_parts(http: httpx.Client, engine: ScriptedEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(http, messages=[{"role": "user", "content": parts}])
    assert "user\none\ntwo<|im_end|>" in tokenizer().decode(engine.requests[-1].prompt, skip_special=False)


def test_a_developer_speaks_as_the_system(http: httpx.Client, engine: ScriptedEngine) -> None:
    chat(http, messages=[{"role": "developer", "content": "Be brief."}, *USER])
    text = tokenizer().decode(engine.requests[-1].prompt, skip_special=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGreet.<|im_end|>")


def test_more_answers_than_the_server_ever_holds_at_once_are_a_bad_request_not_an_overload() -> None:
    engine = ScriptedEngine(settings={"models.target.slots": 2, "serving.queue": 1})
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert "up to 3 answers" in refused(http, CHAT | {"n": 4}).message
        assert len(chat(http, n=3)["choices"]) == 3
