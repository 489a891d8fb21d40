"""From a checked HTTP body to the requests of the engine: text to ids, defaults, limits, seeds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments.engine import Engine
from deployments.errors import ApiError
from deployments.schema import ChatRequest, CompletionRequest, DuoOptions
from duo_ray.models.tokenizer import TokenizerError
from duo_ray.types import Ids, Request, SamplingParams

NEXT_TO_NOTHING = 1e-6
"""A lower temperature is greedy decoding, and so is top_p = 0, which OpenAI allows: the most probable token alone."""


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as the engine sees it, and what its answer must show."""

    id: str
    requests: tuple[Request, ...]
    """One per choice, in the order of their index."""
    n: int
    """Choices of each prompt: choice i answers prompt i // n."""
    stream: bool
    include_usage: bool
    logprobs: int | None
    """Show the tokens' log probabilities beside those of this many alternatives; None: no log probabilities."""
    echo: tuple[str, ...] = ()
    """For each prompt the text its answers begin with; empty: nothing."""

    @property
    def trace(self) -> bool:
        return self.requests[0].trace


def translate(engine: Engine, body: ChatRequest | CompletionRequest) -> Job:
    """Tokenize and complete a body. Takes seconds for megabytes of text: call it in a thread.

    Raises:
        ApiError: 404 for another model's name; 400 for a parameter beyond this server's limits, a prompt that does not
            fit or a conversation that the chat template refuses.
    """
    if body.model != engine.model_name:
        raise ApiError(
            404,
            f"the model {body.model[:200]!r} is not served here; {engine.model_name!r} is",
            parameter="model",
            code="model_not_found",
        )
    n = body.n or 1
    _check_count(engine, n, 1 if isinstance(body, ChatRequest) else len(body.prompt))
    if isinstance(body, ChatRequest):
        kind, prompts, given = "chatcmpl", [_conversation(engine, body)], body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        echo: tuple[str, ...] = ()
    else:
        kind, prompts, given = "cmpl", [_prompt(engine, prompt) for prompt in body.prompt], body.max_tokens
        logprobs = body.logprobs
        echo = tuple(_text(engine, prompt) for prompt in body.prompt) if body.echo else ()
    name = "messages" if isinstance(body, ChatRequest) else "prompt"
    for ids in prompts:
        _check_length(engine, ids, name)
    job_id = f"{kind}-{secrets.token_hex(12)}"
    sampling = _sampling(engine, body, logprobs)
    max_tokens = _max_tokens(engine, given)
    stop = engine.config.sampling.stop if body.stop is None else tuple(body.stop)
    options = body.duo or DuoOptions()
    requests = tuple(
        Request(
            request_id=f"{job_id}-{prompt * n + answer}",
            prompt=ids,
            sampling=replace(sampling, seed=(sampling.seed + answer) % 2**63),
            max_tokens=max_tokens,
            stop=stop,
            ignore_eos=bool(body.ignore_eos),
            draft=options.draft is not False,
            reproducible=_seeded(engine, body) and not sampling.greedy,
            draft_budget=options.draft_budget,
            max_sequences=options.max_sequences,
            trace=bool(options.trace),
        )
        for prompt, ids in enumerate(prompts)
        for answer in range(n)
    )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Job(job_id, requests, n, bool(body.stream), usage, logprobs, echo)


def _conversation(engine: Engine, body: ChatRequest) -> Ids:
    messages = [
        {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text, "name": turn.name}
        for turn in body.messages
    ]
    try:
        return tuple(engine.tokenizer.chat(messages))
    except TokenizerError as error:
        raise ApiError(400, str(error), parameter="messages") from None


def _prompt(engine: Engine, prompt: str | list[int]) -> Ids:
    vocab_size = engine.tokenizer.vocab_size
    ids = tuple(engine.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    if not ids:
        raise ApiError(400, "prompt is empty: give at least one token", parameter="prompt")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400, f"prompt holds the token id {_short(wrong)}; ids are 0 to {vocab_size - 1}", parameter="prompt"
        )
    return ids


def _text(engine: Engine, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt, skip_special=False)


def _check_count(engine: Engine, n: int, prompts: int) -> None:
    serving = engine.config.serving
    # More than slots and queue hold would be refused for ever, however idle the server.
    most = min(serving.limits.n, engine.config.models.target.slots + serving.queue)
    if n * prompts > most:
        asked = f"n={n}" if prompts == 1 else f"n={n} answers to {prompts} prompts"
        parameter = "n" if n > 1 else "prompt"
        raise ApiError(400, f"{asked}: this server gives up to {most} answers to one request", parameter=parameter)


def _check_length(engine: Engine, ids: Ids, parameter: str) -> None:
    if len(ids) >= engine.max_context:
        raise ApiError(
            400,
            f"This model's maximum context length is {engine.max_context} tokens, but the prompt has {len(ids)} "
            "and the answer needs at least one more: shorten the prompt",
            parameter=parameter,
            code="context_length_exceeded",
        )


def _max_tokens(engine: Engine, given: int | None) -> int:
    most = engine.config.serving.limits.tokens
    if given is None:
        default = engine.config.sampling.max_tokens
        return default if most is None else min(default, most)
    if most is not None and given > most:
        raise ApiError(400, f"max_tokens={given} is above this server's limit of {most}", parameter="max_tokens")
    return given


def _seeded(engine: Engine, body: ChatRequest | CompletionRequest) -> bool:
    return body.seed is not None or engine.config.sampling.seed is not None


def _sampling(engine: Engine, body: ChatRequest | CompletionRequest, logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": 0.0 if body.temperature is not None and body.temperature < NEXT_TO_NOTHING else body.temperature,
        "top_p": None if body.top_p is None else max(body.top_p, NEXT_TO_NOTHING),
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": None if body.seed is None else body.seed % 2**63,
        "logit_bias": _biases(engine, body.logit_bias or {}),
        # The log probability of the token itself comes with any number of alternatives but none.
        "logprobs": 0 if logprobs is None else max(1, logprobs),
    }
    defaults = engine.config.sampling_params(seed=secrets.randbits(62))
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _biases(engine: Engine, given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    vocab_size = engine.tokenizer.vocab_size
    wrong = next((key for key in given if int(key) >= vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400, f"logit_bias holds the token id {wrong}; ids are 0 to {vocab_size - 1}", parameter="logit_bias"
        )
    return tuple((int(key), bias) for key, bias in given.items())


def _short(number: int) -> str:
    return str(number) if number.bit_length() <= 64 else f"of {number.bit_length()} bits"
