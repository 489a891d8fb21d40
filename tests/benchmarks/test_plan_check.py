"""The comparison of measured and simulated speed, on numbers that are known."""

from __future__ import annotations

import pytest

from benchmarks import plan_check
from benchmarks.measured import Turn
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import Policy
from duo_ray.planning import Text


def measured(t_target, t_draft):
    costs = Costs()
    costs.observe_target(1, t_target)
    costs.observe_target(8, t_target)
    costs.observe_draft(1, t_draft)
    return costs.as_dict()


def turn(count, seconds, **stats):
    at = tuple(seconds * i for i in range(1, count + 1))
    return Turn(5, tuple(range(count)), at, 0.1, {"mean_accepted": 0.0, **stats})


def test_a_target_alone_that_keeps_its_pace_is_predicted():
    row = plan_check.compare("target", [turn(40, 0.05)], measured(0.05, 0.01), Text(0.8, 8, 40), Policy())
    assert row["measured tokens/s"] == pytest.approx(20.0)
    assert abs(row["off by"]) < 0.02


def test_a_pipeline_that_is_half_as_fast_as_predicted_is_off():
    alone = plan_check.compare("target", [turn(40, 0.1)], measured(0.05, 0.01), Text(0.8, 8, 40), Policy())
    assert alone["off by"] == pytest.approx(1.0, abs=0.05)


def test_acceptance_is_that_of_first_tokens_where_there_were_any():
    turns = [turn(2, 1.0, acceptance_per_position=[0.9, 0.5]), turn(2, 1.0, acceptance_per_position=[]),
             turn(2, 1.0, acceptance_per_position=[0.7])]  # fmt: skip
    assert plan_check.acceptance(turns) == pytest.approx(0.8)
