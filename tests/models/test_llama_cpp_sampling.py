"""How drafted tokens are drawn, and the distributions shipped beside them."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from duo_ray.core.sampling import Purpose, draw, uniform
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.types import SamplingParams
from tests.models.drafting import (
    CONTEXT,
    PROMPT,
    SAMPLED,
    VOCAB,
    Reference,
    draft_fresh,
    draft_one,
    drafted_ids,
    make_job,
)


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
    draft_fresh(draft, reference, PROMPT, 20, sampling)
