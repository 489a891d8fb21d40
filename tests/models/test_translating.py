"""A draft with other tokens: nothing of the target's output changes, sampled or greedy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from duo_ray.core.context import IdLog
from duo_ray.core.gamma import Plan
from duo_ray.models.scripted import ScriptedDraft, ScriptedTarget, random_table
from duo_ray.models.translating import TranslatingDraft
from duo_ray.models.vocabulary import Counterparts, Strategy
from duo_ray.types import DraftJob, DraftModel, DraftProbs, SamplingParams, UnknownPrefix
from tests.core.exactness import TARGET_TABLE, VOCAB, cached, exact_distribution, ids_of, observed, p_value
from tests.models.typist import Typist

GREEDY = SamplingParams(temperature=0.0)
SAMPLES = 20_000
FEWER = 2_000
PLAN = Plan(lead=2, gamma=6, overlap=True, reason="test")


class Letters:
    """A vocabulary over the letters a, b, c; text becomes the longest tokens that fit, from left to right."""

    bos, ends, drops_first_space = None, (), False

    def __init__(self, *pieces):
        self.pieces = [piece.encode() for piece in pieces]
        self.size = len(pieces)

    def piece(self, token):
        return self.pieces[token] if token < self.size else b""

    def is_special(self, token):
        return False

    def continuation(self, text):
        ids, rest = [], text.encode()
        while rest:
            fitting = [token for token, piece in enumerate(self.pieces) if rest.startswith(piece)]
            ids.append(max(fitting, key=lambda token: len(self.pieces[token])))
            rest = rest[len(self.pieces[ids[-1]]) :]
        return ids

    opening = continuation

    def chat(self, messages):
        return None


TARGET = Letters("a", "b", "ab", "c", "ba")
DRAFT = Letters("b", "bc", "a", "aab", "c", "ab", "ca")
COUNTERPARTS = Counterparts(TARGET, DRAFT)
BARRED = np.where(COUNTERPARTS.to_target < 0, -np.inf, 0.0)
TABLE = cached(random_table(DRAFT.size, seed=3, order=2, scale=1.0))


def translating(strategy, kind=TranslatingDraft):
    table = TABLE if strategy is Strategy.STRING else cached(lambda ids: TABLE(ids) + BARRED)
    draft = ScriptedDraft(table, DRAFT.size, keep=DRAFT.size)
    return kind(draft, DRAFT, TARGET, strategy=strategy, counterparts=COUNTERPARTS, ratio=1.0)


def test_it_implements_the_seam():
    assert isinstance(translating(Strategy.STRING), DraftModel)


@pytest.mark.parametrize("strategy", [Strategy.STRING, Strategy.INTERSECTION])
def test_a_prompt_read_in_parts_is_translated_once_it_is_whole(strategy):
    prompt, log = (0, 1, 2, 3, 4, 2, 0, 1), IdLog()
    log.extend(prompt)

    def job(agreed, end, budget):
        context = log.context("r", agreed=agreed, prompt_length=len(prompt), end=end)
        return DraftJob(context, 0, budget, 1, False, 0.8, GREEDY)

    draft, at_once = translating(strategy), translating(strategy)
    [(nothing, _)] = draft.draft([job(0, 3, 0)])
    draft.draft([job(3, 6, 0)])
    [(block, _)] = draft.draft([job(6, len(prompt), 4)])
    [(expected, _)] = at_once.draft([job(0, len(prompt), 4)])
    assert (nothing.length, nothing.sequences) == (3, ())
    assert block.sequences == expected.sequences
    assert block.sequences


@pytest.mark.parametrize("strategy", [Strategy.STRING, Strategy.INTERSECTION])
@pytest.mark.parametrize("max_sequences", [1, 4])
def test_greedy_output_is_the_targets_own(strategy, max_sequences):
    params = SamplingParams(temperature=0.0)
    alone = ids_of(ScriptedTarget(TARGET_TABLE, VOCAB), None, params, Plan(0, 0, False, "alone"), max_tokens=60)
    drafted = ids_of(
        ScriptedTarget(TARGET_TABLE, VOCAB), translating(strategy), params, PLAN, max_tokens=60,
        max_sequences=max_sequences,
    )  # fmt: skip
    assert drafted == alone


@pytest.mark.parametrize(
    ("strategy", "changes", "max_sequences"),
    [
        (Strategy.INTERSECTION, {"temperature": 1.0}, 3),
        (Strategy.INTERSECTION, {"temperature": 0.7, "top_k": 4, "presence_penalty": 0.5, "logit_bias": ((2, 1),)}, 2),
        (Strategy.STRING, {"temperature": 1.0}, 3),
    ],
)  # fmt: skip
def test_sampled_output_has_the_targets_distribution(strategy, changes, max_sequences):
    """A right rule fails with probability 1e-4."""
    draft = translating(strategy)
    counts = observed(
        lambda i: SamplingParams(**changes, seed=i), PLAN, samples=SAMPLES, max_sequences=max_sequences, draft=draft
    )
    assert p_value(counts, exact_distribution(SamplingParams(**changes)), SAMPLES) > 1e-4


def test_matched_by_text_a_seed_gives_what_it_gives_without_a_draft():
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed)
        alone = ids_of(ScriptedTarget(TARGET_TABLE, VOCAB), None, params, Plan(0, 0, False, "alone"), max_tokens=20)
        assert alone == ids_of(
            ScriptedTarget(TARGET_TABLE, VOCAB), translating(Strategy.STRING), params, PLAN, max_tokens=20
        )


class PassedOffAsSampled(TranslatingDraft):
    """Ships the distribution of tokens that were picked, as if they had been sampled from it."""

    def _job(self, job, alignment, **options):
        return dataclasses.replace(
            super()._job(job, alignment, **options), sampling=dataclasses.replace(job.sampling, temperature=0.05)
        )

    def _exchanged_probs(self, probs):
        probs = super()._exchanged_probs(probs)
        return DraftProbs(probs.ids, tuple(q ** np.float32(0.05) for q in probs.probs))


class NotRenormalised(TranslatingDraft):
    """Ships the draft's distribution over all of its tokens, though it sampled from the common ones only."""

    def _exchanged_probs(self, probs):
        probs = super()._exchanged_probs(probs)
        return DraftProbs(probs.ids, tuple(0.6 * q for q in probs.probs))


@pytest.mark.parametrize("wrong", [PassedOffAsSampled, NotRenormalised])
def test_a_wrong_rule_fails_the_same_test(wrong):
    params = SamplingParams(temperature=1.0)
    draft = translating(Strategy.INTERSECTION, wrong)
    counts = observed(lambda i: dataclasses.replace(params, seed=i), PLAN, samples=FEWER, max_sequences=2, draft=draft)
    assert p_value(counts, exact_distribution(params), FEWER) < 1e-9


# --- what the draft is asked, and what becomes of its answer

WORDS = Letters(" wor", "ld", " world", "s", " is", ".", "b", "</s>", " ")
PARTS = Letters(" w", "or", "ld", " world", "s", " i", "</s>", "b", ".", " ")


class Typed:
    """A typist behind a translation by text."""

    def __init__(self, target=WORDS, draft=PARTS, **options):
        self.typist = Typist(draft.size, **options)
        self.target, self.draft = target, draft
        self.model = TranslatingDraft(
            self.typist, draft, target, strategy=Strategy.STRING, counterparts=Counterparts(target, draft), ratio=1.5
        )

    def ask(self, context, *sequences, budget=8, bets=False, request="r", sampling=GREEDY):
        """Draft behind `context` (target ids); `sequences` are the texts or ids the draft writes."""
        self.typist.sequences = [
            (tuple(self.draft.continuation(text)) if isinstance(text, str) else text, 0.5 - 0.1 * i)
            for i, text in enumerate(sequences)
        ]
        message = IdLog(context).context(request, agreed=0, prompt_length=1)
        [(block, probs)] = self.model.draft([DraftJob(message, 0, budget, 4, bets, 0.7, sampling)])
        assert probs is None
        return block

    def seen(self, request="r"):
        return b"".join(self.draft.piece(token) for token in self.typist.logs[request].ids)


def texts(block, vocabulary=WORDS):
    """The text of every sequence."""
    heads = [() if sequence.bet is None else (sequence.bet.token,) for sequence in block.sequences]
    return [
        [vocabulary.piece(token).decode() for token in (*head, *sequence.ids)]
        for head, sequence in zip(heads, block.sequences, strict=True)
    ]


def test_drafted_text_becomes_the_targets_tokens_and_the_last_one_is_held_back():
    assert texts(Typed().ask([6], " world is world")) == [[" world", " is"]]


def test_a_token_that_more_text_would_change_is_not_proposed():
    assert texts(Typed().ask([6], " wor")) == [[]]
    assert texts(Typed().ask([6], " world is. wor")) == [[" world", " is", "."]]


def test_gamma_counts_the_targets_tokens_over_all_sequences():
    block = Typed().ask([6], " world is. world", " is world. world", budget=5, bets=True)
    assert block.drafted == 5
    assert texts(block) == [[" world", " is", "."], [" is", " world"]]


def test_the_draft_is_asked_for_as_many_of_its_tokens_as_the_targets_take():
    typed = Typed()
    typed.ask([6], "", budget=8)
    assert typed.typist.jobs[-1].budget == 13  # 8 x 1.5, and the one that is held back
    typed.ask([6], "", budget=0, request="other")
    assert typed.typist.jobs[-1].budget == 0


def test_sequences_that_begin_with_the_same_token_of_the_target_are_one():
    block = Typed().ask([6], (0, 1, 2, 5, 4), (3, 4, 8, 8), bets=True)  # " w" "or" "ld" " i" "s", " world" "s" "." "."
    assert [sequence.bet.token for sequence in block.sequences] == [2]
    assert block.sequences[0].chance == pytest.approx(0.9)
    assert texts(block) == [[" world"]]


def test_the_best_sequence_comes_first_also_when_others_together_are_better():
    block = Typed().ask([6], " is world", (3, 4, 8), (0, 1, 2, 8), bets=True)
    assert [sequence.chance for sequence in block.sequences] == pytest.approx([0.7, 0.5])


def test_a_block_goes_on_behind_what_was_kept_of_the_last_one():
    typed = Typed()
    typed.ask([6], " world is. world")
    typed.ask([6, 2, 4], "")  # " world is"
    job = typed.typist.jobs[-1]
    assert job.context.ids == tuple(PARTS.continuation(" world is"))
    assert job.context.agreed == 1


def test_a_correction_is_encoded_from_the_start_of_its_word():
    typed = Typed()
    typed.ask([6, 4, 0], "")  # "b is wor"
    typed.ask([6, 4, 0, 1], "")  # "b is world"
    assert typed.seen() == b"b is world"
    assert typed.typist.logs["r"].ids[-1] == 3
    assert typed.typist.jobs[-1].context.agreed == 3  # "b" " i" "s"


def test_a_draft_that_lost_the_request_gets_all_of_it_again():
    typed = Typed()
    typed.ask([6, 2, 4], "")
    typed.typist.logs.clear()
    typed.ask([6, 2, 4, 2], "")
    assert typed.seen() == b"b world is world"


def test_a_prefix_that_is_not_held_is_refused_by_name():
    typed = Typed()
    message = IdLog([6, 2]).context("r", agreed=1, prompt_length=1)
    with pytest.raises(UnknownPrefix) as refused:
        typed.model.draft([DraftJob(message, 0, 4, 1, False, 0.7, GREEDY)])
    assert refused.value.request_ids == ("r",)
    assert typed.typist.jobs == []


def test_released_requests_are_forgotten_on_both_sides():
    typed = Typed()
    typed.ask([6, 2], "")
    typed.model.release("r")
    typed.model.release("never seen")
    assert typed.typist.logs == {}
    with pytest.raises(UnknownPrefix):
        typed.model.draft(
            [DraftJob(IdLog([6, 2, 4]).context("r", agreed=2, prompt_length=1), 0, 4, 1, False, 0.7, GREEDY)]
        )


def test_seconds_are_told_per_token_of_the_target():
    block = Typed().ask([6], (0, 1, 2, 5, 4, 8))  # 6 draft tokens, 2 of the target settled
    assert texts(block) == [[" world", " is"]]
    assert [seconds for _, seconds in block.token_seconds] == pytest.approx([0.01 * 1.5] * 2)  # as of a usual text
    assert block.pace == pytest.approx(6 / 2 / 1.5)


def test_sampled_requests_are_drafted_greedily_with_the_chances_of_their_temperature():
    typed = Typed()
    typed.ask([6], "", sampling=SamplingParams(temperature=0.8, logit_bias=((2, 1.0), (0, 5.0))))
    job = typed.typist.jobs[-1]
    assert job.sampling.greedy
    assert job.chance_temperature == 0.8
    assert job.sampling.logit_bias == ((3, 1.0),)  # " world"; " wor" has no counterpart


def test_random_numbers_are_keyed_by_the_targets_positions():
    typist = Typist(DRAFT.size)
    model = TranslatingDraft(
        typist, DRAFT, TARGET, strategy=Strategy.INTERSECTION, counterparts=COUNTERPARTS, ratio=1.0
    )
    context = IdLog([1, 3, 0, 0, 1]).context("r", agreed=0, prompt_length=2)  # b c a a b: "bc" "aab" to the draft
    model.draft([DraftJob(context, 0, 4, 1, False, 0.7, SamplingParams(temperature=1.0))])
    assert typist.jobs[-1].context.length == 2
    assert typist.jobs[-1].position_shift == 3


def test_a_step_costs_the_same_behind_a_long_text():
    """4,000 tokens of context: what is encoded and sent is only what is new."""
    target, draft = Counting(*(p.decode() for p in WORDS.pieces)), Counting(*(p.decode() for p in PARTS.pieces))
    typed = Typed(target, draft)
    context = [6, *[2, 4] * 2000]
    log = IdLog(context)
    typed.ask(context, " world is")
    target.encoded = draft.encoded = 0
    for _ in range(10):
        agreed = len(log)
        log.extend([2, 3, 4])
        typed.typist.sequences = [(tuple(PARTS.continuation(" world is. world")), 1.0)]
        message = log.context("r", agreed=agreed, prompt_length=1)
        typed.model.draft([DraftJob(message, 0, 8, 1, False, 0.7, GREEDY)])
        assert len(typed.typist.jobs[-1].context.ids) <= 4
    assert draft.encoded <= 10 * len(" worlds is")
    assert target.encoded == 10 * len(" world is. world")
    assert typed.seen().endswith(b" worlds is")


class Counting(Letters):
    encoded = 0

    def continuation(self, text):
        self.encoded += len(text)
        return super().continuation(text)

    opening = continuation
