"""Which request holds which slot of a target's KV cache, what each slot holds, and what a call still has to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from duo_ray.core.context import IdLog, common_prefix
from duo_ray.core.verify import Row
from duo_ray.types import ContextOverflow, DraftProbs, UnknownPrefix, VerifyJob

_WORTH_COPYING = 8  # ids: running fewer costs no more than copying their K and V
_WORTH_WAITING = 64  # ids: running fewer costs no more than the pass that a request waits for another to run them


@dataclass(slots=True)
class Slot:
    """A request's row in the KV cache."""

    number: int
    log: IdLog = field(default_factory=IdLog)
    """Committed ids, as the sender described them."""
    cached: list[int] = field(default_factory=list)
    """Ids whose K and V the row holds: rejected ones too, until the next call asks for others in their place."""
    taken_over: int = 0
    """How many of them come from other requests, until the next verdict says so."""


@dataclass(slots=True)
class Work:
    """One job of a `verify` call: what is still to be run for it."""

    job: VerifyJob
    q: list[Row] | None
    slot: Slot
    pending: list[int]
    cached: int
    """Ids taken over from other requests."""
    now: int
    """How many of the pending ids this call runs; fewer than all of them: no verdict yet."""

    @property
    def tail(self) -> int:
        """How many of the last pending ids must share one pass: the block and the id before it."""
        return len(self.job.block) + 1

    @property
    def whole(self) -> bool:
        return self.now == len(self.pending)

    def ran(self, count: int) -> None:
        """The next `count` pending ids are in the cache."""
        self.slot.cached += self.pending[:count]
        del self.pending[:count]
        self.now -= count


class TargetSlots:
    """The slots of one target. No model work here: the engine is told what to copy, and runs what `admit` returns.

    Args:
        copy: copy(source, slot, length) gives `slot` the first `length` ids of `source` in place of all it holds.
    """

    def __init__(self, slots: int, max_context: int, vocab_size: int, copy: Callable[[int, int, int], None]) -> None:
        self._max_context, self._vocab_size, self._copy = max_context, vocab_size, copy
        self._slots = slots
        self.held: dict[str, Slot] = {}
        """By request."""
        self.idle = [Slot(number) for number in range(slots)]
        """Free slots with what they still hold, idle longest first."""

    @contextmanager
    def lent(self, length: int) -> Iterator[Slot]:
        """An idle slot for a text of `length` ids that belongs to no request.

        Raises:
            ContextOverflow: every slot is in use, or the text is longer than `max_context`.
        """
        if not self.idle or length > self._max_context:
            raise ContextOverflow(
                f"{length} ids, for which {len(self.idle)} of {self._slots} slots of {self._max_context} are free"
            )
        slot = self.idle.pop()
        try:
            yield slot
        finally:
            self.idle.append(slot)

    def release(self, request_id: str) -> None:
        """Free the request's slot; unknown ids are ignored.

        What it holds stays until another request takes the slot: one that begins alike runs only what is new.
        """
        slot = self.held.pop(request_id, None)
        if slot is not None:
            self.idle.append(slot)

    def admit(self, jobs: Sequence[VerifyJob], probs: Sequence[DraftProbs | None]) -> list[Work]:
        """Check every job, give new requests a slot, and find out what each still has to run.

        Raises:
            UnknownPrefix, ContextOverflow: see `TargetModel.verify`; nothing was changed.
            ValueError: a job makes no sense (an id beyond the vocabulary, two jobs of one request, ...).
        """
        new = []
        unknown = []
        for job in jobs:
            self._check(job)
            request_id = job.context.request_id
            log = self.held[request_id].log if request_id in self.held else IdLog()
            if not log.receive(job.context):
                unknown.append(request_id)
            elif request_id not in self.held:
                new.append((job, log))
        if unknown:
            raise UnknownPrefix(unknown)
        if len({job.context.request_id for job in jobs}) < len(jobs):
            raise ValueError("two jobs of one request in one pass: send them one after the other")
        if len(new) > len(self.idle):
            raise ContextOverflow(
                f"{len(new)} new requests, but only {len(self.idle)} of {self._slots} slots are free: "
                "release requests that ended, or load the target with more slots"
            )
        quoted = [self._rows_of_q(job, q) for job, q in zip(jobs, probs, strict=True)]
        for job, log in new:
            self.held[job.context.request_id] = self._take(job, log)
        return self._plan(jobs, quoted)

    def _check(self, job: VerifyJob) -> None:
        context, block = job.context, job.block
        request = f"request {context.request_id}"
        if context.length + len(block) > self._max_context:
            raise ContextOverflow(
                f"{request}: {context.length} ids and a block of {len(block)} exceed max_context={self._max_context}"
            )
        if not context.length:
            raise ValueError(f"{request}: no ids to draw from: give at least one")
        if job.chunk is not None and job.chunk < 1:
            raise ValueError(f"{request}: chunk={job.chunk} must be at least 1")
        for token in (*context.ids, *block):
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"{request}: id {token} is outside the vocabulary of {self._vocab_size}")

    def _take(self, job: VerifyJob, log: IdLog) -> Slot:
        """An idle slot for a new request: the one that holds most of its ids, else the one idle longest."""
        shared = [0 if job.reproducible else common_prefix(slot.cached, log.ids) for slot in self.idle]
        longest = max(shared)
        slot = self.idle.pop(shared.index(longest) if longest >= _WORTH_COPYING else 0)
        kept = slot.cached[:longest] if longest >= _WORTH_COPYING else []
        return Slot(slot.number, log, kept, taken_over=len(kept))

    def _plan(self, jobs: Sequence[VerifyJob], quoted: Sequence[list[Row] | None]) -> list[Work]:
        """What each job runs in this call."""
        plans: list[Work] = []
        for job, q in zip(jobs, quoted, strict=True):
            slot = self.held[job.context.request_id]
            ids = slot.log.ids
            # The last id is run again when it has to be: logits are not kept.
            held = min(common_prefix(slot.cached, ids), len(ids) - 1)
            if not job.reproducible:
                held = self._copy_more(slot, held)
            del slot.cached[held:]
            pending = [*ids[held:], *job.block]
            cached, slot.taken_over = min(slot.taken_over, held), 0
            work = Work(job, q, slot, pending, cached, len(pending))
            spare = len(pending) - work.tail
            if job.chunk is not None and len(pending) > job.chunk and spare > 0:
                work.now = min(job.chunk, spare)
            if job.chunk is not None and not job.reproducible and self._runs_for(work, plans):
                work.now = 0
            plans.append(work)
        return plans

    def _copy_more(self, slot: Slot, held: int) -> int:
        """Copy from another slot what it holds beyond the `held` ids; returns how many are held then."""
        ids = slot.log.ids
        if len(ids) - 1 - held < _WORTH_COPYING:
            return held
        others = [other for other in (*self.held.values(), *self.idle) if other is not slot]
        lengths = [min(common_prefix(other.cached, ids), len(ids) - 1) for other in others]
        longest = max(lengths, default=0)
        if longest - held < _WORTH_COPYING:
            return held
        self._copy(others[lengths.index(longest)].number, slot.number, longest)
        slot.cached = ids[:longest]
        slot.taken_over += longest - held
        return longest

    def _runs_for(self, work: Work, earlier: Sequence[Work]) -> bool:
        """Whether another job of this call runs most of what this one misses: it copies that in the next call."""
        ids, held = work.slot.log.ids, len(work.slot.cached)
        worth = max(_WORTH_WAITING, (len(ids) - held) // 2)
        return any(
            other.now > 1 and common_prefix(other.slot.log.ids[: len(ids) - 1], ids) - held >= worth
            for other in earlier
        )

    def _rows_of_q(self, job: VerifyJob, probs: DraftProbs | None) -> list[Row] | None:
        if probs is None or not job.block:
            return None
        rows = slice(job.offset, job.offset + len(job.block))
        ids, chances = probs.ids[job.sequence][rows], probs.probs[job.sequence][rows]
        if len(ids) < len(job.block):
            raise ValueError(
                f"request {job.context.request_id}: {len(job.block)} drafted tokens, but only {len(ids)} rows of draft "
                f"probabilities from row {job.offset} of sequence {job.sequence}"
            )
        if not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise ValueError(f"draft probabilities name an id outside the target's vocabulary of {self._vocab_size}")
        return list(zip(ids, chances, strict=True))
