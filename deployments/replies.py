"""Answers in OpenAI's two shapes, chat and completion, as a whole or chunk by chunk."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from deployments.translate import Job
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import Delta, Finished, Token, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""What OpenAI reports for the impossible: JSON has no infinity."""

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(TypedDict):
    """llama.cpp's names. Over several choices counts are sums and times those of the slowest."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class TracedToken(TypedDict):
    text: str
    origin: Literal["accepted", "correction", "bonus", "plain"]
    step: int


class Trace(TypedDict):
    tokens: list[TracedToken]
    stats: NotRequired[dict[str, object]]
    """At the end."""


class Alternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    content: list[TokenEntry]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings
    duo: NotRequired[Trace]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Reply(ABC):
    """The answer to one job, fed with what the engine gives."""

    kind: str
    chunk_kind: str

    def __init__(self, job: Job, *, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._tokens: list[list[Token]] = [[] for _ in job.requests]
        self._ends: dict[int, Finished] = {}

    def add(self, index: int, item: Delta | Finished) -> None:
        """Take an item of choice `index`, to be shown by `whole`."""
        if isinstance(item, Finished):
            self._ends[index] = item
        else:
            self._tokens[index] += item.tokens

    def whole(self) -> dict[str, Any]:
        """The complete answer; every choice has finished."""
        choices = []
        for index, tokens in enumerate(self._tokens):
            text = self._echo(index) + "".join(token.text for token in tokens)
            choices.append(self._choice(index, text, tokens, str(self._ends[index].reason)))
        body = self._head(self.kind) | {"choices": choices, "usage": self._usage(), "timings": self._timings()}
        if self._job.trace:
            body["duo"] = _trace(self._tokens[0], self._ends[0])
        return body

    def chunks(self, index: int, item: Delta | Finished) -> Iterator[dict[str, Any]]:
        """The chunks that show an item of choice `index`: at most one with text."""
        if index not in self._opened:
            self._opened.add(index)
            yield from (self._chunk(choice) for choice in self._opening(index))
        if isinstance(item, Delta):
            text = "".join(token.text for token in item.tokens)
            if text or self._job.logprobs is not None or self._job.trace:
                chunk = self._chunk(self._piece(index, text, item.tokens))
                yield chunk | {"duo": _trace(item.tokens)} if self._job.trace else chunk
            return
        self._ends[index] = item
        chunk = self._chunk(self._closing(index, str(item.reason)))
        if self._job.trace:
            chunk["duo"] = _trace((), item)
        last = len(self._ends) == len(self._job.requests)
        if last and self._job.include_usage:
            yield chunk
            chunk = self._head(self.chunk_kind) | {"choices": [], "usage": self._usage()}
        yield chunk | {"timings": self._timings()} if last else chunk

    @abstractmethod
    def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str) -> dict[str, Any]:
        """A choice of the whole answer."""

    @abstractmethod
    def _opening(self, index: int) -> list[dict[str, Any]]:
        """A chunk's choice that comes before any text, if there is one."""

    @abstractmethod
    def _piece(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        """A chunk's choice with the text of `tokens`."""

    @abstractmethod
    def _closing(self, index: int, reason: str) -> dict[str, Any]:
        """The last chunk's choice."""

    def _echo(self, index: int) -> str:
        return self._job.echo[index // self._job.n] if self._job.echo else ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._job.include_usage else {}
        return self._head(self.chunk_kind) | {"choices": [choice]} | usage

    def _usage(self) -> Usage:
        firsts = [self._ends[index] for index in range(0, len(self._ends), self._job.n)]
        prompt = sum(end.prompt_tokens for end in firsts)
        completion = sum(end.completion_tokens for end in self._ends.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(_cached(end) for end in firsts)},
        }

    def _timings(self) -> Timings:
        ends = list(self._ends.values())
        cached = sum(_cached(end) for end in ends)
        prompt_n = sum(end.prompt_tokens for end in ends) - cached
        predicted_n = sum(end.completion_tokens for end in ends)
        prompt_ms = max(_figure(end, "ttft_ms") - _figure(end, "queued_ms") for end in ends)
        predicted_ms = max(_figure(end, "decode_ms") for end in ends)
        return {
            "cache_n": cached,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
            "prompt_per_second": _ratio(1000 * prompt_n, prompt_ms),
            "predicted_n": predicted_n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
            "predicted_per_second": _ratio(1000 * predicted_n, predicted_ms),
            "draft_n": sum(int(_figure(end, "draft_tokens")) for end in ends),
            "draft_n_accepted": sum(int(_figure(end, "accepted_tokens")) for end in ends),
        }

    # --- log probabilities

    def _shown(self, index: int, tokens: Sequence[Token]) -> list[tuple[Token, TokenLogprobs]]:
        """The tokens whose log probabilities are shown: all but the one that ended the text."""
        hidden = frozenset() if self._job.requests[index].ignore_eos else self._tokenizer.eos_ids
        return [(t, t.logprobs) for t in tokens if t.logprobs is not None and t.id not in hidden]

    def _spelt(self, token: int, prefix: str = "") -> str:
        """A token's text; the bytes of half a character as OpenAI writes them, `\\xf0\\x9f`."""
        piece = self._tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in piece)

    def _alternative(self, token: int, logprob: float) -> Alternative:
        return {
            "token": self._spelt(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.piece(token)),
        }


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        logprobs = self._logprobs(index, tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _piece(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens)
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def _closing(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if self._job.logprobs is None:
            return None
        content: list[TokenEntry] = [
            {
                **self._alternative(token.id, logprobs.logprob),
                "top_logprobs": [self._alternative(*other) for other in logprobs.top[: self._job.logprobs]],
            }
            for token, logprobs in self._shown(index, tokens)
        ]
        return {"content": content}


class TextReply(Reply):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job, *, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(job, model=model, tokenizer=tokenizer)
        self._lengths = [0] * len(job.requests)
        """Of the text so far."""

    def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": reason}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index)
        return [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def _piece(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": None}

    def _closing(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> TextLogprobs | None:
        if self._job.logprobs is None:
            return None
        found: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in self._shown(index, tokens):
            name, logprob = self._spelt(token.id, "bytes:"), max(logprobs.logprob, LOWEST_LOGPROB)
            others = logprobs.top[: self._job.logprobs]
            found["tokens"].append(name)
            found["token_logprobs"].append(logprob)
            # OpenAI's list holds the token itself also when it is not among the most probable.
            found["top_logprobs"].append(
                {self._spelt(other, "bytes:"): max(value, LOWEST_LOGPROB) for other, value in others} | {name: logprob}
            )
            found["text_offset"].append(self._lengths[index])
            self._lengths[index] += len(token.text)
        return found


def _trace(tokens: Sequence[Token], end: Finished | None = None) -> Trace:
    traced: list[TracedToken] = [
        {"text": token.text, "origin": token.origin.value, "step": token.step} for token in tokens
    ]
    return {"tokens": traced} if end is None else {"tokens": traced, "stats": end.stats}


def _figure(end: Finished, name: str) -> float:
    return cast(float, end.stats[name])


def _cached(end: Finished) -> int:
    return cast(int, end.stats.get("cached_tokens", 0))


def _ratio(value: float, divisor: float) -> float:
    return round(value / divisor, 3) if divisor else 0.0
