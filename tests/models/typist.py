"""A draft that writes what it is told, in its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from duo_ray.core.context import IdLog
from duo_ray.types import DraftBlock, DraftJob, DraftProbs, DraftSequence, Ids, Outcome, Span, UnknownPrefix


class Typist:
    """A `DraftModel`: `sequences` are the ids it writes for every job, `jobs` the jobs it was given."""

    def __init__(self, vocab_size: int, max_context: int = 8192) -> None:
        self.vocab_size, self.max_context = vocab_size, max_context
        self.sequences: list[tuple[Ids, float]] = []
        self.jobs: list[DraftJob] = []
        self.logs: dict[str, IdLog] = {}

    def draft(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftBlock, DraftProbs | None]]:
        return [self._write(job) for job in jobs]

    def _write(self, job: DraftJob) -> tuple[DraftBlock, None]:
        log = self.logs.setdefault(job.context.request_id, IdLog())
        if not log.receive(job.context):
            raise UnknownPrefix([job.context.request_id])
        self.jobs.append(job)
        sequences = tuple(
            DraftSequence(Outcome(job.assumed, ids[0]), ids[1:], chance) if job.bets else DraftSequence(None, ids, 1.0)
            for ids, chance in self.sequences
        )
        # The first token comes from the decode that reads the context.
        decodes = max((len(ids) for ids, _ in self.sequences), default=1) - 1
        timings = ((len(self.sequences), 0.01),) * decodes
        return DraftBlock(job.context.request_id, len(log), sequences, Span(0.0, 1.0), timings), None

    def release(self, request_id: str) -> None:
        self.logs.pop(request_id, None)
