"""What was found at each position of the target's texts, summed up over all, by place and by kind of token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Kind(StrEnum):
    """What sort of token the target wrote."""

    WORD = "word start"
    INSIDE = "inside a word"
    NUMBER = "number"
    PUNCTUATION = "punctuation"
    CODE = "code"
    """Brackets, operators, names with underscores."""
    SPACE = "white space"
    SPECIAL = "special"
    """End of text and the like."""


_CODE = frozenset("{}[]()<>=+*/\\|^~`_")


def kind_of(piece: bytes, *, special: bool, follows_word: bool) -> Kind:
    """The kind of a token by its bytes; `follows_word`: the text before it ends with a letter or a digit.

    A part of a character counts as inside a word.
    """
    if special:
        return Kind.SPECIAL
    text = piece.decode(errors="replace")
    word = text.strip()
    if not word:
        return Kind.SPACE
    if any(character in _CODE for character in word):
        return Kind.CODE
    if any(character.isnumeric() for character in word) and not any(character.isalpha() for character in word):
        return Kind.NUMBER
    if not any(character.isalnum() or character == "\ufffd" for character in word):
        return Kind.PUNCTUATION
    return Kind.INSIDE if follows_word and not text[0].isspace() else Kind.WORD


@dataclass(frozen=True, slots=True)
class Position:
    """One token of a text that the target wrote."""

    place: int
    """Its place in the answer, from 0."""
    kind: Kind
    sampled: bool
    """Whether the text was sampled; greedy otherwise."""
    divergence: float
    """KL(target, draft) in nats, over the tokens both have, at temperature 1."""
    variation: float
    """Total variation, likewise."""
    agrees: bool
    """Whether the draft's most probable token is the target's."""
    overlap: float
    """Chance that a token sampled from the draft is kept, with the request's temperature and truncation."""
    confidence: float
    """The draft's probability of its most probable token."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share or a mean, and how well it is known."""

    value: float
    error: float
    """Standard error."""
    count: int

    @classmethod
    def of_share(cls, yes: float, count: int) -> Estimate | None:
        """`yes` of `count`; None of none."""
        if not count:
            return None
        share = yes / count
        # Never zero: 10 of 10 does not prove a share of 1.
        smoothed = (yes + 1.0) / (count + 2.0)
        return cls(share, math.sqrt(smoothed * (1.0 - smoothed) / count), count)

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> Estimate | None:
        if not values:
            return None
        return cls(float(np.mean(values)), float(np.std(values)) / math.sqrt(len(values)), len(values))

    def differs_from(self, other: Estimate, *, errors: float = 3.0) -> bool:
        """Whether the difference is more than so many standard errors of it."""
        return abs(self.value - other.value) > errors * math.hypot(self.error, other.error)


@dataclass(frozen=True, slots=True)
class Group:
    """Means over some positions."""

    name: str
    count: int
    divergence: float
    variation: float
    agreement: float
    overlap: float


def group(name: str, positions: Sequence[Position]) -> Group:
    """Means over at least one position."""
    means = [
        float(np.mean([getattr(each, field) for each in positions]))
        for field in ("divergence", "variation", "agrees", "overlap")
    ]
    return Group(name, len(positions), *means)


def by_kind(positions: Sequence[Position]) -> tuple[Group, ...]:
    """One group for each kind that occurs."""
    return _groups([str(kind) for kind in Kind], positions, lambda each: str(each.kind))


def by_position(positions: Sequence[Position]) -> tuple[Group, ...]:
    """One group for each place in the answers, named by its number from 1."""
    last = max((each.place for each in positions), default=-1)
    return _groups([str(place + 1) for place in range(last + 1)], positions, lambda each: str(each.place + 1))


def by_place(positions: Sequence[Position]) -> tuple[Group, ...]:
    """The first 4 tokens of the answers, the next 4, then each group twice as long as the one before."""
    last = max((each.place for each in positions), default=0)
    ends = [4]
    while ends[-1] <= last:
        ends.append(2 * ends[-1])
    names = [f"{start + 1}-{end}" for start, end in zip([0, *ends], ends, strict=False)]
    return _groups(names, positions, lambda each: names[int(np.searchsorted(ends, each.place, side="right"))])


def _groups(
    names: Iterable[str], positions: Sequence[Position], name_of: Callable[[Position], str]
) -> tuple[Group, ...]:
    members: dict[str, list[Position]] = {}
    for each in positions:
        members.setdefault(name_of(each), []).append(each)
    return tuple(group(name, members[name]) for name in names if name in members)


def spread(confidences: Sequence[float]) -> float:
    """How decided the draft is, as `planning.Text.decided` takes it: pseudo-counts of the beta distribution with the
    mean and variance of its confidence, 0.1 to 20."""
    mean, variance = float(np.mean(confidences)), float(np.var(confidences))
    if variance <= 0.0:
        return 20.0
    return min(20.0, max(0.1, mean * (1.0 - mean) / variance - 1.0))
