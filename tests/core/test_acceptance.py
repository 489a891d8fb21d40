"""Chances learned from what is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from duo_ray.core.acceptance import Acceptance
from tests.core.loop_simulation import known


def test_acceptance_is_optimistic_until_told_otherwise() -> None:
    acceptance = Acceptance()
    assert not acceptance.known
    assert (acceptance.token, acceptance.head) == pytest.approx((0.8, 0.7))
    acceptance.observe(0, 0, None)
    assert not acceptance.known


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.3), (0.3, 1.0), (0.9, 0.0)])
def test_acceptance_follows_a_sudden_change(before: float, after: float) -> None:
    acceptance = known(before, before)
    for i in range(20):
        hit = int(after * (i + 1)) > int(after * i)
        acceptance.observe(1, int(hit), hit)
    assert acceptance.token == pytest.approx(after, abs=0.15)
    assert acceptance.head == pytest.approx(after, abs=0.15)


def test_a_new_request_starts_from_what_others_showed_and_lives_its_own_life() -> None:
    acceptance = known(0.5, 0.5)
    twin = acceptance.for_request()
    assert (twin.token, twin.head) == (acceptance.token, acceptance.head)
    twin.observe(5, 0, False)
    assert twin.token < acceptance.token
    assert twin.head < acceptance.head


def test_a_text_unlike_all_others_is_found_out_after_a_few_misses() -> None:
    acceptance = known(0.6, 0.6)
    for _ in range(200):
        acceptance.observe(5, 3, True)
        acceptance.observe(1, 0, False)
    twin = acceptance.for_request()
    for _ in range(6):
        twin.observe(1, 0, False)
    assert twin.head < 0.3
    assert twin.token < 0.4
    assert min(acceptance.head, acceptance.token) > 0.45


@pytest.mark.parametrize("truth", [0.75, 0.9, 0.97])
def test_the_sharpness_settles_where_predicted_chances_meet_the_bets_won(truth: float) -> None:
    """Heads given 0.4 or 0.7 by the draft at temperature 1, of two candidates, win a fixed share of their bets."""
    acceptance = Acceptance()
    rng = np.random.default_rng(0)
    predicted = []
    for step in range(600):
        weight = (0.55, 0.75)[step % 2]
        raised = np.array([weight, 1.0 - weight]) ** (1.0 / acceptance.sharpness)
        chance = float(raised[0] / raised.sum())
        predicted.append(chance)
        acceptance.calibrate(chance, won=bool(rng.random() < truth))
    assert np.mean(predicted[300:]) == pytest.approx(truth, abs=0.05)
