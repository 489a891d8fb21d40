"""Requests come and go; what is refused leaves the draft as it was."""

from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as ll

from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_library import LlamaCppError
from duo_ray.types import ContextOverflow, DraftJob, NonFiniteLogits, UnknownPrefix
from tests.models.drafting import (
    CONTEXT,
    PROMPT,
    SAMPLED,
    VOCAB,
    Reference,
    assert_rows_are_fresh,
    draft_fresh,
    drafted_ids,
    make_job,
)
from tests.models.tiny_gguf import write_tiny_llama


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
        longest = 200 if i % 10 == 0 else 20
        ids = (0, *(int(t) for t in random.integers(2, VOCAB, int(random.integers(1, longest)))))
        [(block, _)] = draft.draft([make_job(ids, 20, SAMPLED, request=name, bets=True)])
        if i % 3 == 0:
            draft.draft([make_job((*ids, *drafted_ids(block)[0]), 4, SAMPLED, request=name, agreed=len(ids))])
        if i % 2 == 0:
            draft.release(name)
    for i in range(300):
        draft.release(f"r{i}")
    held = [ll.llama_memory_seq_pos_max(draft._context.memory, s) for s in range(draft.slots * draft.max_sequences)]
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


def test_what_earlier_requests_left_is_not_in_the_way_of_logits_along_a_text(draft: LlamaCppDraft) -> None:
    fresh = [row.copy() for row in draft.logits_along(PROMPT)]
    for number in range(draft.slots):
        draft.draft([make_job((number, *PROMPT), 2, request=str(number))])
    for number in range(draft.slots):
        draft.release(str(number))
    np.testing.assert_allclose([row.copy() for row in draft.logits_along(PROMPT)], fresh, rtol=1e-4, atol=1e-4)


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
    draft_fresh(draft, reference, PROMPT, 20)
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
