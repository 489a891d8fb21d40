"""What drafting costs besides is learned from the time of steps, and forgotten."""

from __future__ import annotations

import pytest

from duo_ray.core.budget import Seat, SharedBudget
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import GammaController, Policy
from duo_ray.core.slowdown import Slowdown
from tests.core.loop_simulation import known


def slower(share: float, steps: int = 40) -> Slowdown:
    """Steps took as long as expected without drafting, and longer by `share` with it."""
    slowdown = Slowdown()
    for step in range(steps):
        drafting = step % 2 == 0
        slowdown.observe(drafting=drafting, expected=0.1, elapsed=0.1 * (1.0 + share * drafting))
    return slowdown


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_what_steps_with_a_draft_take_longer_is_learned(share: float) -> None:
    assert slower(share).extra == pytest.approx(share, abs=0.03)


def test_what_slows_all_steps_alike_is_no_cost_of_drafting() -> None:
    slowdown = Slowdown()
    for step in range(60):
        slowdown.observe(drafting=step % 2 == 0, expected=0.1, elapsed=0.17)
    assert slowdown.extra == pytest.approx(0.0, abs=0.02)


def test_while_nothing_is_drafted_it_is_forgotten() -> None:
    slowdown = slower(0.5)
    for _ in range(1000):
        slowdown.observe(drafting=False, expected=0.1, elapsed=0.1)
    assert slowdown.extra < 0.01


def test_one_long_pause_counts_for_little_and_a_clock_set_back_for_nothing() -> None:
    slowdown = slower(0.1)
    slowdown.observe(drafting=True, expected=0.1, elapsed=60.0)
    slowdown.observe(drafting=True, expected=0.1, elapsed=-5.0)
    assert slowdown.extra < 0.4


class Alone:
    """Steps of one request in a world where drafting makes them last longer than its passes would."""

    def __init__(self, costs: Costs, share: float) -> None:
        self.costs, self.share = costs, share
        self.budget = SharedBudget(Policy(), costs)

    def seat(self) -> Seat:
        return Seat(GammaController(Policy(), self.costs, known(0.6, 0.6)), 0, 0)

    def drafted(self, steps: int, seat: Seat) -> list[bool]:
        """Whether each of a request's steps drafted."""
        drafted: list[bool] = []
        elapsed = None
        for _ in range(steps):
            [plan] = self.budget.plan([seat], rows=1, elapsed=elapsed)
            drafted.append(plan.gamma > 0 or plan.lead > 0)
            expected = self.budget._expected
            elapsed = None if expected is None else expected.seconds * (1.0 + self.share * drafted[-1])
        return drafted


def world() -> Costs:
    """The draft is three times as fast as the target."""
    costs = Costs()
    for tokens in (1, 8, 32):
        costs.observe_target(tokens, 0.1 * (1.0 + 0.01 * tokens))
    for width in (1, 4):
        costs.observe_draft(width, 0.033 * (1.0 + 0.3 * (width - 1)))
    return costs


def test_a_request_alone_stops_drafting_where_that_takes_longer_than_its_passes() -> None:
    for share, fewest, most in ((0.0, 40, 40), (0.8, 0, 10)):  # 10: probes
        alone = Alone(world(), share)
        assert fewest <= sum(alone.drafted(60, alone.seat())[20:]) <= most


def test_probes_find_out_that_drafting_takes_no_longer_any_more() -> None:
    alone = Alone(world(), 0.8)
    seat = alone.seat()
    assert sum(alone.drafted(60, seat)[30:]) < 8
    alone.share = 0.0
    assert all(alone.drafted(120, seat)[90:])
