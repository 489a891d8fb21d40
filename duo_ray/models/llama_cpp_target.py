"""A target in llama.cpp: a GGUF file on CPU cores or, with a GPU build, on a GPU, that judges drafted blocks.

One decode verifies the blocks of several requests, ragged, each token under its request's sequence id, with logits at
every position that is judged. Rejected tokens are cut off by cropping the sequence at the next call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from duo_ray.core.judge import judge, logprobs
from duo_ray.models.llama_context import BatchRow, LlamaContext, Logits
from duo_ray.models.llama_library import LlamaCppError
from duo_ray.models.target_slots import Slot, TargetSlots, Work
from duo_ray.types import ContextOverflow, DraftProbs, NonFiniteLogits, Span, TargetReply, Verdict, VerifyJob

_BATCH_SIZE = 512
"""Tokens of one decode."""
_OUTPUTS = 256
"""Rows of logits of one decode: llama.cpp reserves memory for them."""
_IDLE_IDS = 512
"""Ids that idle slots may hold in all: 2800 more than doubled the time of a pass of a 135M model on one core."""
_WARM_UP_WIDTHS = (1, 2, 4, 8, 16, 32)
_WARM_UP_CONTEXT = 64


class LlamaCppTarget:
    """A `TargetModel` over llama.cpp. Single-threaded: one call at a time. Made by `load`; freed by `close`.

    The KV cache is float16, llama.cpp's own default. A pass over quantised weights rounds activations, too: how logits
    are rounded depends on how many tokens are computed together, so greedy choices are those of llama.cpp alone up to
    ties that close.
    """

    def __init__(self, context: LlamaContext, *, slots: int, max_context: int, vocab_size: int) -> None:
        self.slots, self.max_context, self.vocab_size = slots, max_context, vocab_size
        self._context = context
        self._slots = TargetSlots(slots, max_context, vocab_size, self._copy)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        threads: int,
        max_context: int,
        slots: int = 8,
        vocab_size: int | None = None,
        gpu_layers: int = 0,
        repack: bool = False,
    ) -> LlamaCppTarget:
        """Load a GGUF file.

        Args:
            threads: cores that one pass uses.
            max_context: tokens one request may use; memory is reserved for each of the `slots`.
            slots: how many requests can be held at once.
            vocab_size: ids the tokenizer knows; ids beyond it pad the output layer and are never emitted. None: all.
            gpu_layers: layers on a GPU, for which llama.cpp must have been built; 0 stays on the CPU.
            repack: bring the weights into a layout for this CPU's vector units.

        Raises:
            LlamaCppError: no such file, not a GGUF, a model that cannot be a target, or no memory for the cache.
            ValueError: an argument is out of range, or the context is longer than the model was trained for.
        """
        for name, value in (("threads", threads), ("max_context", max_context), ("slots", slots)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        context = LlamaContext.load(
            Path(path), use="target", slots=slots, max_context=max_context, sequences=slots, threads=threads,
            batch_size=_BATCH_SIZE, outputs=_OUTPUTS, gpu_layers=gpu_layers, repack=repack,
        )  # fmt: skip
        vocab_size = min(vocab_size or context.vocab_size, context.vocab_size)
        return cls(context, slots=slots, max_context=max_context, vocab_size=vocab_size)

    def close(self) -> None:
        """Free model and KV cache. The object is of no use afterwards; closing it again does nothing."""
        self._context.close()

    def use_threads(self, threads: int) -> None:
        """Threads of the passes from now on."""
        self._context.use_threads(threads)

    def logits_along(self, ids: Sequence[int], last: int) -> Iterator[Logits]:
        """Logits `[vocab_size]` after each of the last `last` ids of a text; each is valid until the next.

        Raises:
            ContextOverflow: every slot is in use, or the text is longer than `max_context`.
        """
        first = len(ids) - last
        with self._slots.lent(len(ids)) as slot:
            self._forget(slot)
            try:
                for start in range(0, len(ids), _OUTPUTS):
                    part = range(start, min(start + _OUTPUTS, len(ids)))
                    self._context.decode([BatchRow(ids[i], i, slot.number, i >= first) for i in part])
                    for i in part:
                        if i >= first:
                            yield self._logits(i - start)
            finally:
                self._forget(slot)

    def memory_bytes(self) -> int:
        """Bytes of weights, KV cache and scratch memory, as llama.cpp accounted for them at load."""
        return self._context.memory_bytes

    def release(self, request_id: str) -> None:
        """Free the request's slot; unknown ids are ignored.

        A pass attends over every cell in use: of what idle slots hold only the latest, and little beside it, is kept
        for a request that begins alike.
        """
        self._slots.release(request_id)
        kept = 0
        for slot in reversed(self._slots.idle):
            if kept and kept + len(slot.cached) > _IDLE_IDS:
                self._forget(slot)
            kept += len(slot.cached)

    def verify(self, jobs: Sequence[VerifyJob], probs: Sequence[DraftProbs | None]) -> TargetReply:
        """Judge the blocks of all jobs; see `TargetModel.verify`.

        Raises:
            LlamaCppError: a pass failed; the next jobs of these requests run all their ids again.
            ValueError: a job makes no sense (an id beyond the vocabulary, two jobs of one request, ...).
        """
        if self._context.closed:
            raise LlamaCppError("this target is closed: load it again")
        for job in jobs:
            if len(job.block) >= _OUTPUTS:
                raise ValueError(
                    f"request {job.context.request_id}: a block of {len(job.block)} tokens; at most {_OUTPUTS - 1} fit"
                    " one pass"
                )
        started = time.time()
        for job in jobs:
            if job.reproducible and job.context.agreed == 0:
                self._start_over(job.context.request_id)
        work = self._slots.admit(jobs, probs)
        tokens = sum(w.now for w in work)
        verdicts: dict[str, Verdict] = {}
        try:
            for w in work:
                self._context.crop(w.slot.number, len(w.slot.cached))
            for decode in _decodes(work):
                self._run(decode)
                verdicts |= self._judge(decode)
        except BaseException:
            for w in work:
                self._forget(w.slot)
            raise
        done = []
        for w in work:
            verdict = verdicts.get(w.job.context.request_id, Verdict(w.job.context.request_id, 0, None))
            done.append(replace(verdict, cached=w.cached) if w.cached else verdict)
        return TargetReply(tuple(done), Span(started, time.time()), tokens)

    def warm_up(self, steps: int = 3) -> list[tuple[int, float]]:
        """Median seconds of a pass over n = 1, 2, 4, 8, 16, 32 new tokens behind a short context, `steps` passes each.

        Raises:
            ContextOverflow: every slot is in use.
        """
        if not self._slots.idle:
            raise ContextOverflow(f"all {self.slots} slots are in use: warm up before taking requests")
        slot = self._slots.idle[0]
        self._forget(slot)
        length = min(_WARM_UP_CONTEXT, self.max_context // 2)
        self._context.decode([self._row(slot.number, i, wanted=False) for i in range(length)])
        timings = []
        for n in (n for n in _WARM_UP_WIDTHS if length + n <= self.max_context):
            rows = [self._row(slot.number, i, wanted=True) for i in range(length, length + n)]
            seconds = [self._timed(rows) for _ in range(steps + 1)]
            timings.append((n, median(seconds[1:])))
        self._context.crop(slot.number, 0)
        return timings

    def _row(self, sequence: int, position: int, *, wanted: bool) -> BatchRow:
        return BatchRow(position % self.vocab_size, position, sequence, wanted)

    def _timed(self, rows: Sequence[BatchRow]) -> float:
        started = time.perf_counter()
        self._context.decode(rows)
        for i in range(len(rows)):
            self._logits(i).argmax()
        seconds = time.perf_counter() - started
        self._context.crop(rows[0].seq_id, rows[0].position)
        return seconds

    def _run(self, decode: Sequence[_Part]) -> None:
        rows = []
        for part in decode:
            slot, first = part.work.slot, len(part.work.slot.cached)
            ids = part.work.pending[: part.length]
            rows += [BatchRow(token, first + i, slot.number, part.judged) for i, token in enumerate(ids)]
            part.work.ran(part.length)
        self._context.decode(rows)

    def _judge(self, decode: Sequence[_Part]) -> dict[str, Verdict]:
        """Verdicts of the jobs that this decode ran to their end."""
        verdicts = {}
        start = 0
        for part in decode:
            first, start = start, start + part.length
            if not part.judged:
                continue
            job, q = part.work.job, part.work.q
            context, params = job.context, job.sampling

            def raw(i: int, first: int = first) -> Logits:
                return self._logits(first + i)

            try:
                accepted, token = judge(raw, part.work.slot.log.ids, job.block, q, context.prompt_length, params)
            except NonFiniteLogits as error:
                raise NonFiniteLogits(f"request {context.request_id}: {error}") from error
            shown = logprobs(raw, (*job.block[:accepted], token), params.logprobs)
            verdicts[context.request_id] = Verdict(context.request_id, accepted, token, shown)
        return verdicts

    def _logits(self, index: int) -> Logits:
        return self._context.logits(index)[: self.vocab_size]

    def _copy(self, source: int, sequence: int, length: int) -> None:
        self._context.crop(sequence, 0)
        self._context.share(source, sequence, length)

    def _start_over(self, request_id: str) -> None:
        """Forget this request's ids and what idle slots kept: sums over the cache then run in the same order again."""
        held = self._slots.held
        for slot in (*self._slots.idle, *([held[request_id]] if request_id in held else [])):
            self._forget(slot)
        if not held.keys() - {request_id}:
            self._context.clear()  # cells are given out from the first one again

    def _forget(self, slot: Slot) -> None:
        slot.cached.clear()
        self._context.crop(slot.number, 0)


class _Part(NamedTuple):
    """Some of a job's pending ids in one decode."""

    work: Work
    length: int
    judged: bool
    """They are the job's last: the id before the block, and the block."""


def _decodes(work: Sequence[Work]) -> Iterator[list[_Part]]:
    """The decodes of one call, as few as hold all its tokens; what is judged together shares one."""
    heads = [_Part(w, w.now - (w.tail if w.whole else 0), judged=False) for w in work]
    tails = [_Part(w, w.tail, judged=True) for w in work if w.whole]
    decode: list[_Part] = []
    tokens = outputs = 0
    for part in (*heads, *tails):
        left = part.length
        while left:
            room = _BATCH_SIZE - tokens
            if part.judged and (left > room or outputs + left > _OUTPUTS):
                room = 0
            if room:
                count = min(left, room)
                decode.append(part._replace(length=count))
                tokens, outputs, left = tokens + count, outputs + count * part.judged, left - count
            else:
                yield decode
                decode, tokens, outputs = [], 0, 0
    if decode:
        yield decode
