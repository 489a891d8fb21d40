"""What drafting costs besides is learned from the time of rounds, and forgotten."""

from __future__ import annotations

import pytest

from duo_ray.core.slowdown import Slowdown


def slower(share: float, steps: int = 40) -> Slowdown:
    """Rounds took as long as expected without drafting, and longer by `share` with it."""
    slowdown = Slowdown(0.0)
    for step in range(steps):
        drafting = step % 2 == 0
        slowdown.observe(drafting=drafting, expected=0.1, elapsed=0.1 * (1.0 + share * drafting))
    return slowdown


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_what_rounds_with_a_draft_take_longer_is_learned(share: float) -> None:
    assert slower(share).extra == pytest.approx(share, abs=0.03)


def test_what_slows_all_rounds_alike_is_no_cost_of_drafting() -> None:
    slowdown = Slowdown(0.0)
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
