"""A draft that speaks other tokens than the target, in the target's tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from duo_ray.hardware.machine import detect_machine
from duo_ray.models.alignment import Alignment
from duo_ray.models.catalog import TargetFiles
from duo_ray.models.conversation import ConversationReader
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import (
    SAMPLE,
    Counterparts,
    Strategy,
    TokenizerVocabulary,
    Vocabulary,
    VocabularyMatch,
    choose,
    compare,
    shared_mass,
    tokens_per_token,
)
from duo_ray.types import (
    DraftBlock,
    DraftJob,
    DraftModel,
    DraftProbs,
    DraftSequence,
    Ids,
    Outcome,
    SamplingParams,
    Span,
    UnknownPrefix,
)

_WEIGHED_TOKENS = 128
"""So many tokens of the sample text tell what the common tokens carry."""

_PRIOR_TOKENS = 16
"""So many target tokens weighs what is expected of the ratio of tokens against what a request's own text shows."""

Drafted = tuple[DraftBlock, DraftProbs | None]


def adapt(
    draft: LlamaCppDraft, tokenizer: Tokenizer, wanted: str, *, own_template: bool = True
) -> tuple[DraftModel, VocabularyMatch]:
    """A draft of any family for the target with this tokenizer.

    Args:
        wanted: `models.draft.vocabulary`: auto, or the name of a strategy.
        own_template: a draft whose tokens are translated reads a chat in its own template, where it has one.

    Raises:
        VocabularyError: the strategy that is wanted cannot work with these vocabularies.
    """
    target, theirs = TokenizerVocabulary(tokenizer), draft.vocabulary
    report, counterparts = compare(target, theirs)
    if report.same and wanted in ("auto", Strategy.SAME):
        if theirs.size > target.size:  # padding
            draft.propose_only(np.arange(target.size, dtype=np.int32))
        return draft, VocabularyMatch(report, Strategy.SAME, "all ids of the target mean the same to the draft")
    counterparts = counterparts or Counterparts(target, theirs)
    shared = counterparts.shared

    def mass() -> float:
        return shared_mass(draft.logits_along(tuple(theirs.opening(SAMPLE)[:_WEIGHED_TOKENS])), shared)

    ratio = tokens_per_token(target, theirs)
    match = choose(wanted, report, mass, ratio)
    if match.strategy is Strategy.INTERSECTION:
        draft.propose_only(shared)
    return TranslatingDraft(
        draft,
        theirs,
        target,
        strategy=match.strategy,
        counterparts=counterparts,
        ratio=1.0 if match.strategy is Strategy.INTERSECTION else ratio,
        reader=ConversationReader(tokenizer) if own_template else None,
    ), match


def examine(draft: Path, target: TargetFiles, wanted: str) -> VocabularyMatch:
    """How the draft in a .gguf file would be used for a target; errors as of `adapt`."""
    model = LlamaCppDraft.load(draft, threads=min(8, len(detect_machine().cores)), max_context=_WEIGHED_TOKENS, slots=1)
    try:
        return adapt(model, Tokenizer.load(target.tokenizer_path, rows=target.vocab_size), wanted)[1]
    finally:
        model.close()


class TranslatingDraft:
    """A `DraftModel` in the target's ids around one in its own.

    `Strategy.INTERSECTION` needs a draft that proposes only tokens with a counterpart: ids are exchanged one by one,
    and what the draft sampled from is shipped in the target's ids, so the usual rule applies.

    `Strategy.STRING` lets the draft write freely, always its most probable tokens, and encodes that text again. What
    comes out is a deterministic proposal, kept where the target draws the same token. The last token is held back as
    long as more text could still make it another one.
    """

    def __init__(
        self,
        draft: DraftModel,
        draft_vocabulary: Vocabulary,
        target: Vocabulary,
        *,
        strategy: Strategy,
        counterparts: Counterparts,
        ratio: float,
        reader: ConversationReader | None = None,
    ) -> None:
        """`ratio` is how many draft tokens a target token takes; `reader` finds the messages in a chat's prompt."""
        self._draft, self._target, self._draft_vocabulary = draft, target, draft_vocabulary
        self._strategy, self._counterparts, self._ratio, self._reader = strategy, counterparts, ratio, reader
        self.vocab_size, self.max_context = target.size, draft.max_context
        self._turn_end = _turn_end(target)
        self._held: dict[str, Alignment] = {}

    def draft(self, jobs: Sequence[DraftJob]) -> list[Drafted]:
        """See `DraftModel.draft`; `ContextOverflow` counts the draft's own tokens."""
        started = time.time()
        held = [self._held.get(job.context.request_id) or self._new_alignment() for job in jobs]
        unknown = [job.context.request_id for job, each in zip(jobs, held, strict=True) if not each.knows(job.context)]
        if unknown:
            raise UnknownPrefix(unknown)
        for job, alignment in zip(jobs, held, strict=True):
            self._held[job.context.request_id] = alignment
            alignment.receive(job.context)
        ready = [(job, alignment) for job, alignment in zip(jobs, held, strict=True) if not alignment.waits]
        drafted = iter(self._drafted(ready) if ready else ())
        answers: list[Drafted] = []
        for job, alignment in zip(jobs, held, strict=True):
            length, _ = alignment.lengths
            if alignment.waits:
                answers.append((_nothing(job, length, Span(started, time.time())), None))
                continue
            block, probs = next(drafted)
            alignment.tails = [_all_ids(sequence) for sequence in block.sequences]
            exchange = self._strategy is Strategy.INTERSECTION
            ours = self._exchanged(job, alignment, block) if exchange else self._encoded(job, alignment, block)
            whole = replace(ours, length=length, span=Span(started, time.time()))
            answers.append((whole, self._exchanged_probs(probs) if exchange else None))
        return answers

    def _drafted(self, ready: Sequence[tuple[DraftJob, Alignment]]) -> list[Drafted]:
        """The draft's own answers."""
        try:
            return self._draft.draft([self._job(*each) for each in ready])
        except UnknownPrefix:  # its slot went to another request
            return self._draft.draft([self._job(*each, whole=True) for each in ready])

    def release(self, request_id: str) -> None:
        """See `DraftModel.release`."""
        self._held.pop(request_id, None)
        self._draft.release(request_id)

    def _new_alignment(self) -> Alignment:
        return Alignment(self._target, self._draft_vocabulary, self._counterparts, self._conversation)

    def _conversation(self, prompt: Ids) -> list[int] | None:
        messages = self._reader.read(prompt) if self._reader is not None else None
        return None if messages is None else self._draft_vocabulary.chat(messages)

    # --- the job

    def _job(self, job: DraftJob, alignment: Alignment, *, whole: bool = False) -> DraftJob:
        """The job in the draft's ids."""
        ours, theirs = alignment.lengths
        job = replace(job, context=alignment.draft_context(job.context.request_id, whole=whole))
        sampling = replace(job.sampling, logit_bias=self._bias(job.sampling))
        if self._strategy is Strategy.INTERSECTION:
            return replace(job, sampling=sampling, position_shift=ours - theirs)
        if not sampling.greedy:
            # What is most probable is most often what the target draws; no draw of the draft's can improve on it.
            job = replace(job, chance_temperature=sampling.temperature)
            sampling = replace(sampling, temperature=0.0)
        ratio = self._ratio_of(alignment)
        return replace(
            job,
            sampling=sampling,
            budget=round(job.budget * ratio) + 1 if job.budget else 0,
            acceptance=job.acceptance ** (1.0 / ratio),
        )

    def _bias(self, params: SamplingParams) -> tuple[tuple[int, float], ...]:
        to_draft = self._counterparts.to_draft
        return tuple((to_draft[token], bias) for token, bias in params.logit_bias if token in to_draft)

    def _ratio_of(self, alignment: Alignment) -> float:
        """Draft tokens for a target token: as expected at first, as this request's text has it later."""
        ours, theirs = alignment.answer_lengths
        return max(0.25, (theirs + self._ratio * _PRIOR_TOKENS) / (ours + _PRIOR_TOKENS))

    # --- the block, token by token

    def _exchanged(self, job: DraftJob, alignment: Alignment, block: DraftBlock) -> DraftBlock:
        table = self._counterparts.to_target
        sequences = tuple(
            DraftSequence(
                None if sequence.bet is None else Outcome(job.assumed, int(table[sequence.bet.token])),
                tuple(int(table[token]) for token in sequence.ids),
                sequence.chance,
            )
            for sequence in block.sequences
        )
        # A draft that waits for the rest of a character writes what follows it elsewhere.
        return replace(block, sequences=sequences if alignment.complete else ())

    def _exchanged_probs(self, probs: DraftProbs | None) -> DraftProbs | None:
        if probs is None:
            return None
        table = self._counterparts.to_target
        return DraftProbs(
            tuple(np.where(q > 0, table[ids], 0) for ids, q in zip(probs.ids, probs.probs, strict=True)), probs.probs
        )

    # --- the block, as text

    def _encoded(self, job: DraftJob, alignment: Alignment, block: DraftBlock) -> DraftBlock:
        found: dict[int | None, DraftSequence] = {}
        left = job.budget
        for sequence in block.sequences:
            ids = self._settled(*alignment.following(_all_ids(sequence)), chat=alignment.is_chat)[:left]
            head = ids[0] if job.bets and ids else None
            if head in found:  # two heads of the draft that begin the same token of the target
                chance = min(1.0, found[head].chance + sequence.chance)
                found[head] = replace(found[head], chance=chance)
            elif head is not None and head not in self._target.ends:
                found[head] = DraftSequence(Outcome(job.assumed, head), ids[1:], sequence.chance)
                left -= len(ids)
            elif not job.bets:
                found[None] = DraftSequence(None, ids, sequence.chance)
        sequences = sorted(found.values(), key=lambda sequence: -sequence.chance)
        longest = max((len(_all_ids(sequence)) for sequence in sequences), default=0)
        timings, pace = _per_target_token(block.token_seconds, longest, usual=self._ratio)
        return replace(block, sequences=tuple(sequences), token_seconds=timings, pace=pace)

    def _settled(self, text: bytes, special: int | None, *, chat: bool) -> Ids:
        """The target's ids of drafted text, as far as no further text can change them."""
        ids: list[int] = []
        while text and text[0] & 0xC0 == 0x80:  # the rest of a character whose start is in the context
            if text[0] not in self._counterparts.target_bytes:
                return tuple(ids)
            ids.append(self._counterparts.target_bytes[text[0]])
            text = text[1:]
        whole = _whole_characters(text)
        raw = whole.encode()
        at = 0
        for token in self._target.continuation(whole):
            piece = self._target.piece(token)
            if not piece or self._target.is_special(token) or not raw.startswith(piece, at):
                break
            ids.append(token)
            at += len(piece)
        if at < len(text):  # no spelling in the target's vocabulary, or half a character
            return tuple(ids)
        if special is None:
            return tuple(ids[:-1])
        end = self._end(special, chat=chat)
        return (*ids, end) if end is not None else tuple(ids)

    def _end(self, special: int, *, chat: bool) -> int | None:
        """The target's token for the special one that the draft ended its text with."""
        counterpart = int(self._counterparts.to_target[special])
        if special not in self._draft_vocabulary.ends:
            return counterpart if counterpart >= 0 else None
        if chat and self._turn_end is not None:
            return self._turn_end
        return counterpart if counterpart >= 0 else next(iter(self._target.ends), None)


def _nothing(job: DraftJob, length: int, span: Span) -> DraftBlock:
    """The answer to a job that only reads, of which nothing can be read yet."""
    return DraftBlock(job.context.request_id, length, (), span, (), length, 0.0)


def _all_ids(sequence: DraftSequence) -> Ids:
    return sequence.ids if sequence.bet is None else (sequence.bet.token, *sequence.ids)


def _whole_characters(text: bytes) -> str:
    """The text up to the first bytes that are no character, or not yet."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


def _per_target_token(
    timings: Sequence[tuple[int, float]], tokens: int, *, usual: float
) -> tuple[tuple[tuple[int, float], ...], float | None]:
    """Seconds per decode of a block as seconds per target token, of which its longest sequence has `tokens`.

    The seconds are those of a text that takes the `usual` number of decodes for a token, so that the times of different
    texts can be compared; beside them stands what multiple of that number this block took, None where nothing came out
    of it.
    """
    if not timings:
        return (), None
    decodes = (len(timings) + 1) / max(tokens, 1)  # the first token came from the decode that read the context
    by_width: dict[int, list[float]] = {}
    for width, seconds in timings:
        by_width.setdefault(width, []).append(seconds)
    per_token = tuple(
        (width, fmean(seconds) * usual)
        for width, seconds in by_width.items()
        for _ in range(max(1, round(len(seconds) / decodes)))
    )
    return per_token, decodes / usual if tokens else None


def _turn_end(target: Vocabulary) -> int | None:
    """The id that ends the assistant's turn in the target's chat template."""
    ids = target.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) or []
    return next((token for token in reversed(ids) if token in target.ends), None)
