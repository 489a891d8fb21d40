"""Both models along the target's texts, loaded here without Ray: distributions, proposals, templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from duo_ray.actors.prepare import Prepared
from duo_ray.actors.target import load_target
from duo_ray.core.context import IdLog
from duo_ray.core.sampling import distribution
from duo_ray.diagnosis.distances import (
    MULTIPLIERS,
    Array,
    Temperature,
    TemperatureFit,
    divergence,
    log_softmax,
    logs,
    overlap,
    total_variation,
)
from duo_ray.diagnosis.measuring import Observed, Progress, Written
from duo_ray.diagnosis.positions import Estimate, Position, kind_of
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.vocabulary import Counterparts, Strategy, TokenizerVocabulary, Vocabulary
from duo_ray.types import DraftJob, DraftModel, DuoRayError, SamplingParams

if TYPE_CHECKING:
    from duo_ray.models.llama_cpp import LlamaCppDraft
    from duo_ray.models.llama_cpp_target import LlamaCppTarget
    from duo_ray.models.transformers import TransformersTarget

_KEPT = 64
"""A pipeline's draft truncates q to so many tokens (`LlamaCppDraft.load`)."""

_ALL = 2**31 - 1
"""Keeps all of q."""

_LOOK_AHEAD = 4
"""Tokens a draft writes where its text is encoded again: the last one is always held back."""

_PROBE: Sequence[Mapping[str, str]] = ({"role": "user", "content": "How are you?"},)


@dataclass(frozen=True, slots=True)
class View:
    """One way to use the draft, and how often its first guess is right in it."""

    strategy: str
    template: str
    """Whose chat template the draft reads: own or target's; none where there is no chat."""
    used: bool
    """Whether the pipeline uses the draft so."""
    agreement: Estimate
    """Share of the positions of the greedy texts."""


@dataclass(frozen=True, slots=True)
class Templates:
    """The beginning of a chat, as each model's own template writes it; None: it has none."""

    target: str | None
    draft: str | None

    @property
    def differ(self) -> bool:
        return None not in (self.target, self.draft) and self.target != self.draft

    def describe(self) -> str:
        if self.target is None:
            return "the target has no chat template: prompts are completed as plain text"
        if self.draft is None:
            return "the draft has no chat template of its own: it reads the target's"
        if not self.differ:
            return "both models have the same chat template"
        at = next((i for i, (a, b) in enumerate(zip(self.target, self.draft, strict=False)) if a != b),
                  min(len(self.target), len(self.draft)))  # fmt: skip
        ours, theirs = (text[max(0, at - 10) : at + 30] for text in (self.target, self.draft))
        return f"the chat templates differ: {ours!r} is the target's, {theirs!r} the draft's"


@dataclass(frozen=True, slots=True)
class Scores:
    """What both models say along the texts."""

    positions: tuple[Position, ...]
    shared_mass: float
    """Mean probability that the target gives to tokens the draft has too."""
    temperature: Temperature | None
    sampled: Estimate | None
    """Predicted chance that a drafted token of a sampled request is kept, used as the pipeline uses the draft."""
    views: tuple[View, ...]
    templates: Templates
    quant: str | None
    """The draft file's quantisation."""

    @property
    def used(self) -> View:
        return next(view for view in self.views if view.used)


def score(prepared: Prepared, observed: Observed, progress: Progress) -> Scores:
    """Load both models, run them along the texts and free them.

    Raises:
        DuoRayError: a model cannot be loaded on this machine, or the draft proposes nothing.
    """
    from duo_ray.models.llama_cpp import LlamaCppDraft  # noqa: PLC0415 - not before the pipeline has ended: it takes memory

    settings, [draft, *_] = prepared.settings.target, prepared.settings.drafts
    progress("loading the target", 0.0)
    target = load_target(replace(settings, slots=1, cuda_graphs=False))
    progress("loading the draft", 0.0)
    model = LlamaCppDraft.load(
        draft.files[0][1], threads=draft.threads, max_context=draft.max_context, slots=1, max_sequences=1, keep=_ALL
    )
    with closing(model):
        return _Scoring(prepared, target, model, observed, progress).scores()


class _Scoring:
    """One run over all texts for each way to use the draft."""

    def __init__(
        self,
        prepared: Prepared,
        target: LlamaCppTarget | TransformersTarget,
        model: LlamaCppDraft,
        observed: Observed,
        progress: Progress,
    ) -> None:
        self._target, self._model, self._observed, self._progress = target, model, observed, progress
        self._prepared, self._tokenizer = prepared, prepared.tokenizer
        self._same = observed.match.strategy is Strategy.SAME
        self._templates = chat_templates(TokenizerVocabulary(self._tokenizer), model.vocabulary)
        self._done, self._passes = 0, 1
        self._fit = TemperatureFit()

    def scores(self) -> Scores:
        observed, written = self._observed, self._observed.written
        others = self._other_views()
        self._passes = len(written) + sum(not text.sampled for text in written) * len(others)
        strategy = observed.match.strategy
        # Distributions can be compared token by token only; text has none.
        compared = Strategy.INTERSECTION if strategy is Strategy.STRING else strategy
        draft = self._draft(compared)
        known = self._proposable(compared)
        positions, masses = [], []
        for text in written:
            self._tick("comparing distributions")
            for position, mass in self._compare(text, draft, known):
                positions.append(position)
                masses.append(mass)
        right = [each.agrees for each in positions if not each.sampled]
        sampled = Estimate.of_mean([each.overlap for each in positions if each.sampled])
        views = [self._view(compared, own_template=compared is not Strategy.SAME, right=right)]
        for other, own in others:
            views.append(self._view(other, own_template=own, right=self._guesses_right(other, own_template=own)))
        if strategy is Strategy.STRING:
            sampled = self._drawn_alike()
        path = self._prepared.draft_path
        quant = None if path is None else read_gguf(path).quant
        return Scores(
            tuple(positions), float(np.mean(masses)), self._fit.result(), sampled, tuple(views), self._templates, quant
        )

    # --- ways to use the draft

    def _other_views(self) -> list[tuple[Strategy, bool]]:
        """(strategy, whether a chat is read in the draft's template) beside that whose distributions are compared."""
        if self._same:
            return [(Strategy.INTERSECTION, True)] if self._templates.differ else []
        views = [(Strategy.STRING, True)]
        if self._templates.target is not None and self._templates.draft is not None:
            views.append((Strategy.INTERSECTION, False))
        return views

    def _draft(self, strategy: Strategy, *, own_template: bool = True) -> DraftModel:
        from duo_ray.models.translating import adapt  # noqa: PLC0415 - as in `score`

        self._model.propose_only(np.arange(self._model.vocab_size, dtype=np.int32))
        draft, _ = adapt(self._model, self._tokenizer, strategy, own_template=own_template)
        return draft

    def _view(self, strategy: Strategy, *, own_template: bool, right: Sequence[bool]) -> View:
        templates = self._templates
        whose = "none" if templates.target is None else "own" if own_template and templates.draft else "target's"
        used = strategy is self._observed.match.strategy and own_template is (strategy is not Strategy.SAME)
        agreement = Estimate.of_share(sum(right), len(right))
        if agreement is None:
            raise DuoRayError("the draft proposed no token along these texts: ask for longer answers (--max-tokens)")
        return View(str(strategy), whose, used, agreement)

    def _proposable(self, strategy: Strategy) -> NDArray[np.bool_]:
        """`[target.vocab_size]`: the target's ids that the draft can propose."""
        known = np.zeros(self._target.vocab_size, dtype=bool)
        if strategy is Strategy.SAME:
            known[: self._model.vocab_size] = True
        else:
            counterparts = Counterparts(TokenizerVocabulary(self._tokenizer), self._model.vocabulary)
            ids = counterparts.to_target[counterparts.shared]
            known[ids[ids < len(known)]] = True
        return known

    # --- along a text

    def _compare(self, text: Written, draft: DraftModel, known: NDArray[np.bool_]) -> Iterator[tuple[Position, float]]:
        params = self._observed.sampling
        special = self._tokenizer.is_special
        # Temperature 1 and nothing cut off: what the request does to q is done below, on the same numbers.
        written = _proposals(draft, text, SamplingParams(temperature=1.0), budget=1)
        before = b""
        rows = self._target.logits_along((*text.prompt, *text.answer[:-1]), len(text.answer))
        for place, (logits, (_, q_row), token) in enumerate(zip(rows, written, text.answer, strict=True)):
            piece = self._tokenizer.piece(token)
            kind = kind_of(piece, special=special(token), follows_word=before[-1:].isalnum() or before[-1:] > b"\x7f")
            before = piece or before
            if q_row is None:  # the draft waits for the rest of a character
                continue
            ids, q = q_row
            dense = np.zeros(len(known))
            dense[ids] = q
            log_p = log_softmax(logits)
            common = log_softmax(log_p[known]), logs(dense[known])
            self._fit.add(*common)
            p = distribution(logits, params)
            p_top, log_top = p[ids[:_KEPT]], logs(q[:_KEPT])
            if text.sampled:
                heated = (replace(params, temperature=m * params.temperature) for m in MULTIPLIERS)
                self._fit.add_overlaps([overlap(p_top, distribution(log_top, each)) for each in heated])
            right = int(logits.argmax()) if text.sampled else token
            yield (
                Position(
                    place=place,
                    kind=kind,
                    sampled=text.sampled,
                    divergence=divergence(*common),
                    variation=total_variation(*(np.exp(each) for each in common)),
                    agrees=int(ids[0]) == right,
                    overlap=overlap(p_top, distribution(log_top, params)),
                    confidence=float(q[0]),
                ),
                float(np.exp(log_p[known]).sum()),
            )

    def _guesses_right(self, strategy: Strategy, *, own_template: bool) -> list[bool]:
        """For each position of the greedy texts, whether the draft proposes the target's token."""
        draft = self._draft(strategy, own_template=own_template)
        right = []
        for text in (each for each in self._observed.written if not each.sampled):
            self._tick(f"trying the draft by {strategy}")
            budget = _LOOK_AHEAD if strategy is Strategy.STRING else 1
            written = _proposals(draft, text, SamplingParams(temperature=0.0), budget=budget)
            right += [guess == token for (guess, _), token in zip(written, text.answer, strict=True)]
        return right

    def _drawn_alike(self) -> Estimate | None:
        """Chance that the target draws the token that re-encoded text proposes, over the sampled texts."""
        draft = self._draft(Strategy.STRING)
        params = self._observed.sampling
        chances = []
        for text in (each for each in self._observed.written if each.sampled):
            rows = self._target.logits_along((*text.prompt, *text.answer[:-1]), len(text.answer))
            written = _proposals(draft, text, SamplingParams(temperature=0.0), budget=_LOOK_AHEAD)
            chances += [
                0.0 if guess is None else float(distribution(logits, params)[guess])
                for logits, (guess, _) in zip(rows, written, strict=True)
            ]
        return Estimate.of_mean(chances)

    def _tick(self, what: str) -> None:
        self._progress(f"{what}, text {self._done + 1} of {self._passes}", self._done / self._passes)
        self._done += 1


_Row = tuple[NDArray[np.int32], Array]
"""q: the target's ids `[K]` and their probabilities `[K]`, best first."""


def _proposals(
    draft: DraftModel, text: Written, sampling: SamplingParams, *, budget: int
) -> Iterator[tuple[int | None, _Row | None]]:
    """What the draft proposes at each position of an answer, as it does for the pipeline: a token, and q if sampled."""
    log, agreed = IdLog(text.prompt), 0
    try:
        for token in text.answer:
            context = log.context("diagnosis", agreed=agreed, prompt_length=len(text.prompt))
            job = DraftJob(context, 0, budget, 1, bets=False, acceptance=1.0, sampling=sampling)
            [(block, probs)] = draft.draft([job])
            guess = next((ids[0] for ids in (sequence.ids for sequence in block.sequences) if ids), None)
            row = None
            if probs is not None and guess is not None:
                q = probs.probs[0][0].astype(np.float64)
                row = probs.ids[0][0][q > 0.0], q[q > 0.0]
            yield guess, row
            agreed = len(log)
            log.extend([token])
    finally:
        draft.release("diagnosis")


def chat_templates(target: Vocabulary, draft: Vocabulary) -> Templates:
    """What either model's template makes of the same short chat."""
    return Templates(_rendered(target), _rendered(draft))


def _rendered(vocabulary: Vocabulary) -> str | None:
    ids = vocabulary.chat(_PROBE)
    if ids is None:
        return None
    without_bos = ids[1:] if ids[:1] == [vocabulary.bos] else ids
    return b"".join(vocabulary.piece(token) for token in without_bos).decode(errors="replace")
