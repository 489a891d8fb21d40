"""Divergences over the most probable tokens and the rest, and the acceptance they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from duo_ray.distillation.distillation import DIVERGENCES
from duo_ray.distillation.loss import acceptances, distillation_loss

VOCAB, PLACES = 50, 400


def rows(seed: int) -> torch.Tensor:
    return 2.0 * torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    probs, ids = logits.softmax(-1).topk(count)
    return ids, probs


def test_over_all_tokens_it_is_cross_entropy_plus_the_divergence():
    p_logits, q_logits = rows(0), rows(1)
    ids, probs = top(p_logits, VOCAB)
    tokens = ids[:, 0]
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    entropy = -log_q.gather(-1, tokens[:, None]).mean()
    forward = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    reverse = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    expected = {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}
    for name in DIVERGENCES:
        found = distillation_loss(q_logits, tokens, ids, probs, name)
        assert found.item() == pytest.approx((entropy + expected[name]).item(), abs=2e-3)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_over_some_tokens_the_divergence_is_a_lower_bound_that_sees_the_rest(name):
    p_logits, q_logits = rows(0), rows(1)
    tokens = torch.zeros(PLACES, dtype=torch.int64)
    entropy = -q_logits.log_softmax(-1)[:, 0].mean()
    few, all_ = (distillation_loss(q_logits, tokens, *top(p_logits, count), name) - entropy for count in (8, VOCAB))
    assert 0.0 < few.item() < all_.item()
    # As much on the 8 tokens as the target, each, but all of it there: only the rest tells them apart.
    ids, probs = top(p_logits, 8)
    inside = torch.full_like(p_logits, -30.0).scatter(-1, ids, probs.log())
    missing = (
        distillation_loss(inside, ids[:, 0], ids, probs, name) + inside.log_softmax(-1).gather(-1, ids[:, :1]).mean()
    )
    assert missing.item() > 0.02


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_student_that_equals_the_target_has_no_divergence_and_no_gradient(name):
    logits = rows(0).requires_grad_()
    ids, probs = top(logits.detach(), 8)
    tokens = ids[:, 0]
    loss = (
        distillation_loss(logits, tokens, ids, probs, name) + logits.log_softmax(-1).gather(-1, tokens[:, None]).mean()
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    assert logits.grad is not None
    assert logits.grad.abs().max().item() < 1e-9


def test_an_impossible_token_gives_a_finite_loss():
    logits = torch.full((1, 4), -200.0)
    logits[0, 3] = 200.0
    ids, probs = torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]])
    for name in DIVERGENCES:
        assert torch.isfinite(distillation_loss(logits, torch.tensor([0]), ids, probs, name))


def test_expected_acceptance_is_the_share_that_the_verification_keeps():
    """Draw from q, keep with min(1, p/q): 200,000 draws, so a wrong formula is off by many standard errors (0.001)."""
    from duo_ray.core.sampling import draw

    random = np.random.default_rng(0)
    p_logits, q_logits = rows(0)[:1], rows(1)[:1]
    ids, probs = top(p_logits, VOCAB)
    expected, _ = acceptances(q_logits, ids, probs)
    p, q = p_logits.softmax(-1)[0].numpy(), q_logits.softmax(-1)[0].numpy()
    drawn = np.array([draw(q, u) for u in random.random(200_000)])
    kept = np.mean(random.random(len(drawn)) < p[drawn] / q[drawn])
    assert expected.item() == pytest.approx(float(kept), abs=0.006)


def test_over_some_tokens_expected_acceptance_is_a_lower_bound():
    found = [acceptances(rows(1), *top(rows(0), count))[0] for count in (8, 30, VOCAB)]
    assert all(bool((fewer <= more + 1e-12).all()) for fewer, more in pairwise(found))
    assert found[1].mean() > 0.9 * found[2].mean()


def test_greedy_acceptance_compares_the_best_tokens():
    _, same = acceptances(rows(0), *top(rows(0), 8))
    _, other = acceptances(rows(1), *top(rows(0), 8))
    assert same.mean() == 1.0
    assert other.mean() < 0.2


@pytest.mark.parametrize("name", DIVERGENCES)
def test_places_where_nothing_is_known_count_for_the_tokens_alone(name):
    p_logits, q_logits = rows(0), rows(1)
    ids, probs = top(p_logits, 8)
    tokens = ids[:, 0]
    known = torch.arange(PLACES) % 3 > 0
    entropy = -q_logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    some = distillation_loss(q_logits, tokens, ids, probs * known[:, None], name) - entropy.mean()
    parts = (each[known] for each in (q_logits, tokens, ids, probs))
    assert some.item() == pytest.approx((distillation_loss(*parts, name) - entropy[known].mean()).item())
    sampled, greedy = acceptances(q_logits, ids, probs * known[:, None])
    assert not sampled[~known].any()
    assert not greedy[~known].any()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_the_student_does_not_have_count_among_the_others(name):
    """Whatever ids stand in their places."""
    p_logits, q_logits = rows(0), rows(1)
    ids, probs = top(p_logits, 8)
    tokens = torch.zeros(PLACES, dtype=torch.int64)
    lacking = torch.tensor([False, True, False, False, True, False, False, False])
    found = [
        distillation_loss(q_logits, tokens, torch.where(lacking, other, ids), probs * ~lacking, name)
        for other in (0, 7, ids)
    ]
    assert found[0].item() == pytest.approx(found[1].item())
    assert found[0].item() == pytest.approx(found[2].item())


def test_of_a_students_own_texts_only_the_divergence_counts():
    p_logits, q_logits = rows(0), rows(1)
    ids, probs = top(p_logits, 8)
    tokens, written = ids[:, 0], torch.arange(PLACES) % 3 > 0
    entropy = -q_logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    everything = distillation_loss(q_logits, tokens, ids, probs, "mixed")
    some = distillation_loss(q_logits, tokens, ids, probs, "mixed", written=written)
    assert (everything - entropy.mean()).item() == pytest.approx((some - entropy[written].mean()).item())
    none = distillation_loss(q_logits, tokens, ids, probs, "mixed", written=torch.zeros(PLACES, dtype=torch.bool))
    assert none.item() == pytest.approx((everything - entropy.mean()).item())
