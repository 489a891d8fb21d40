"""The draft's side of a simulated request: what it has read of it, what it guesses, what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.context import common_prefix
from duo_ray.core.costs import LARGEST
from duo_ray.core.sequences import open_heads, split
from duo_ray.planning.scenario import Text
from duo_ray.types import DraftJob, DraftSequence, Ids, Outcome

_RUNNER_UP = 0.5
"""Of the probability the draft leaves to other tokens than its best, the share of the next best one; and so on."""


class _Guesses:
    """What the draft knows of one text. The target's token is 0 everywhere; others are wrong guesses."""

    def __init__(self, text: Text, seed: Sequence[int]) -> None:
        random = np.random.default_rng(seed)
        size = text.prompt_tokens + text.answer_tokens + 3 * LARGEST
        a, spread = min(text.acceptance, 1.0 - 1e-6), text.decided
        self.best: NDArray[np.float64] = random.beta(a * spread, (1.0 - a) * spread, size)
        """The draft's probability of its best guess at each position."""
        right = random.random(size) < self.best
        self.rank: NDArray[np.int64] = np.where(right, 0, random.geometric(1.0 - _RUNNER_UP, size))
        """Place of the target's token among the draft's guesses."""

    def heads(self, position: int, count: int, *, known: bool) -> list[tuple[int, float]]:
        """The best guesses and the draft's probabilities of them; `known`: the text before is the target's."""
        rank, best = int(self.rank[position]) if known else -1, float(self.best[position])
        rest = [(1.0 - best) * (1.0 - _RUNNER_UP) * _RUNNER_UP**j for j in range(count - 1)]
        return [(0 if j == rank else 1 + j, chance) for j, chance in enumerate((best, *rest))]

    def tail(self, position: int, count: int, *, known: bool) -> Ids:
        """The draft's greedy continuation: right until its first wrong guess."""
        right = 0
        while known and right < count and self.rank[position + right] == 0:
            right += 1
        return (0,) * right + (1,) * (count - right)


@dataclass(frozen=True, slots=True)
class Written:
    """One block, and what it costs."""

    read: int
    """New ids of its context."""
    levels: list[int]
    """Sequences advanced in each decode after that."""
    sequences: tuple[DraftSequence, ...]


class Writer:
    """What the draft holds of one request."""

    def __init__(self, text: Text, seed: Sequence[int]) -> None:
        self._guesses = _Guesses(text, seed)
        self._cached: list[int] = []
        self._branches: list[Ids] = []

    def write(self, job: DraftJob) -> Written:
        """Take the job's context over, and continue it."""
        held, known = self._read(job)
        lengths, sequences = self._write(job, known)
        return Written(job.context.length - held, _levels(lengths, bets=job.bets), sequences)

    def _read(self, job: DraftJob) -> tuple[int, bool]:
        """Take the context over: how many of its ids were cached, and whether all of it is the target's text."""
        ids = [*self._cached[: job.context.agreed], *job.context.ids]
        held = max(
            (common_prefix([*self._cached, *branch], ids) for branch in (self._branches or [()])),
            default=0,
        )
        self._cached, self._branches = ids, []
        return min(held, len(ids) - 1), not any(ids[-max(1, job.assumed) :])

    def _write(self, job: DraftJob, known: bool) -> tuple[list[int], tuple[DraftSequence, ...]]:
        """The block, and the lengths of its sequences, as `LlamaCppDraft` writes it."""
        guesses, at = self._guesses, job.context.length
        if job.budget == 0:  # the draft only reads
            return [], ()
        if not job.bets:
            ids = guesses.tail(at, job.budget, known=known)
            self._branches = [ids[:-1]]
            return [job.budget], (DraftSequence(None, ids, 1.0),)
        most = min(job.max_sequences, job.budget)
        heads = guesses.heads(at, most, known=known)
        lengths = [job.budget]
        if job.budget > 1:
            chances = [chance for _, chance in heads]
            opened = open_heads(chances, float(guesses.best[at + 1]), most)
            lengths = split(job.budget, chances[:opened], job.acceptance, job.width_cost)
        sequences = tuple(
            DraftSequence(
                Outcome(job.assumed, head),
                guesses.tail(at + 1, length - 1, known=known and head == 0),
                chance,
            )
            for (head, chance), length in zip(heads, lengths, strict=False)
            if length
        )
        self._branches = [
            (sequence.bet.token, *sequence.ids)[:-1] for sequence in sequences if sequence.bet is not None
        ]
        return [length for length in lengths if length], sequences


def _levels(lengths: Sequence[int], *, bets: bool) -> list[int]:
    """Sequences advanced by each decode after the context's own: a best head goes one ahead of the others."""
    if not lengths:
        return []
    best, *others = lengths
    if not bets:
        return [1] * (best - 1)
    ahead = [1] if best > 1 else []
    left = [best - 2, *(length - 1 for length in others)]
    return ahead + [sum(each > level for each in left) for level in range(max(0, *left, 0))]
