"""Read the messages of a conversation back from a prompt, so that they can be put into another model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import DuoRayError, Ids

Messages = list[dict[str, str]]

_PROBES: tuple[tuple[str, ...], ...] = (("user", "assistant", "user"), ("system", "user"))
_START, _ANSWER = "", "answer"


class ConversationReader:
    """Finds the messages in a prompt that was made by a tokenizer's chat template.

    What the template puts between two messages is learned by rendering a few. Whatever is read is rendered again, and
    counts only when it gives the very same ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._between: dict[tuple[str, str], str] = {}
        for roles in _PROBES if tokenizer.has_chat_template else ():
            self._learn(roles)

    def _learn(self, roles: Sequence[str]) -> None:
        contents = [f"qz{i}zq" for i in range(len(roles))]
        try:
            rest = self._tokenizer.render(
                [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            )
        except DuoRayError:
            return  # a template without this role
        before = _START
        for role, content in zip(roles, contents, strict=True):
            between, found, rest = rest.partition(content)
            if not found:
                return
            self._between.setdefault((before, role), between)
            before = role
        self._between.setdefault((before, _ANSWER), rest)

    def read(self, ids: Ids) -> Messages | None:
        """The messages of a prompt that ends where the assistant is to answer; None for any other text."""
        text = self._tokenizer.decode(ids, skip_special=False)
        openings = sorted((len(between), role) for (before, role), between in self._between.items() if before == _START)
        for length, role in openings:  # the shortest first: it leaves a default system message to be read
            if text.startswith(self._between[_START, role]):
                messages = self._split(text[length:], role)
                if messages is not None and self._renders(messages, ids):
                    return messages
        return None

    def _split(self, text: str, role: str) -> Messages | None:
        messages: Messages = []
        while True:
            found = [
                (at, -len(between), after)
                for (before, after), between in self._between.items()
                if before == role and after != _ANSWER and between and (at := text.find(between)) >= 0
            ]
            at, length, after = min(found, default=(len(text), 0, ""))
            last = self._between.get((role, _ANSWER))
            if last and text.endswith(last) and len(text) - len(last) <= at:
                return [*messages, {"role": role, "content": text[: -len(last)]}]
            if not found:
                return None
            messages.append({"role": role, "content": text[:at]})
            text, role = text[at - length :], after

    def _renders(self, messages: Sequence[Mapping[str, Any]], ids: Ids) -> bool:
        try:
            return tuple(self._tokenizer.chat(messages)) == tuple(ids)
        except DuoRayError:
            return False
