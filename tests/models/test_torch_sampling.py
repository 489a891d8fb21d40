"""The device's arithmetic against the NumPy reference, given the same logits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from duo_ray.core import sampling as reference
from duo_ray.core import verify as reference_verify
from duo_ray.core.sampling import Purpose, uniform
from duo_ray.core.verify import Row
from duo_ray.models import torch_sampling
from duo_ray.models.torch_sampling import TargetRows, verify, verify_greedy
from duo_ray.types import Ids, NonFiniteLogits, SamplingParams

Logits = NDArray[np.floating]
Job = tuple[Logits, Ids, Ids, int, SamplingParams, list[Row] | None]
"""What one verification is given: logits of the block's rows, context, block, prompt length, parameters, q."""

PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # nothing here depends on the clock


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 40, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5003, 0.9007])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1003, 0.503])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        logit_bias=draw(st.sampled_from([(), ((1, 4.0), (3, -math.inf), (1, 0.5), (10_000, 9.0))])),
        seed=draw(st.integers(0, 2**63 - 1)),
        acceptance_top_k=draw(st.sampled_from([0, 0, 0, 2, 4])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    params = draw(parameters())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocab = draw(st.integers(5, 200))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    context = tuple(rng.integers(0, vocab, draw(st.integers(1, 30))).tolist())
    count = draw(st.integers(0, 6))
    logits = rng.normal(size=(count + 1, vocab)) * draw(st.sampled_from([0.5, 3.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties, in every row
    logits = logits.astype(dtype)
    block = tuple(rng.integers(0, vocab, count).tolist())
    if draw(st.booleans()):  # likely tokens, so that blocks get past their first row
        block = tuple(int(row.argmax()) for row in logits[:count])
    q = None
    if not params.greedy and draw(st.booleans()):
        q = [_row_of_q(rng, vocab, token) for token in block]
    return logits, context, block, draw(st.integers(1, len(context))), params, q


def _row_of_q(rng: np.random.Generator, vocab: int, token: int) -> Row:
    ids = np.unique(np.append(rng.integers(0, vocab, 8), token)).astype(np.int32)
    probs = rng.dirichlet(np.ones(len(ids))).astype(np.float32)
    return np.append(ids, np.int32(0)), np.append(probs, np.float32(0.0))  # one unused column


def _reference_rows(logits: Logits, context: Ids, block: Ids, prompt: int, params: SamplingParams) -> list[Logits]:
    return [reference.penalise(row, (*context, *block[:i]), prompt, params) for i, row in enumerate(logits)]


def _reference_verify(job: Job) -> tuple[int, int]:
    logits, context, block, prompt, params, q = job
    rows = _reference_rows(logits, context, block, prompt, params)
    start, k = len(context), params.acceptance_top_k
    return reference_verify.verify(
        lambda i: reference.distribution(rows[i], params),
        block,
        q,
        lambda i: uniform(params.seed, start + i, Purpose.ACCEPT),
        lambda i: uniform(params.seed, start + i, Purpose.TOKEN),
        (lambda i: block[i] in reference.most_probable(rows[i], k)) if k else None,
    )


def _near_a_threshold(rows: list[Logits], params: SamplingParams) -> bool:
    """Whether the last bit of an exponential may decide which tokens are kept."""
    for row in rows:
        before_top_p = reference.distribution(row, SamplingParams(params.temperature, params.top_k))
        mass = np.sort(before_top_p)[::-1].cumsum()
        before_min_p = reference.distribution(row, SamplingParams(params.temperature, params.top_k, params.top_p))
        ratio = before_min_p / before_min_p.max()
        if params.top_p < 1.0 and np.abs(mass - params.top_p).min() < 1e-9:
            return True
        if params.min_p > 0.0 and np.abs(ratio - params.min_p).min() < 1e-9:
            return True
    return False


@settings(PROPERTY, max_examples=150)
@given(jobs())
def test_penalties_inside_a_block_match_the_reference(
    job: Job,
) -> None:
    logits, context, block, prompt, params, _ = job
    got = torch_sampling.penalise(torch.from_numpy(logits), (*context, *block), len(context), prompt, params)
    want = np.stack(_reference_rows(logits, context, block, prompt, params))
    assert got.numpy().dtype == want.dtype
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


@settings(PROPERTY, max_examples=150)
@given(jobs())
def test_distribution_matches_the_reference(
    job: Job,
) -> None:
    logits, _, _, _, params, _ = job
    params = replace(params, temperature=params.temperature or 1.0)
    assume(not _near_a_threshold(list(logits), params))
    got = torch_sampling.distribution(torch.from_numpy(logits), params)
    want = np.stack([reference.distribution(row, params) for row in logits])
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("at_once", [1, 7])
@settings(PROPERTY, max_examples=250)
@given(job=jobs())
def test_verdict_matches_the_reference(at_once: int, job: Job) -> None:
    logits, context, block, prompt, params, q = job
    rows = _reference_rows(logits, context, block, prompt, params)
    assume(params.greedy or not _near_a_threshold(rows, params))
    target = TargetRows(torch.from_numpy(logits), (*context, *block), prompt, params, at_once)
    assert verify(target, block, q, params, len(context)) == _reference_verify(job)


@settings(PROPERTY, max_examples=100)
@given(jobs())
def test_greedy_shortcut_gives_the_same_verdict(
    job: Job,
) -> None:
    logits, context, block, prompt, _, _ = job
    greedy = SamplingParams(temperature=0.0)
    largest, best = torch.from_numpy(logits).max(-1)
    assert verify_greedy(block, best.tolist(), largest.tolist()) == _reference_verify(
        (logits, context, block, prompt, greedy, None)
    )


def test_nucleus_wider_than_the_first_look_is_complete() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 30_000)).astype(np.float32)
    params = SamplingParams(temperature=2.0, top_p=0.9)
    want = np.stack([reference.distribution(row, params) for row in logits])
    assert (want > 0).sum(-1).min() > 10_000
    np.testing.assert_allclose(torch_sampling.distribution(torch.from_numpy(logits), params).numpy(), want, rtol=1e-9)


def test_a_bfloat16_row_is_judged_in_float32() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7)
    got = torch_sampling.penalise(logits, (3, 4, 5), 2, 1, params)
    want = _reference_rows(logits.float().numpy(), (3, 4), (5,), 1, params)
    np.testing.assert_allclose(got.numpy(), np.stack(want), rtol=1e-6)


def test_identical_p_and_q_accept_everything() -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed)
        p = torch_sampling.distribution(logits, params).numpy()
        q = [(np.arange(64, dtype=np.int32), row.astype(np.float32)) for row in p[:4]]
        block = tuple(int(np.random.default_rng([seed, i]).choice(64, p=p[i])) for i in range(4))
        rows = TargetRows(logits, (0, *block), 1, params)
        assert verify(rows, block, q, params, 1)[0] == 4


def test_residual_of_identical_distributions_is_p_itself() -> None:
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    q = (np.array([0, 1, 2], dtype=np.int32), np.array([0.5, 0.25, 0.25], dtype=np.float32))
    assert torch_sampling.residual(p, q).equal(p)


def test_draw_never_lands_on_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    assert [torch_sampling.draw(probs, u) for u in (0.0, 0.2999, 0.3001, 1.0 - 2**-53)] == [1, 1, 3, 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_is_reported_only_when_it_is_needed(broken: float) -> None:
    logits = torch.zeros(3, 8)
    logits[0, 4] = 9.0
    logits[2, 1] = broken
    greedy = SamplingParams(temperature=0.0, presence_penalty=0.1)
    assert verify(TargetRows(logits, (0, 1, 1), 1, greedy, 3), (1, 1), None, greedy, 1) == (0, 4)
    assert verify_greedy((1, 1), logits.max(-1).indices.tolist(), logits.max(-1).values.tolist()) == (0, 4)
    with pytest.raises(NonFiniteLogits, match=str(broken)):
        verify(TargetRows(logits, (0, 4, 0), 1, greedy, 3), (4, 0), None, greedy, 1)
    with pytest.raises(NonFiniteLogits, match=str(broken)):
        verify_greedy((4, 0), logits.max(-1).indices.tolist(), logits.max(-1).values.tolist())


def test_everything_banned_is_reported() -> None:
    ban = tuple((token, -math.inf) for token in range(4))
    params = SamplingParams(temperature=0.7, logit_bias=ban)
    with pytest.raises(NonFiniteLogits):
        verify(TargetRows(torch.zeros(1, 4), (0,), 1, params), (), None, params, 1)


def test_logprobs_are_those_of_the_raw_logits_with_ties_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0, 5.0]])
    first, second = torch_sampling.logprobs(logits, (0, 4), 2)
    want = logits.log_softmax(-1)
    assert first.logprob == pytest.approx(float(want[0, 0]))
    assert [token for token, _ in first.top] == [1, 3]
    assert [token for token, _ in second.top] == [4, 0]
    assert second.top[0][1] == pytest.approx(float(want[1, 4]))


def test_more_logprobs_than_the_vocabulary_holds_gives_all() -> None:
    (entry,) = torch_sampling.logprobs(torch.zeros(1, 3), (1,), 20)
    assert [token for token, _ in entry.top] == [0, 1, 2]
