"""Curves of seconds, learned from noisy passes of whatever widths occur."""

from __future__ import annotations

import json
import math

import pytest

from duo_ray.core.costs import Costs
from duo_ray.types import DraftBlock, Span
from tests.core.loop_simulation import World, calibrated


def test_a_concave_curve_is_learned_and_interpolated() -> None:
    costs = Costs()
    for _ in range(10):
        for tokens, seconds in ((1, 0.081), (8, 0.168), (32, 0.2)):
            costs.observe_target(tokens, seconds)
    assert [costs.target_seconds(n) for n in (1, 8, 32)] == pytest.approx([0.081, 0.168, 0.2], rel=0.03)
    assert 0.168 < costs.target_seconds(16) < 0.2


def test_a_longer_pass_never_looks_cheaper() -> None:
    costs = Costs()
    for _ in range(20):
        costs.observe_target(1, 0.1)
        costs.observe_target(2, 0.09)
    assert costs.target_seconds(2) >= costs.target_seconds(1)


def test_one_pass_moves_the_whole_curve() -> None:
    costs = calibrated(World())
    for _ in range(5):
        costs.observe_target(8, 3 * World().target(8))
    assert costs.target_seconds(1) == pytest.approx(3.0, rel=0.15)


def test_two_paused_passes_change_nothing() -> None:
    costs = calibrated(World())
    before = costs.target_seconds(1)
    costs.observe_target(1, 50.0)
    costs.observe_target(1, 50.0)
    assert costs.target_seconds(1) == before


def test_a_draft_that_got_faster_is_believed_at_once() -> None:
    costs = calibrated(World(ratio=1))
    costs.observe_draft(1, 0.1)
    assert costs.draft_seconds(1) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_not_learned_from(seconds: float) -> None:
    costs = calibrated(World())
    before = costs.as_dict()
    costs.observe_target(1, seconds)
    costs.observe_draft(1, seconds)
    assert costs.as_dict() == before


def test_passes_wider_than_the_curve_are_not_learned_from() -> None:
    costs = calibrated(World())
    before = costs.as_dict()
    costs.observe_target(1025, 9.0)
    assert costs.as_dict() == before


def test_a_pass_of_many_requests_is_learned_and_interpolated() -> None:
    costs = calibrated(World())
    for _ in range(20):
        costs.observe_target(200, 5.0)
        costs.observe_target(300, 7.0)
    assert costs.target_seconds(200) == pytest.approx(5.0, rel=0.1)
    assert 5.0 < costs.target_seconds(250) < 7.0


def test_other_kernels_for_more_than_one_token_are_believed() -> None:
    """llama.cpp multiplies by one column and by several with different code: T(2) may be four times T(1)."""
    measured = ((1, 0.007), (2, 0.0267), (4, 0.037), (8, 0.0446), (16, 0.0528), (32, 0.0938))
    costs = Costs()
    for tokens, seconds in measured:
        costs.observe_target(tokens, seconds)
    for _ in range(20):  # plain decoding, for a while
        for tokens, seconds in measured:
            assert costs.target_seconds(tokens) == pytest.approx(seconds, rel=0.1)
        costs.observe_target(1, 0.007)
    for _ in range(4):
        costs.observe_target(1, 0.014)  # a slower machine
    assert costs.target_seconds(8) == pytest.approx(2 * 0.0446, rel=0.2)


# --- passes beside which no draft works


def test_without_any_the_estimates_are_those_of_other_passes() -> None:
    costs = calibrated(World())
    assert costs.target_seconds(8, alone=True) == costs.target_seconds(8)
    assert costs.as_dict()["alone"] == {}


def test_both_kinds_of_passes_have_a_curve_of_their_own_and_survive_json() -> None:
    costs = Costs()
    for _ in range(10):
        for tokens, seconds in ((1, 0.08), (8, 0.16)):
            costs.observe_target(tokens, seconds)
            costs.observe_target(tokens, seconds / 1.9, alone=True)
    costs.observe_overhead(0.0, drafting=True)
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    for each in (costs, costs.frozen(), costs.other_draft(), again):
        for tokens, seconds in ((1, 0.08), (8, 0.16)):
            assert each.target_seconds(tokens) == pytest.approx(seconds, rel=0.06)
            assert each.target_seconds(tokens, alone=True) == pytest.approx(seconds / 1.9, rel=0.06)


@pytest.mark.parametrize("alone", [True, False])
def test_passes_of_one_kind_tell_of_the_machine_what_the_other_kind_has_not_seen_yet(alone: bool) -> None:
    costs = Costs()
    for _ in range(10):
        for tokens in (1, 8):
            costs.observe_target(tokens, 0.08)
            costs.observe_target(tokens, 0.04, alone=True)
    for _ in range(20):
        costs.observe_target(1, 0.06 if alone else 0.12, alone=alone)
    assert costs.target_seconds(1, alone=not alone) == pytest.approx(0.12 if alone else 0.06, rel=0.1)


def test_slow_passes_of_one_kind_among_others_are_believed() -> None:
    costs = Costs()
    for _ in range(10):
        costs.observe_target(1, 0.04)
        costs.observe_target(1, 0.04, alone=True)
    for _ in range(4):
        costs.observe_target(1, 0.08)
        for _ in range(5):
            costs.observe_target(1, 0.04, alone=True)
    assert costs.target_seconds(1) > 0.065
    assert costs.target_seconds(1, alone=True) == pytest.approx(0.04, rel=0.1)


def test_a_target_that_lost_its_further_cores_is_estimated_as_before() -> None:
    costs = Costs()
    for _ in range(10):
        costs.observe_target(1, 0.08)
        costs.observe_target(1, 0.04, alone=True)
    costs.drop_alone()
    assert costs.target_seconds(1, alone=True) == costs.target_seconds(1) == pytest.approx(0.08, rel=0.05)
    costs.observe_target(1, 0.04, alone=True)
    assert costs.target_seconds(1, alone=True) < costs.target_seconds(1)


def test_overhead_is_the_median_of_late() -> None:
    costs = Costs()
    for seconds in (0.002, 0.003, 9.0, -0.1, 0.004, math.nan):
        costs.observe_overhead(seconds, drafting=True)
    assert costs.overhead(drafting=True) == costs.overhead(drafting=False) == 0.003


def test_a_step_that_drafts_has_an_overhead_of_its_own() -> None:
    costs = Costs()
    for drafting in (False, True) * 10:
        costs.observe_overhead(0.003 if drafting else 0.001, drafting=drafting)
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    for each in (costs, costs.frozen(), costs.other_draft(), again):
        assert [each.overhead(drafting=drafting) for drafting in (False, True)] == pytest.approx([0.001, 0.003])


def test_one_pair_of_steps_tells_nothing_yet() -> None:
    costs = Costs()
    for seconds, drafting in ((0.001, False), (0.050, True)):
        costs.observe_overhead(seconds, drafting=drafting)
    assert costs.overhead(drafting=True) == costs.overhead(drafting=False)


def test_steps_of_different_requests_are_not_compared() -> None:
    costs = Costs()
    for drafting in (False, True) * 10:
        costs.observe_overhead(0.050 if drafting else 0.001, drafting=drafting, follows=False)
    assert costs.overhead(drafting=True) == costs.overhead(drafting=False)
    assert not costs.both_overheads_known


@pytest.mark.parametrize("drafting", [True, False])
def test_steps_of_one_kind_tell_of_the_machine_what_the_other_kind_has_not_seen_yet(drafting: bool) -> None:
    costs = Costs()
    for each in (False, True) * 10:
        costs.observe_overhead(0.003 if each else 0.001, drafting=each)
    for _ in range(20):  # a busy hour
        costs.observe_overhead(0.043 if drafting else 0.041, drafting=drafting)
    assert costs.overhead(drafting=not drafting) == pytest.approx(0.041 if drafting else 0.043)


def test_costs_of_another_draft_share_what_is_known_of_the_target() -> None:
    costs = Costs()
    other = costs.other_draft()
    costs.observe_target(1, 0.1)
    other.observe_target(8, 0.12)
    other.observe_overhead(0.003, drafting=True)
    for each, seconds in ((costs, 0.02), (other, 0.01)):
        each.observe_draft(1, seconds)
    assert costs.target_seconds(8) == other.target_seconds(8) == pytest.approx(0.12, rel=0.05)
    assert costs.overhead(drafting=True) == other.overhead(drafting=True) == 0.003
    assert (costs.draft_seconds(1), other.draft_seconds(1)) == pytest.approx((0.02, 0.01))


def test_a_call_in_which_one_text_was_read_before_another_tells_how_long_all_took() -> None:
    costs, span = Costs(), Span(0.0, 0.5)
    blocks = [
        DraftBlock(name, 100, (), span, ((2, 0.01),) * 3, 100, seconds) for name, seconds in (("a", 0.1), ("b", 0.4))
    ]
    for _ in range(5):
        costs.observe_call(blocks)
    assert costs.draft_seconds(200) == pytest.approx(0.4, rel=0.2)


def test_frozen_costs_ignore_observations_and_leave_the_original_alone() -> None:
    costs = calibrated(World())
    frozen = costs.frozen()
    before = frozen.as_dict()
    for each in (frozen, costs):
        each.observe_target(1, 1.3)
        each.observe_draft(1, 0.2)
        each.observe_overhead(0.5, drafting=False)
    assert frozen.as_dict() == before
    assert costs.as_dict() != before


def test_a_calibration_survives_json() -> None:
    costs = Costs()
    for _ in range(10):
        for tokens, seconds in ((1, 0.081), (8, 0.168), (32, 0.2)):
            costs.observe_target(tokens, seconds)
        for width, seconds in ((1, 0.025), (4, 0.055)):
            costs.observe_draft(width, seconds)
        costs.observe_overhead(0.003, drafting=True)
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert again.overhead(drafting=True) == costs.overhead(drafting=True)
    for n in (1, 8, 32):
        assert again.target_seconds(n) == pytest.approx(costs.target_seconds(n), rel=0.05)
    for width in (1, 4):
        assert again.draft_seconds(width) == pytest.approx(costs.draft_seconds(width), rel=0.05)


@pytest.mark.parametrize(
    "stored", [{}, {"target": 3, "draft": {}, "overhead": 0}, {"target": {"x": 1}, "draft": {}, "overhead": 0}]
)
def test_an_unreadable_calibration_says_what_to_do(stored: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="delete it to measure anew"):
        Costs.from_dict(stored)
