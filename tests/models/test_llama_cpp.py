"""What is drafted: every block against llama.cpp run plainly, one token per decode."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from duo_ray.core.sampling import distribution
from duo_ray.models import llama_cpp
from duo_ray.models.llama_context import BatchRow
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.types import DraftModel, DraftProbs, Ids, Outcome, SamplingParams
from tests.models.drafting import (
    CONTEXT,
    GREEDY,
    NEVER_ENDS,
    PROMPT,
    SAMPLED,
    VOCAB,
    Reference,
    assert_greedy,
    assert_rows_are_fresh,
    draft_fresh,
    draft_one,
    drafted_ids,
    make_job,
)
from tests.models.tiny_gguf import END, write_tiny_llama


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
    assert len(draft_fresh(draft, reference, PROMPT, 24).sequences) > 2


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
    assert draft_fresh(draft, reference, context, 12, agreed=len(PROMPT)).prompt_tokens == 1


def test_an_accepted_branch_that_is_not_the_best_continues_with_one_token(
    draft: LlamaCppDraft, reference: Reference
) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 24, SAMPLED, bets=True))
    context = (*PROMPT, *drafted_ids(block)[1])
    assert len(block.sequences[1].ids) > 0
    assert draft_fresh(draft, reference, context, 8, agreed=len(PROMPT)).prompt_tokens == 1


def test_one_accepted_block_after_the_other_continues_with_one_token(
    draft: LlamaCppDraft, reference: Reference
) -> None:
    block, _ = draft_one(draft, make_job(PROMPT, 8, SAMPLED, bets=True))
    context, agreed = PROMPT, len(PROMPT)
    for _ in range(5):
        context, agreed = (*context, *drafted_ids(block)[0]), len(context)
        block = draft_fresh(draft, reference, context, 8, agreed=agreed)
        assert block.prompt_tokens == 1


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
    assert draft_fresh(draft, reference, (*system, 7, 8, 9), 8, request="second").prompt_tokens == 3


def test_jobs_of_one_call_do_not_disturb_each_other(draft: LlamaCppDraft) -> None:
    jobs = [
        make_job(PROMPT, 9, SamplingParams(temperature=0.8, seed=1), request="a", bets=True),
        make_job((0, 33, 12), 4, SamplingParams(temperature=1.2, seed=2), request="b"),
        make_job((0, *range(20, 90)), 6, GREEDY, request="c", bets=True),
        make_job((0, 3), 0, GREEDY, request="d"),
    ]
    together = draft.draft(jobs)
    longest = max((block for block, _ in together), key=lambda block: len(block.token_seconds))
    assert longest.token_seconds[0][0] > longest.token_seconds[-1][0]  # a decode counts the sequences of all jobs
    for job, (block, probs) in zip(jobs, together, strict=True):
        draft.release(job.context.request_id)
        [(alone, alone_probs)] = draft.draft([job])
        assert drafted_ids(block) == drafted_ids(alone)
        assert block.prompt_tokens == job.context.length
        assert len(block.token_seconds) == len(alone.token_seconds)
        if probs is not None and alone_probs is not None:
            for q, alone_q in zip(probs.probs, alone_probs.probs, strict=True):
                np.testing.assert_allclose(q, alone_q, atol=2e-3)


def test_a_lead_drafted_in_two_pieces_is_the_same_text(draft: LlamaCppDraft) -> None:
    [whole] = drafted_ids(draft_one(draft, make_job(PROMPT, 10, SAMPLED))[0])
    draft.release("r")
    [first] = drafted_ids(draft_one(draft, make_job(PROMPT, 4, SAMPLED))[0])
    [second] = drafted_ids(draft_one(draft, make_job((*PROMPT, *first), 6, SAMPLED, agreed=len(PROMPT)))[0])
    assert first + second == whole


def test_only_allowed_ids_are_proposed(tmp_path: Path) -> None:
    """Case 5: the draft's vocabulary is padded beyond the target's."""
    path = tmp_path / "padded.gguf"
    write_tiny_llama(path, seed=3, vocab_size=VOCAB, context=CONTEXT)
    draft = LlamaCppDraft.load(path, threads=1, max_context=CONTEXT, slots=2, max_sequences=4)
    draft.propose_only(np.arange(40, dtype=np.int32))
    try:
        flat = SamplingParams(temperature=20.0, seed=1)
        for start in range(2, 30):
            block, probs = draft_one(draft, make_job((0, start), 24, flat, bets=True, max_sequences=4))
            assert max(max(ids) for ids in drafted_ids(block)) < 40
            assert all(row.max(initial=0) < 40 for row in probs.ids)
    finally:
        draft.close()


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


@pytest.mark.parametrize("order", [("long", "short"), ("short", "long"), ("long",)])
def test_a_prompt_that_nobody_waits_for_any_more_is_read_no_further_and_others_get_their_blocks(
    draft: LlamaCppDraft, reference: Reference, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    monkeypatch.setattr(llama_cpp, "_READ_AT_ONCE", 8)
    decode, widths = draft._context.decode, list[int]()

    def decode_and_leave(rows: list[BatchRow]) -> None:
        widths.append(len(rows))
        decode(rows)
        for request_id in ("long", "unknown"):
            draft.abandon(request_id)

    monkeypatch.setattr(draft._context, "decode", decode_and_leave)
    texts = {"long": PROMPT * 4, "short": PROMPT}
    jobs = [make_job(texts[name], 8, request=name) for name in order]
    blocks = {block.request_id: block for block, _ in draft.draft(jobs)}
    assert blocks["long"].sequences == ()
    assert sum(block.prompt_tokens for block in blocks.values()) == sum(widths) - 7 * ("short" in blocks)
    assert blocks["long"].prompt_tokens <= 8
    if "short" in blocks:
        [ids] = drafted_ids(blocks["short"])
        assert_greedy(reference, PROMPT, ids)
    monkeypatch.undo()
    [(again, _)] = draft.draft(jobs[order.index("long") :][:1])
    [ids] = drafted_ids(again)
    assert_greedy(reference, PROMPT * 4, ids)


def test_a_request_that_was_read_to_its_end_stays_in_the_cache_though_nobody_waits_any_more(
    draft: LlamaCppDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = draft._context.decode
    monkeypatch.setattr(draft._context, "decode", lambda rows: (decode(rows), draft.abandon("left")))
    draft.draft([make_job(PROMPT * 4, 8, request="left")])
    draft.release("left")
    monkeypatch.undo()
    [(block, _)] = draft.draft([make_job((*PROMPT * 4, 7), 4, request="next")])
    assert block.prompt_tokens == 1
