"""What of a request's output is final: where it ends, and which text may be shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from duo_ray.core.context import IdLog
from duo_ray.types import FinishReason, Origin, Request, Token, TokenLogprobs


class Detokenizer(Protocol):
    """Turns ids into text one by one; text that a later id could still change is held back."""

    def push(self, token: int) -> str:
        """Text that became final with this token ("" while a character is incomplete)."""
        ...


@dataclass(slots=True)
class _Held:
    """A token whose text may still turn out to belong to a stop string; it covers text[start:end]."""

    token: Token
    start: int
    end: int


class Generation:
    """The committed ids of one request and the events that end it.

    EOS, a stop string, max_tokens: whichever comes first in the text ends the request, wherever in a block it falls;
    ids after it are not committed. A stop string is cut from the text and may be spread over any number of tokens. On
    the same token a stop wins over the length limit. A character that the end cuts in half is not shown.
    """

    def __init__(
        self, request: Request, *, eos_ids: frozenset[int], detokenizer: Detokenizer, max_tokens: int | None = None
    ) -> None:
        """`max_tokens` overrides the request's (room left in the context)."""
        self.request = request
        self.log = IdLog(request.prompt)
        self.finish_reason: FinishReason | None = None
        self._max_tokens = request.max_tokens if max_tokens is None else min(max_tokens, request.max_tokens)
        self.eos_ids = frozenset() if request.ignore_eos else eos_ids
        self._detokenizer = detokenizer
        self._text = ""
        self._held: deque[_Held] = deque()

    @property
    def token_ids(self) -> list[int]:
        """Generated ids, the one that ended the request included."""
        return self.log.ids[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return len(self.request.prompt) + self._max_tokens - len(self.log)

    def commit(
        self, ids: tuple[int, ...], origin: Origin, step: int, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> list[Token]:
        """Append ids up to the event that ends the request; returns the tokens whose text is now certain."""
        for index, token in enumerate(ids):
            if self.finish_reason is not None:
                break
            self.log.extend((token,))
            start = len(self._text)
            cut = None
            if token in self.eos_ids:
                self.finish_reason = FinishReason.STOP
            else:
                self._text += self._detokenizer.push(token)
                cut = self._find_stop(start)
                if cut is not None:
                    self.finish_reason = FinishReason.STOP
                elif self.remaining == 0:
                    self.finish_reason = FinishReason.LENGTH
            entry = logprobs[index] if logprobs else None
            self._held.append(_Held(Token(token, "", origin, step, entry), start, len(self._text)))
            if cut is not None:
                self._text = self._text[:cut]
        return list(self._release())

    def _find_stop(self, previous: int) -> int | None:
        """Where the earliest stop string begins that the text beyond `previous` completes."""
        found = (self._text.find(stop, max(0, previous - len(stop) + 1)) for stop in self.request.stop)
        return min((at for at in found if at >= 0), default=None)

    def _certain(self) -> int:
        """Length of the text that cannot become part of a stop string any more."""
        if self.finish_reason is not None or not self.request.stop:
            return len(self._text)
        longest = max(len(stop) for stop in self.request.stop) - 1
        for start in range(max(0, len(self._text) - longest), len(self._text)):
            tail = self._text[start:]
            if any(stop.startswith(tail) for stop in self.request.stop):
                return start
        return len(self._text)

    def _release(self) -> Iterator[Token]:
        certain = self._certain()
        while self._held and (self.finish_reason is not None or self._held[0].end <= certain):
            held = self._held.popleft()
            yield replace(held.token, text=self._text[held.start : min(held.end, certain)])
