"""The official `openai` package against the running service: real models, Ray Serve, drafting."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch

from duo_ray.models.tokenizer import Tokenizer
from tests.deployments.conftest import Service
from tests.deployments.test_app import one_cancelled, wait_for_load

pytestmark = [pytest.mark.ray, pytest.mark.models]

USER = [{"role": "user", "content": "Name three colours of the rainbow and what they stand for."}]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def text_of(client: openai.OpenAI, messages: list[dict[str, str]] = USER, **options: object) -> str:
    answer = client.chat.completions.create(model="demo", messages=messages, **options)
    return answer.choices[0].message.content


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_greedy_text_is_the_same_whole_streamed_and_without_a_draft(client: openai.OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 48}
    whole = text_of(client, **options)
    chunks = client.chat.completions.create(model="demo", messages=USER, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert text_of(client, extra_body={"duo": {"draft": False}}, **options) == whole


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "max_tokens": 24}
    texts = [text_of(client, seed=seed, **options) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_n_answers_are_those_of_the_next_seeds(client: openai.OpenAI) -> None:
    """By the target alone: what drafts write beside each other is rounded in another way (docs/decisions/002)."""
    options = {"temperature": 1.0, "max_tokens": 24, "extra_body": {"duo": {"draft": False}}}
    alone = [text_of(client, seed=seed, **options) for seed in (7, 8)]
    together = client.chat.completions.create(model="demo", messages=USER, seed=7, n=2, **options)
    assert [choice.message.content for choice in together.choices] == alone


def test_a_character_split_over_tokens_is_never_streamed_in_halves(client: openai.OpenAI) -> None:
    """Case 20; the last one is cut by max_tokens."""
    options = {"model": "demo", "prompt": "😀😂🎉🔥 " * 6 + "😀😂", "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(**options).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
    assert "".join(pieces) == whole
    assert whole == "🔥" * 10


def test_the_turn_before_is_read_again_by_neither_model(client: openai.OpenAI) -> None:
    options = {"model": "demo", "temperature": 0, "max_tokens": 24, "extra_body": {"duo": {"trace": True}}}
    first = client.chat.completions.create(messages=USER, **options)
    turn = {"role": "assistant", "content": first.choices[0].message.content}
    second = client.chat.completions.create(messages=[*USER, turn, *USER], **options)
    shared = first.usage.prompt_tokens
    assert shared <= second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert shared <= second.duo["stats"]["draft_cached_tokens"] < second.usage.prompt_tokens
    assert second.timings["prompt_n"] == second.usage.prompt_tokens - second.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.95, "seed": 5}], ids=["greedy", "sampled"]
)
def test_logprobs_are_the_targets_own(client: openai.OpenAI, demo_target: Path, options: dict[str, float]) -> None:
    """Case 21: under drafting, against transformers' own log-softmax over the same ids."""
    from transformers import AutoModelForCausalLM

    answer = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=40, logprobs=True, top_logprobs=5, **options
    )
    assert answer.timings["draft_n_accepted"] > 0
    content = answer.choices[0].logprobs.content
    tokenizer = Tokenizer.load(demo_target)
    id_of = {tokenizer.piece(token): token for token in reversed(range(tokenizer.vocab_size))}
    prompt = tokenizer.chat(USER)
    ids = [id_of[bytes(entry.bytes)] for entry in content]
    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    for row, token, entry in zip(expected, ids, content, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
        wanted = row.topk(5)
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(wanted.values.tolist(), abs=1e-3)
        assert [id_of[bytes(other.bytes)] for other in entry.top_logprobs] == wanted.indices.tolist()


def test_a_connection_closed_before_a_whole_answer_ends_the_work_on_it(service: Service) -> None:
    """Case 18, without a stream: nothing was sent yet that could fail."""
    body = json.dumps({"model": "demo", "messages": USER, "max_tokens": 560, "ignore_eos": True}).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    url = httpx.URL(service.url)
    with one_cancelled(service.url), socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        wait_for_load(service.url, 1, 0)


def test_errors_are_those_of_the_official_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.chat.completions.create(model="gpt-4", messages=USER)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 640 tokens"):
        client.completions.create(model="demo", prompt="word " * 2000)
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model="demo", messages=USER, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_a_response_has_one_request_id(service: Service) -> None:
    headers = httpx.get(f"{service.url}/v1/models").headers
    assert len(headers.get_list("x-request-id")) == 1


def test_the_documentation_is_served_from_here(service: Service) -> None:
    page = httpx.get(f"{service.url}/docs").text
    assert httpx.get(f"{service.url}/static-offline-docs/swagger-ui-bundle.js").status_code == 200
    assert "https://" not in page
