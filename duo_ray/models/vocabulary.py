"""What two vocabularies have in common, and how a draft that speaks other tokens is to be used.

Tokens are compared as the bytes they stand for: byte-level alphabets, sentencepiece's U+2581, byte tokens (<0xE2>) and
WordPiece's ## are undone first. Special tokens are compared by name, and only with special tokens.

The two ways to use a draft with another vocabulary are token-level intersection and string-level exact match of
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(arXiv 2502.05202): TLI and SLEM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.context import common_prefix
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import DuoRayError, Ids

ENOUGH_MASS = 0.9
"""Share of the draft's probability that the common tokens must carry for `intersection` to be chosen."""

SAMPLE = """The harbour was quiet that morning. Two fishermen, Anna and her brother, repaired their nets on the pier
while gulls circled overhead. "We should leave before noon," she said; "the forecast isn't good."

1. Check the engine and the fuel (at least 40 litres).
2. Load water, bread and the radio.

def distance(points):
    total = 0.0
    for (x1, y1), (x2, y2) in zip(points, points[1:]):
        total += ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    return total

In 1869 the Suez Canal shortened the journey between Europe and Asia by about 7,000 kilometres. Why did it take so long
to build, and who paid for it?
"""
"""Prose, a list, code and numbers: what common tokens are weighed on, and tokens per byte are counted."""


class VocabularyError(DuoRayError):
    """The draft's vocabulary does not allow what the configuration asks for."""


class Vocabulary(Protocol):
    """A model's token ids as bytes, and text as its ids."""

    size: int
    bos: int | None
    """The id that is put before every text; None where the model wants none."""
    ends: tuple[int, ...]
    """Ids that end a text, the usual one first."""

    @property
    def drops_first_space(self) -> bool:
        """Whether a space that the first token starts with is no part of the text."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to a text; the name of a special one. Empty for an id that is not in use."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token such as EOS or a chat marker, no text."""
        ...

    def opening(self, text: str) -> list[int]:
        """Ids of a text that stands at the start, without BOS; names of special tokens are spelled out."""
        ...

    def continuation(self, text: str) -> list[int]:
        """Ids of a text that continues another; names of special tokens are spelled out."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """Ids of a conversation by the model's chat template; None without one, or where it refuses."""
        ...


class Strategy(StrEnum):
    """How a draft's tokens become the target's."""

    SAME = "same"
    """Ids mean the same on both sides."""
    INTERSECTION = "intersection"
    """The draft proposes only tokens that both vocabularies have (TLI)."""
    STRING = "string"
    """The draft's text is encoded again in the target's tokens (SLEM)."""


_METHODS = {
    Strategy.SAME: "id",
    Strategy.INTERSECTION: "token (models.draft.vocabulary: intersection)",
    Strategy.STRING: "text (models.draft.vocabulary: string)",
}


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    """What two vocabularies have in common."""

    target_size: int
    """Ids of the target's tokenizer."""
    draft_size: int
    same_ids: int
    """Ids that stand for the same bytes on both sides."""
    first_difference: str | None
    """The first id in use that does not; None where there is none."""
    shared: int
    """Tokens of the draft that the target has too, under whatever id."""
    target_markers: tuple[str, ...]
    """Special tokens of the target's chat template."""
    draft_markers: tuple[str, ...]
    """Special tokens of the draft's chat template."""

    @property
    def same(self) -> bool:
        return self.first_difference is None


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The strategy a draft is used with, and why."""

    report: VocabularyReport
    strategy: Strategy
    why: str
    mass: float | None = None
    """Share of the draft's probability on the shared tokens, over `SAMPLE`; None where it was not measured."""
    tokens_per_target_token: float = 1.0
    """Draft tokens for one target token, over `SAMPLE`."""

    def as_dict(self) -> dict[str, object]:
        """What `duo-ray vocab` reports."""
        report = self.report
        return {
            "target_ids": report.target_size,
            "draft_ids": report.draft_size,
            "padding_of_the_draft": max(0, report.draft_size - report.target_size) if report.same else 0,
            "same_ids": report.same_ids,
            "first_difference": report.first_difference,
            "common_tokens": report.shared,
            "probability_on_them": None if self.mass is None else round(self.mass, 4),
            "draft_tokens_per_target_token": round(self.tokens_per_target_token, 3),
            "chat_markers_of_the_target": list(report.target_markers),
            "chat_markers_of_the_draft": list(report.draft_markers),
            "strategy": str(self.strategy),
            "why": self.why,
        }

    def describe(self) -> str:
        """For people: what was done, and why."""
        difference = self.report.first_difference
        found = "the same vocabulary" if difference is None else f"different vocabularies ({difference})"
        return f"draft and target have {found}; they are matched by {_METHODS[self.strategy]}: {self.why}"


class TokenizerVocabulary:
    """The vocabulary of a `Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.ends = tuple(sorted(tokenizer.eos_ids, key=lambda token: (token != tokenizer.eos_id, token)))
        self.bos = tokenizer.bos_id if tokenizer.encode("a")[:1] == [tokenizer.bos_id] else None
        self.drops_first_space = bool(tokenizer.joining.first_without_spaces or tokenizer.joining.strip)
        self.opening = tokenizer.encode_spelled
        self.continuation = Continuation(tokenizer.encode_spelled, tokenizer.piece)
        self.is_special = tokenizer.is_special

    def piece(self, token: int) -> bytes:
        """See `Vocabulary.piece`."""
        if self._tokenizer.is_special(token):
            return (self._tokenizer.text_of(token) or "").encode()
        return self._tokenizer.piece(token)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        return chat_or_none(self._tokenizer.chat, messages) if self._tokenizer.has_chat_template else None


class Continuation:
    """Encodes a text as the continuation of another with an encoder that takes every text for a whole one.

    Where the encoder puts a space before a text, it is given a short lead-in first, whose ids are dropped again.
    """

    def __init__(self, encode: Callable[[str], list[int]], piece: Callable[[int], bytes]) -> None:
        self._encode = encode
        prefixed = b"".join(piece(token) for token in encode("a")) != b"a"
        self._lead_ins = [(text, encode(text)) for text in (".", "|", "\n", "a") if prefixed]

    def __call__(self, text: str) -> list[int]:
        for lead_in, ids in self._lead_ins:
            found = self._encode(lead_in + text)
            if found[: len(ids)] == ids:
                return found[len(ids) :]
        return self._encode(text)


def chat_or_none(
    chat: Callable[[Sequence[Mapping[str, Any]]], list[int]], messages: Sequence[Mapping[str, Any]]
) -> list[int] | None:
    """Ids of a conversation. A template without a system role gets the system's text before the first message's."""
    for tried in (messages, _without_system(messages)):
        try:
            if tried:
                return chat(tried)
        except DuoRayError:
            continue
    return None


def chat_opening(vocabulary: Vocabulary) -> Ids:
    """The ids with which every chat without a system message begins; empty where there is no chat template."""
    chats = [vocabulary.chat([{"role": "user", "content": word}]) or [] for word in ("Hello", "Why")]
    return tuple(chats[0][: common_prefix(*chats)])


def _without_system(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if len(messages) < 2 or messages[0]["role"] != "system":
        return ()
    system, first, *others = messages
    return ({**first, "content": f"{system['content']}\n\n{first['content']}"}, *others)


class Counterparts:
    """Which token of the draft is which token of the target.

    Attributes:
        to_target: `[draft.size]`, the target's id for each draft id, -1 where it has none. One to one.
        to_draft: the inverse.
        target_bytes, draft_bytes: the tokens that stand for one byte, for text that is no UTF-8.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        ours = _by_piece(target, range(target.size))
        theirs = _by_piece(draft, range(draft.size))
        self.to_target: NDArray[np.int32] = np.full(draft.size, -1, np.int32)
        for piece, token in theirs.items():
            self.to_target[token] = ours.get(piece, -1)
        self.target_bytes, self.draft_bytes = _single_bytes(ours), _single_bytes(theirs)
        self.to_draft = {int(self.to_target[token]): int(token) for token in self.shared}
        for end, draft_end in zip(target.ends[:1], draft.ends[:1], strict=False):
            # The usual end of a text means the same, whatever it is called.
            if end not in self.to_draft and self.to_target[draft_end] < 0:
                self.to_target[draft_end], self.to_draft[end] = end, draft_end

    @property
    def shared(self) -> NDArray[np.int32]:
        """Draft ids that the target has too."""
        return np.flatnonzero(self.to_target >= 0).astype(np.int32)


Piece = tuple[bool, bytes]
"""(special, bytes): what makes two tokens the same."""


def _by_piece(vocabulary: Vocabulary, ids: Iterable[int]) -> dict[Piece, int]:
    """Of several tokens with the same bytes the one that text is encoded with: byte tokens only stand in."""
    found: dict[Piece, int] = {}
    for token in ids:
        piece = vocabulary.piece(token)
        key = (vocabulary.is_special(token), piece)
        if piece and (key not in found or (len(piece) == 1 and [token] == _plain(vocabulary, piece))):
            found[key] = token
    return found


def _single_bytes(tokens: Mapping[Piece, int]) -> dict[int, int]:
    return {piece[0]: token for (special, piece), token in tokens.items() if len(piece) == 1 and not special}


def _plain(vocabulary: Vocabulary, piece: bytes) -> list[int]:
    return vocabulary.continuation(piece.decode()) if piece.isascii() else []


def compare(target: Vocabulary, draft: Vocabulary) -> tuple[VocabularyReport, Counterparts | None]:
    """What the two have in common, id by id and, unless all ids are the same, token by token.

    Padding behind either's ids is no difference.
    """
    same, first = 0, None
    for token in range(target.size):
        ours, theirs = target.piece(token), draft.piece(token)
        if ours == theirs:
            same += bool(ours)
        elif ours and (theirs or token >= draft.size) and first is None:
            first = f"id {token} is {_shown(theirs)} to the draft and {_shown(ours)} to the target"
    counterparts = None if first is None else Counterparts(target, draft)
    report = VocabularyReport(
        target_size=target.size,
        draft_size=draft.size,
        same_ids=same,
        first_difference=first,
        shared=same if counterparts is None else len(counterparts.shared),
        target_markers=_markers(target),
        draft_markers=_markers(draft),
    )
    return report, counterparts


def _shown(piece: bytes) -> str:
    return repr(piece.decode(errors="backslashreplace")) if piece else "not in use"


def _markers(vocabulary: Vocabulary) -> tuple[str, ...]:
    ids = vocabulary.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) or []
    special = dict.fromkeys(token for token in ids if vocabulary.is_special(token))
    return tuple(vocabulary.piece(token).decode(errors="replace") for token in special)


def tokens_per_token(target: Vocabulary, draft: Vocabulary) -> float:
    """How many draft tokens a target token takes, over `SAMPLE`."""
    return len(draft.opening(SAMPLE)) / len(target.opening(SAMPLE))


def shared_mass(logits: Iterable[NDArray[np.floating]], shared: NDArray[np.int32]) -> float:
    """Mean share of the probability that the shared tokens carry; `logits` are rows `[draft.size]` along a text."""
    shares = []
    for row in logits:
        weights = np.exp(row - row.max())
        shares.append(float(weights[shared].sum() / weights.sum()))
    return float(np.mean(shares))


def choose(wanted: str, report: VocabularyReport, mass: Callable[[], float], ratio: float) -> VocabularyMatch:
    """Pick the strategy for a draft whose ids are not the target's.

    Args:
        wanted: auto, or the name of a strategy.
        mass: measures `shared_mass`; asked only where it matters.
        ratio: draft tokens per target token.

    Raises:
        VocabularyError: the strategy that is wanted cannot work with these vocabularies.
    """
    if wanted == Strategy.SAME:
        raise VocabularyError(
            f"models.draft.vocabulary is same, but {report.first_difference}: set it to auto, or choose a draft of the "
            "target's family"
        )
    if wanted == Strategy.STRING or not report.shared:
        why = "as configured" if wanted == Strategy.STRING else "no token is common to both"
        return VocabularyMatch(report, Strategy.STRING, why, tokens_per_target_token=ratio)
    measured = mass()
    if wanted == Strategy.INTERSECTION:
        return VocabularyMatch(report, Strategy.INTERSECTION, "as configured", measured, ratio)
    enough = measured >= ENOUGH_MASS
    why = f"common tokens carry {measured:.1%} of the draft's probability, {'at least' if enough else 'less than'} "
    strategy = Strategy.INTERSECTION if enough else Strategy.STRING
    return VocabularyMatch(report, strategy, f"{why}{ENOUGH_MASS:.0%}", measured, ratio)
