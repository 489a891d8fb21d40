"""The draft: a GGUF model on CPU cores, through llama.cpp's low-level API.

Every request holds llama.cpp sequences over one unified KV cache: the cells of a common prefix are shared, so k
continuations of a context advance in one decode and cost only their own tokens. The next job keeps the sequence that
shares most with its context, crops it there and decodes what is missing: one token after a fully accepted block.

A call that fails in the middle forgets its requests: the next job of each, which refers to ids no longer held, raises
`UnknownPrefix`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray

from duo_ray.core.context import IdLog, common_prefix
from duo_ray.models.block_writer import BlockWriter, Draft, HeldSequence, Logits, Slot
from duo_ray.models.llama_context import BatchRow, LlamaContext
from duo_ray.models.llama_library import LlamaCppError
from duo_ray.models.llama_vocabulary import LlamaVocabulary
from duo_ray.types import (
    Context,
    ContextOverflow,
    DraftBlock,
    DraftJob,
    DraftProbs,
    Ids,
    SamplingParams,
    Span,
    UnknownPrefix,
)

_READ_AT_ONCE = 128
"""Ids after which it looks whether those who asked are still there; no slower to read than more at once."""
_WORTH_KEEPING = 8
"""Shared tokens from which a request prefers the slot that another one left."""


class LlamaCppDraft:
    """A `DraftModel` on the CPU. Made by `load`; freed by `close`.

    Every request has room for `max_context` tokens, its drafted sequences included. When all `slots` are taken, the
    request that was idle longest is forgotten (its next job raises `UnknownPrefix`).
    """

    def __init__(
        self,
        context: LlamaContext,
        *,
        slots: int,
        max_context: int,
        max_sequences: int,
        keep: int,
    ) -> None:
        vocab = ll.llama_model_get_vocab(context.model)
        self.vocab_size = context.vocab_size
        self.max_context = max_context
        self.slots = slots
        self.max_sequences = max_sequences
        ends = frozenset(i for i in range(self.vocab_size) if ll.llama_vocab_is_eog(vocab, i))
        self._writer = BlockWriter(min(keep, self.vocab_size), ends, max_sequences, self._fork)
        self._context = context
        self._held: dict[str, Slot] = {}  # idle longest first
        self._in_call: frozenset[str] = frozenset()
        self._abandoned: set[str] = set()
        ranges = (range(i * max_sequences, (i + 1) * max_sequences) for i in range(slots))
        self._idle = [Slot(seq_ids) for seq_ids in ranges]  # idle longest first

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        threads: int,
        max_context: int,
        slots: int = 8,
        max_sequences: int = 8,
        keep: int = 64,
        n_batch: int = 512,
    ) -> LlamaCppDraft:
        """Load a GGUF file onto the CPU.

        Args:
            threads: cores that one decode uses.
            max_context: tokens per request, drafted ones included.
            slots: requests held at once. The KV cache has `slots * max_context` cells, so it never runs out.
            max_sequences: sequences per request; a job that asks for more gets these.
            keep: truncate q to this many most probable tokens.
            n_batch: tokens per decode while a context is read.

        Raises:
            LlamaCppError: no such file, not a GGUF, or a model that cannot serve as a draft.
            ValueError: an argument is out of range, or the context is longer than the model was trained for.
        """
        for name, value in (
            ("threads", threads),
            ("max_context", max_context),
            ("slots", slots),
            ("max_sequences", max_sequences),
            ("keep", keep),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        sequences, limit = slots * max_sequences, ll.llama_max_parallel_sequences()
        if sequences > limit:
            raise ValueError(
                f"slots={slots} x max_sequences={max_sequences} is {sequences} sequences; llama.cpp holds {limit}: "
                "lower one of them"
            )
        if n_batch < sequences:
            raise ValueError(f"n_batch={n_batch} must be at least slots x max_sequences = {sequences}")
        context = LlamaContext.load(
            Path(path), use="draft", slots=slots, max_context=max_context, sequences=sequences, threads=threads,
            batch_size=n_batch, outputs=sequences, repack=True,
        )  # fmt: skip
        return cls(
            context,
            slots=slots,
            max_context=max_context,
            max_sequences=max_sequences,
            keep=keep,
        )

    def close(self) -> None:
        """Free model, KV cache and batch. The object is of no use afterwards; closing it again does nothing."""
        self._context.close()
        self._held.clear()

    def memory_bytes(self) -> int:
        """Bytes of weights, KV cache and scratch memory, as llama.cpp accounted for them at load."""
        return self._context.memory_bytes

    @property
    def vocabulary(self) -> LlamaVocabulary:
        """The model's vocabulary, of use until `close`."""
        return LlamaVocabulary(self._context.model)

    def propose_only(self, ids: NDArray[np.int32]) -> None:
        """From now on never propose another token than these."""
        self._writer.barred = np.ones(self.vocab_size, dtype=bool)
        self._writer.barred[ids] = False

    def logits_along(self, ids: Ids) -> Iterator[Logits]:
        """Logits `[V]` after each id of a text, without restriction or penalties; each is valid until the next."""
        slot = self._blank_slot()
        step = min(self._context.batch_size, self.slots * self.max_sequences)  # llama.cpp keeps no more rows of logits
        try:
            for start in range(0, len(ids), step):
                chunk = ids[start : start + step]
                self._context.decode(
                    [BatchRow(token, start + i, slot.seq_ids[0], True) for i, token in enumerate(chunk)]
                )
                for i in range(len(chunk)):
                    yield self._context.logits(i)
        finally:
            self._forget("")

    def release(self, request_id: str) -> None:
        """Free the request's slot; unknown ids are ignored.

        Its ids stay in the cache until another request takes the slot: one that begins alike (the same system prompt,
        the next turn of a conversation) reads only what is new.
        """
        slot = self._held.pop(request_id, None)
        if slot is not None:
            kept, *others = slot.sequences
            self._crop(kept, len(slot.log))
            kept.tail.clear()
            for sequence in others:
                self._crop(sequence, 0)
            slot.sequences = [kept]
            self._idle.append(slot)

    def abandon(self, request_id: str) -> None:
        """Read no further for this request in the call that runs, if it is in one; from any thread.

        It gets an empty block then. What it has begun to write it writes to the end.
        """
        if request_id in self._in_call:
            self._abandoned.add(request_id)

    def _forget(self, request_id: str) -> None:
        """Free the slot and what it holds, which may not be what it should be."""
        slot = self._held.pop(request_id, None)
        if slot is not None:
            for sequence in slot.sequences:
                self._crop(sequence, 0)
            self._idle.insert(0, Slot(slot.seq_ids))

    def warm_up(self, steps: int) -> list[tuple[int, float]]:
        """Decode with 1, 2 and 4 sequences, `steps` times each: (width, seconds), as in `DraftBlock.token_seconds`."""
        timings = []
        slot = self._blank_slot()
        try:
            for width in (w for w in (1, 2, 4) if w <= self.max_sequences):
                slot.sequences = [HeldSequence(seq_id) for seq_id in slot.seq_ids[:width]]
                rows = [
                    BatchRow(i % self.vocab_size, 0, sequence.seq_id, True) for i, sequence in enumerate(slot.sequences)
                ]
                for step in range(steps + 1):
                    started = time.perf_counter()
                    self._context.decode(rows)
                    for i in range(width):
                        self._context.logits(i).argmax()
                    if step > 0:  # the first one reads the weights from disk
                        timings.append((width, time.perf_counter() - started))
                    for sequence in slot.sequences:
                        self._crop(sequence, 0)
        finally:
            self._forget("")
        return timings

    def read(self, ids: Ids) -> None:
        """Run a text that belongs to no request, so that requests which begin with it read only what is new."""
        if ids:
            context = IdLog(ids).context("", agreed=0, prompt_length=len(ids))
            self.draft([DraftJob(context, 0, 0, 1, bets=False, acceptance=1.0, sampling=SamplingParams())])
            self.release("")

    def draft(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftBlock, DraftProbs | None]]:
        """One block per job; all jobs and all their sequences advance in the same decodes.

        A job with bets opens its most probable heads by the theta rule. A head that ends the text is no bet: nothing
        can follow it. When no other head is left, the block has no sequence. A drafted end of text ends its sequence.

        Raises:
            UnknownPrefix: before any work, naming every job whose prefix is not held.
            ContextOverflow: a job's context plus budget does not fit `max_context`, or more jobs than slots.
            NonFiniteLogits: the model broke.
            LlamaCppError: a decode failed. As after `NonFiniteLogits`, the requests of this call are forgotten.
            ValueError: a malformed job; nothing was changed.
        """
        self._check(jobs)
        started = time.time()
        request_ids = [job.context.request_id for job in jobs]
        self._abandoned.clear()
        self._in_call = frozenset(request_ids)
        slots = self._take([job.context for job in jobs])
        for job, slot in zip(jobs, slots, strict=True):
            if job.reproducible and job.context.agreed == 0:
                self._start_over(slot)
        try:
            drafts = [self._begin(job, slot) for job, slot in zip(jobs, slots, strict=True)]
            self._read_contexts(drafts)
            while pending := [draft for draft in drafts if draft.pending]:
                self._advance(pending)
        except BaseException:
            for request_id in request_ids:
                self._forget(request_id)
            raise
        finally:
            self._in_call = frozenset()
        for draft in drafts:
            if draft.unread:
                self._forget(draft.job.context.request_id)
        span = Span(started, time.time())
        return [(draft.block(span), draft.probs(self._writer.keep)) for draft in drafts]

    def _check(self, jobs: Sequence[DraftJob]) -> None:
        """Refuse a call before anything is changed."""
        unknown = [job.context.request_id for job in jobs if not self._knows(job.context)]
        if unknown:
            raise UnknownPrefix(unknown)
        if len({job.context.request_id for job in jobs}) < len(jobs):
            raise ValueError("two jobs of one call belong to the same request")
        if len(jobs) > self.slots:
            raise ContextOverflow(f"{len(jobs)} requests in one call; the draft holds {self.slots}: raise slots")
        for job in jobs:
            context, name = job.context, job.context.request_id
            if job.budget < 0 or job.max_sequences < 1 or context.length < 1:
                raise ValueError(
                    f"request {name}: budget={job.budget} must be at least 0, max_sequences={job.max_sequences} and "
                    f"the length of the context, {context.length}, at least 1"
                )
            if context.length + job.budget > self.max_context:
                raise ContextOverflow(
                    f"request {name}: {context.length} tokens and a budget of {job.budget} do not fit the draft's "
                    f"context of {self.max_context}"
                )
            if context.ids and not 0 <= min(context.ids) <= max(context.ids) < self.vocab_size:
                wrong = next(token for token in context.ids if not 0 <= token < self.vocab_size)
                raise ValueError(
                    f"request {name}: token id {wrong} is not in the draft's vocabulary of {self.vocab_size}"
                )

    def _knows(self, context: Context) -> bool:
        slot = self._held.get(context.request_id)
        log = slot.log if slot else IdLog()
        return context.agreed <= len(log) and log.digest(context.agreed) == context.digest

    # --- requests and their sequences

    def _take(self, contexts: Sequence[Context]) -> list[Slot]:
        """The slots of these requests, which become the most recently used; others make room for new ones."""
        if self._context.closed:
            raise LlamaCppError("this draft is closed: load it again")
        for context in contexts:
            if context.request_id in self._held:
                self._held[context.request_id] = self._held.pop(context.request_id)
        for context in contexts:
            if context.request_id not in self._held:
                if not self._idle:
                    self.release(next(iter(self._held)))
                self._held[context.request_id] = self._choose_idle(context.ids)
        return [self._held[context.request_id] for context in contexts]

    def _blank_slot(self) -> Slot:
        """A slot that holds nothing, for work that belongs to no request; `_forget` it afterwards."""
        [slot] = self._take([Context("", 0, 0, (), 0)])
        self._crop(slot.sequences[0], 0)
        slot.reset()
        return slot

    def _start_over(self, slot: Slot) -> None:
        """Forget the slot's ids and all that idle slots kept: sums over the cache then run in the same order again."""
        for each in (slot, *self._idle):
            for sequence in each.sequences:
                self._crop(sequence, 0)
            each.reset()
        if len(self._held) == 1:
            self._context.clear()

    def _choose_idle(self, ids: Ids) -> Slot:
        """The idle slot whose ids go furthest with these; without a prefix worth keeping, the one idle longest.

        When a request in work shares more, its cells are shared.
        """
        shared = [common_prefix(slot.log.ids, list(ids)) for slot in self._idle]
        longest = max(shared)
        slot = self._idle.pop(shared.index(longest) if longest >= _WORTH_KEEPING else 0)
        others = list(self._held.values())
        lengths = [common_prefix(other.log.ids, list(ids)) for other in others]
        most = max(lengths, default=0)
        if most >= longest + _WORTH_KEEPING:
            source, [kept] = others[lengths.index(most)].sequences[0], slot.sequences
            self._crop(kept, 0)
            self._context.share(source.seq_id, kept.seq_id, most)
            slot.log = IdLog(ids[:most])
        return slot

    def _begin(self, job: DraftJob, slot: Slot) -> Draft:
        """Keep the sequence that shares most with the job's context, cropped to what it shares."""
        known, agreed = len(slot.log), job.context.agreed
        dropped, new = slot.log.ids[agreed:], list(job.context.ids)
        held = agreed + common_prefix(dropped, new)
        kept = slot.sequences[0]
        if held == known:
            following = new[known - agreed :]
            kept = max(slot.sequences, key=lambda sequence: common_prefix(sequence.tail, following))
            held += common_prefix(kept.tail, following)
        slot.log.receive(job.context)
        if job.budget > 0:  # logits come from decoding: read the last token again if it is held
            held = min(held, len(slot.log) - 1)
        for sequence in slot.sequences:
            self._crop(sequence, held if sequence is kept else 0)
        kept.tail.clear()
        slot.sequences = [kept]
        return Draft(job, slot, held)

    def _fork(self, slot: Slot) -> HeldSequence:
        """One more sequence that continues the request's context."""
        used = {sequence.seq_id for sequence in slot.sequences}
        fork = HeldSequence(next(seq_id for seq_id in slot.seq_ids if seq_id not in used))
        self._context.share(slot.sequences[0].seq_id, fork.seq_id, len(slot.log))
        slot.sequences.append(fork)
        return fork

    def _crop(self, sequence: HeldSequence, length: int) -> None:
        self._context.crop(sequence.seq_id, length)

    # --- decoding

    def _read_contexts(self, drafts: Sequence[Draft]) -> None:
        """Decode the ids that are missing from the KV cache; a job starts to write as soon as its own are in."""
        started = time.perf_counter()
        missing = [
            (draft, BatchRow(token, position, draft.trunk.seq_id, position == draft.length - 1))
            for draft in drafts
            for position, token in enumerate(draft.slot.log.ids[draft.held :], draft.held)
        ]
        step = min(_READ_AT_ONCE, self._context.batch_size)
        while missing:
            if self._abandoned:
                left = [each for each in missing if each[0].job.context.request_id in self._abandoned]
                missing = [each for each in missing if each[0].job.context.request_id not in self._abandoned]
                for draft, _ in left:
                    draft.unread += 1
                    draft.prompt_seconds = time.perf_counter() - started
                if not missing:
                    break
            chunk, missing = missing[:step], missing[step:]
            self._context.decode([row for _, row in chunk])
            for i, (draft, row) in enumerate(chunk):
                if row.wanted:
                    draft.prompt_seconds = time.perf_counter() - started
                    if draft.job.budget > 0:
                        draft.start(self._writer.write(draft, self._context.logits(i)))

    def _advance(self, drafts: Sequence[Draft]) -> None:
        """One decode: every live sequence of every job goes one token further."""
        started = time.perf_counter()
        rows = [
            BatchRow(branch.ids[-1], draft.length + len(branch.ids) - 1, branch.sequence.seq_id, True)
            for draft in drafts
            for branch in draft.pending
        ]
        self._context.decode(rows)
        logits = iter([self._context.logits(i) for i in range(len(rows))])
        for draft in drafts:
            for branch in draft.pending:
                branch.sequence.tail.append(branch.ids[-1])
            draft.resume([next(logits) for _ in draft.pending])
        seconds = time.perf_counter() - started
        for draft in drafts:
            draft.token_seconds.append((len(rows), seconds))
