"""Probability tables as models: both seams without a neural network, for tests, documentation and simulations.

A table is a function from the ids so far to a logits row, so any distribution can be written down and checked by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.context import IdLog
from duo_ray.core.judge import judge, logprobs
from duo_ray.core.sampling import Floats, Purpose, check_finite, distribution, draw, most_probable, penalise, uniform
from duo_ray.core.sequences import open_heads, split
from duo_ray.core.verify import Row
from duo_ray.types import (
    Context,
    ContextOverflow,
    DraftBlock,
    DraftJob,
    DraftProbs,
    DraftSequence,
    Ids,
    Outcome,
    SamplingParams,
    Span,
    TargetReply,
    UnknownPrefix,
    Verdict,
    VerifyJob,
)

Table = Callable[[Ids], NDArray[np.float64]]
"""All ids so far -> logits `[V]` of the next one."""


def random_table(vocab_size: int, seed: int, *, order: int = 2, scale: float = 2.0) -> Table:
    """Logits that depend on the last `order` ids: fixed, pseudo-random, normal with standard deviation `scale`."""

    def table(ids: Ids) -> NDArray[np.float64]:
        recent = [token + 1 for token in ids[-order:]]
        return np.random.default_rng([seed, *recent]).normal(0.0, scale, vocab_size)

    return table


def mixed_table(first: Table, second: Table, weight: float) -> Table:
    """Logits between two tables: `weight` 0 is the first, 1 the second. A draft of graded quality."""
    return lambda ids: (1.0 - weight) * first(ids) + weight * second(ids)


class _Held:
    """The ids each request holds, by `Context` messages."""

    def __init__(self, max_context: int) -> None:
        self.logs: dict[str, IdLog] = {}
        self.max_context = max_context

    def receive(self, contexts: Sequence[Context], extra: Sequence[int]) -> list[IdLog]:
        """The log of each context; `extra` tokens must fit behind it."""
        for context, more in zip(contexts, extra, strict=True):
            if context.length + more > self.max_context:
                raise ContextOverflow(f"{context.length} + {more} tokens; the context holds {self.max_context}")
        logs, unknown = [], []
        for context in contexts:
            request_id = context.request_id
            log = self.logs.get(request_id, IdLog())
            if log.receive(context):
                self.logs[request_id] = log
            else:
                unknown.append(request_id)
            logs.append(log)
        if unknown:
            raise UnknownPrefix(unknown)
        return logs

    def release(self, request_id: str) -> None:
        self.logs.pop(request_id, None)


class ScriptedTarget:
    """A `TargetModel` whose logits come from a table; verification is `core.verify`."""

    def __init__(self, table: Table, vocab_size: int, *, max_context: int = 4096, slots: int = 8) -> None:
        self.vocab_size, self.max_context, self.slots = vocab_size, max_context, slots
        self._table = table
        self._held = _Held(max_context)
        self._filled: dict[str, int] = {}

    def verify(self, jobs: Sequence[VerifyJob], probs: Sequence[DraftProbs | None]) -> TargetReply:
        started = time.time()
        held = self._held.logs.keys() | {job.context.request_id for job in jobs}
        if len(held) > self.slots:
            raise ContextOverflow(f"{len(held)} requests at once; the target holds {self.slots}")
        logs = self._held.receive([job.context for job in jobs], [len(job.block) for job in jobs])
        verdicts = tuple(self._judge(job, log.ids, q) for job, log, q in zip(jobs, logs, probs, strict=True))
        tokens = sum(len(job.block) + 1 for job in jobs)
        return TargetReply(verdicts, Span(started, time.time()), tokens)

    def _judge(self, job: VerifyJob, held: list[int], probs: DraftProbs | None) -> Verdict:
        params, length, request_id = job.sampling, len(held), job.context.request_id
        filled = min(self._filled.get(request_id, 0), length)
        self._filled[request_id] = length if job.chunk is None else min(length, filled + job.chunk)
        if self._filled[request_id] < length:
            return Verdict(request_id, 0, None)

        def raw(i: int) -> Floats:
            return self._table((*held, *job.block[:i]))

        q = None if probs is None else _rows(probs, job)
        accepted, token = judge(raw, held, job.block, q, job.context.prompt_length, params)
        emitted = (*job.block[:accepted], token)
        return Verdict(request_id, accepted, token, logprobs(raw, emitted, params.logprobs))

    @property
    def held(self) -> set[str]:
        """Requests that hold a slot."""
        return set(self._held.logs)

    def release(self, request_id: str) -> None:
        self._held.release(request_id)
        self._filled.pop(request_id, None)


def _rows(probs: DraftProbs, job: VerifyJob) -> list[Row]:
    """The rows of q that belong to the job's block."""
    rows = slice(job.offset, job.offset + len(job.block))
    return list(zip(probs.ids[job.sequence][rows], probs.probs[job.sequence][rows], strict=True))


class ScriptedDraft:
    """A `DraftModel` whose logits come from a table, truncated to its `keep` most probable tokens."""

    def __init__(self, table: Table, vocab_size: int, *, max_context: int = 4096, keep: int = 64) -> None:
        self.vocab_size, self.max_context = vocab_size, max_context
        self._table, self._keep = table, keep
        self._held = _Held(max_context)

    def draft(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftBlock, DraftProbs | None]]:
        logs = self._held.receive([job.context for job in jobs], [job.budget for job in jobs])
        return [self._write(job, tuple(log.ids)) for job, log in zip(jobs, logs, strict=True)]

    def _write(self, job: DraftJob, ids: Ids) -> tuple[DraftBlock, DraftProbs | None]:
        started = time.time()
        sequences, rows = [], []
        for head, chance, length in self._heads(job, ids):
            tail, q = self._continue((*ids, *head), length - len(head), job)
            bet = Outcome(job.assumed, head[0]) if head else None
            sequences.append(DraftSequence(bet, tail, chance))
            rows.append(q)
        span = Span(started, time.time())
        block = DraftBlock(job.context.request_id, len(ids), tuple(sequences), span)
        if job.sampling.greedy:
            return block, None
        return block, DraftProbs(tuple(ids for ids, _ in rows), tuple(probs for _, probs in rows))

    def _heads(self, job: DraftJob, ids: Ids) -> list[tuple[Ids, float, int]]:
        """(head, its chance, tokens of its sequence) for every sequence; a lead has none."""
        if job.budget == 0:
            return []
        if not job.bets:
            return [((), 1.0, job.budget)]
        warm = SamplingParams(temperature=job.sampling.temperature or job.chance_temperature)
        first = distribution(self._logits(ids, job), warm)
        heads = most_probable(first, job.max_sequences)
        second = distribution(self._logits((*ids, int(heads[0])), job), warm).max()
        chances = [float(first[head]) for head in heads]
        opened = open_heads(chances, float(second), job.max_sequences)
        lengths = split(job.budget, chances[:opened], job.acceptance, job.width_cost)
        planned = zip(heads, chances, lengths, strict=False)
        return [((int(head),), chance, length) for head, chance, length in planned if length > 0]

    def _continue(
        self, ids: Ids, length: int, job: DraftJob
    ) -> tuple[Ids, tuple[NDArray[np.int32], NDArray[np.float32]]]:
        start = len(ids)
        kept, weights = [], []
        for position in range(start, start + length):
            logits = self._logits(ids, job)
            top = most_probable(logits, self._keep)
            q = distribution(logits[top], job.sampling).astype(np.float32)
            u = uniform(job.sampling.seed, position + job.position_shift, Purpose.DRAFT)
            ids = (*ids, int(top[draw(q, u)]))
            kept.append(top.astype(np.int32))
            weights.append(q)
        shape = (length, min(self._keep, self.vocab_size))
        return ids[start:], (np.array(kept, np.int32).reshape(shape), np.array(weights, np.float32).reshape(shape))

    def _logits(self, ids: Ids, job: DraftJob) -> NDArray[np.float64]:
        logits = self._table(ids)
        check_finite(logits)
        return np.asarray(penalise(logits, ids, job.context.prompt_length, job.sampling), dtype=np.float64)

    @property
    def held(self) -> set[str]:
        """Requests whose ids it holds."""
        return set(self._held.logs)

    def release(self, request_id: str) -> None:
        self._held.release(request_id)
