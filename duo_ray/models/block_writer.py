"""What a draft writes between two decodes: heads, sequences, draws from logits. It knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.context import IdLog
from duo_ray.core.sampling import Purpose, check_finite, distribution, draw, most_probable, penalise, uniform
from duo_ray.core.sequences import open_heads, split
from duo_ray.core.verify import Row
from duo_ray.types import DraftBlock, DraftJob, DraftProbs, DraftSequence, Outcome, Span

Logits = NDArray[np.float32]


@dataclass(slots=True)
class HeldSequence:
    """A sequence that the engine holds for a request: its KV cells hold the request's ids, then `tail`."""

    seq_id: int
    tail: list[int] = field(default_factory=list)


class Slot:
    """What is held for one request between calls."""

    __slots__ = ("log", "seq_ids", "sequences")

    def __init__(self, seq_ids: range) -> None:
        self.seq_ids = seq_ids
        self.reset()

    def reset(self) -> None:
        self.log = IdLog()
        self.sequences = [HeldSequence(self.seq_ids[0])]


@dataclass(slots=True)
class Branch:
    """A sequence being drafted: `ids` (head included) on their way to `length`, and q of the sampled ones."""

    sequence: HeldSequence
    ids: list[int]
    length: int
    chance: float
    rows: list[Row] = field(default_factory=list)


Writing = Generator[list[Branch], list[Logits], None]
"""Yields the branches whose last id is to be decoded, is sent their logits `[V]`."""


@dataclass(slots=True)
class Draft:
    """One job on its way to a block."""

    job: DraftJob
    slot: Slot
    held: int
    """How many ids of the context were in the KV cache when the job came."""
    unread: int = 0
    """How many of the others were left, as nobody waits any more."""
    branches: list[Branch] = field(default_factory=list)
    pending: list[Branch] = field(default_factory=list)
    """The branches whose last id the next decode takes."""
    writing: Writing = field(init=False)
    token_seconds: list[tuple[int, float]] = field(default_factory=list)
    prompt_seconds: float = 0.0

    @property
    def trunk(self) -> HeldSequence:
        return self.slot.sequences[0]

    @property
    def length(self) -> int:
        return len(self.slot.log)

    def start(self, writing: Writing) -> None:
        self.writing = writing
        self.pending = next(writing, [])

    def resume(self, logits: list[Logits]) -> None:
        try:
            self.pending = self.writing.send(logits)
        except StopIteration:
            self.pending = []

    def block(self, span: Span) -> DraftBlock:
        job = self.job
        sequences = tuple(
            DraftSequence(Outcome(job.assumed, branch.ids[0]), tuple(branch.ids[1:]), branch.chance)
            if job.bets
            else DraftSequence(None, tuple(branch.ids), branch.chance)
            for branch in self.branches
        )
        return DraftBlock(
            job.context.request_id,
            self.length,
            sequences,
            span,
            tuple(self.token_seconds),
            self.length - self.held - self.unread,
            self.prompt_seconds,
        )

    def probs(self, keep: int) -> DraftProbs | None:
        if self.job.sampling.greedy:
            return None
        ids = tuple(np.array([i for i, _ in b.rows], np.int32).reshape(-1, keep) for b in self.branches)
        probs = tuple(np.array([q for _, q in b.rows], np.float32).reshape(-1, keep) for b in self.branches)
        return DraftProbs(ids, probs)


class BlockWriter:
    """Writes the blocks of jobs, whatever decodes them.

    Args:
        keep: truncate q to this many most probable tokens.
        ends: ids that end a text.
        max_sequences: sequences per request; a job that asks for more gets these.
        fork: makes one more sequence that continues a slot's context.
    """

    def __init__(
        self, keep: int, ends: frozenset[int], max_sequences: int, fork: Callable[[Slot], HeldSequence]
    ) -> None:
        self.keep, self._ends, self._max_sequences, self._fork = keep, ends, max_sequences, fork
        self.barred: NDArray[np.bool_] | None = None
        """`[V]`, the tokens never to propose; None: any may be."""

    def write(self, draft: Draft, logits: Logits) -> Writing:
        """Draft one job's block. Yields the branches to decode, is sent their logits."""
        if draft.job.bets:
            yield from self._open(draft, logits)
        else:
            lead = Branch(draft.trunk, [], draft.job.budget, 1.0)
            draft.branches.append(lead)
            self._extend(draft, lead, logits)
        while live := [branch for branch in draft.branches if not self._ended(branch)]:
            for branch, row in zip(live, (yield live), strict=True):
                self._extend(draft, branch, row)

    def _open(self, draft: Draft, logits: Logits) -> Writing:
        """Pick the heads and share the budget among them."""
        job = draft.job
        best = Branch(draft.trunk, [], job.budget, 0.0)
        most = min(job.max_sequences, self._max_sequences, job.budget)
        heads = self._heads(draft, best, logits, most)
        if not heads:
            return
        head, best.chance = heads[0]
        best.ids.append(head)
        draft.branches.append(best)
        if job.budget == 1:
            return
        [row] = yield [best]
        _, second = self._choices(draft, best, row, 1)
        chances = [chance for _, chance in heads]
        opened = open_heads(chances, float(second[0]), most)
        best.length, *others = split(job.budget, chances[:opened], job.acceptance, job.width_cost)
        for (head, chance), length in zip(heads[1:opened], others, strict=True):
            if length == 0:
                continue
            draft.branches.append(Branch(self._fork(draft.slot), [head], length, chance))
        if best.length > 1:
            self._extend(draft, best, row)

    def _heads(self, draft: Draft, branch: Branch, logits: Logits, count: int) -> list[tuple[int, float]]:
        """The `count` most probable heads and their chances, best first, without those that end the text."""
        ids, probs = self._choices(draft, branch, logits, count + len(self._ends))
        heads = [(int(i), float(p)) for i, p in zip(ids, probs, strict=True) if p > 0 and int(i) not in self._ends]
        return heads[:count]

    def _ended(self, branch: Branch) -> bool:
        return len(branch.ids) >= branch.length or branch.ids[-1] in self._ends

    def _extend(self, draft: Draft, branch: Branch, logits: Logits) -> None:
        """Append the token that follows a branch: the most probable one, or a draw from the row that is shipped."""
        params = draft.job.sampling
        if params.greedy:
            logits = self._penalised(draft, branch, logits)
            branch.ids.append(int(logits.argmax()))
            return
        ids, q = row = self._choices(draft, branch, logits, self.keep)
        position = draft.length + len(branch.ids) + draft.job.position_shift
        u = uniform(params.seed, position, Purpose.DRAFT)
        branch.ids.append(int(ids[draw(q, u)]))
        branch.rows.append(row)

    def _choices(self, draft: Draft, branch: Branch, logits: Logits, count: int) -> Row:
        """The most probable next tokens of a branch, best first. Greedy: `count` of them and their chances; else q."""
        params = draft.job.sampling
        logits = self._penalised(draft, branch, logits)
        if params.greedy:
            top = most_probable(logits, count)
            weights = np.exp((logits - logits[top[0]]) / draft.job.chance_temperature)
            return top.astype(np.int32), weights[top] / weights.sum()
        top = most_probable(logits, self.keep)
        q = distribution(logits[top], params).astype(np.float32)
        return np.where(q > 0, top, 0).astype(np.int32), q

    def _penalised(self, draft: Draft, branch: Branch, logits: Logits) -> NDArray[np.floating]:
        params = draft.job.sampling
        ids = (*draft.slot.log.ids, *branch.ids) if params.penalised else ()
        logits = penalise(logits, ids, draft.job.context.prompt_length, params)
        if self.barred is not None:
            logits = np.where(self.barred, -np.inf, logits)
        check_finite(logits)
        return logits
