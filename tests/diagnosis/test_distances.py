"""Divergences and the temperature fit against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from duo_ray.diagnosis.distances import (
    MULTIPLIERS,
    TemperatureFit,
    divergence,
    log_softmax,
    logs,
    overlap,
    total_variation,
)

P, Q = np.array([0.5, 0.5]), np.array([0.25, 0.75])


def test_divergence_is_that_of_the_definition():
    # 1/2 ln(1/2 : 1/4) + 1/2 ln(1/2 : 3/4) = 1/2 ln(4/3)
    assert divergence(logs(P), logs(Q)) == pytest.approx(0.5 * math.log(4 / 3))
    assert divergence(logs(Q), logs(P)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_equal_distributions_are_nowhere_apart():
    assert divergence(logs(P), logs(P)) == 0.0
    assert total_variation(P, P) == 0.0
    assert overlap(P, P) == 1.0


def test_total_variation_and_overlap_sum_to_one():
    assert total_variation(P, Q) == pytest.approx(0.25)
    assert overlap(P, Q) == pytest.approx(0.75)


def test_two_greedy_distributions_overlap_wholly_or_not_at_all():
    first, second = np.eye(2)
    assert (overlap(first, first), overlap(first, second)) == (1.0, 0.0)


def test_a_probability_that_was_rounded_to_zero_keeps_the_divergence_finite():
    # The target expects half of what the draft rules out: about 1/2 ln(1/2 : 1e-38) + 1/2 ln(1/2 : 1).
    found = divergence(logs(P), logs(np.array([1.0, 0.0])))
    assert found == pytest.approx(0.5 * math.log(0.5 / 1e-38) + 0.5 * math.log(0.5), rel=1e-6)


def test_weights_need_not_sum_to_one():
    assert np.exp(logs(np.array([1.0, 3.0]))) == pytest.approx(Q)
    assert np.exp(log_softmax(np.log(np.array([2.0, 6.0])))) == pytest.approx(Q)


@pytest.mark.parametrize("sharper", [2.0, 1.3, 0.7, 1.0])
def test_the_fit_finds_by_how_much_the_draft_is_too_sure(sharper):
    """A draft whose logits are the target's, stretched: at that multiple of its temperature it is the target."""
    random, fit = np.random.default_rng(0), TemperatureFit()
    for _ in range(20):
        logits = random.normal(0.0, 2.0, 50)
        fit.add(log_softmax(logits), log_softmax(sharper * logits))
    found = fit.result()
    assert found is not None
    assert found.best == pytest.approx(sharper, rel=0.05)
    assert found.best_divergence <= found.divergence + 1e-12
    assert min(value for _, value in found.curve) == found.best_divergence


def test_overlaps_are_told_at_the_drafts_own_temperature_and_at_the_best():
    fit = TemperatureFit()
    fit.add(logs(P), logs(P))  # best anywhere: both are uniform
    fit.add(log_softmax(np.array([0.0, 1.0])), log_softmax(np.array([0.0, 2.0])))
    fit.add_overlaps([0.5] * len(MULTIPLIERS))
    fit.add_overlaps([0.7] * len(MULTIPLIERS))
    found = fit.result()
    assert found is not None
    assert (found.overlap, found.best_overlap) == (pytest.approx(0.6), pytest.approx(0.6))
    assert found.best == pytest.approx(2.0, rel=0.05)


def test_nothing_added_is_no_fit():
    assert TemperatureFit().result() is None
