from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duo_ray.core.sequences import open_heads, split

chance_lists = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8).map(lambda c: sorted(c, reverse=True))


def test_the_best_head_opens_even_when_nothing_else_does() -> None:
    assert open_heads([0.9, 0.05], second=0.9, max_sequences=8) == 1


def test_a_head_opens_when_it_beats_theta() -> None:
    # theta = 0.5 * 0.5 = 0.25
    assert open_heads([0.5, 0.26, 0.24], second=0.5, max_sequences=8) == 2


def test_a_head_exactly_at_theta_stays_closed() -> None:
    assert open_heads([0.5, 0.25], second=0.5, max_sequences=8) == 1


def test_an_unsure_second_position_opens_more_heads() -> None:
    chances = [0.4, 0.3, 0.2, 0.1]
    assert [open_heads(chances, second, 8) for second in (0.9, 0.6, 0.3, 0.1)] == [1, 2, 3, 4]


def test_no_more_heads_open_than_max_sequences() -> None:
    assert open_heads([0.3, 0.3, 0.2, 0.2], second=0.0, max_sequences=2) == 2


@pytest.mark.parametrize(("chances", "max_sequences"), [([], 4), ([0.5], 0)])
def test_no_candidate_or_no_sequence_is_an_error(chances: list[float], max_sequences: int) -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        open_heads(chances, 0.5, max_sequences)


acceptances = st.floats(0.0, 1.0)
width_costs = st.floats(0.05, 1.0)


@given(st.integers(0, 40), chance_lists, acceptances, width_costs)
def test_the_whole_budget_is_spent(budget: int, chances: list[float], acceptance: float, width_cost: float) -> None:
    assert sum(split(budget, chances, acceptance, width_cost)) == budget


@given(st.integers(0, 40), chance_lists, acceptances)
def test_a_better_head_never_gets_fewer_tokens(budget: int, chances: list[float], acceptance: float) -> None:
    lengths = split(budget, chances, acceptance)
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(2, 40), chance_lists, acceptances, width_costs)
def test_no_head_stands_alone(budget: int, chances: list[float], acceptance: float, width_cost: float) -> None:
    """The target draws the head itself: only what follows it saves anything."""
    assert 1 not in split(budget, chances, acceptance, width_cost)


def test_a_budget_of_one_is_the_best_head() -> None:
    assert split(1, [0.6, 0.3], 0.9) == [1, 0]


def test_a_sure_draft_puts_all_into_the_best_sequence() -> None:
    assert split(8, [0.6, 0.3], 1.0) == [8, 0]


def test_an_unsure_draft_spreads_the_budget() -> None:
    assert split(6, [0.5, 0.45], 0.5) == [3, 3]


def test_when_the_target_waits_parallel_sequences_get_more() -> None:
    chances, acceptance = [0.5, 0.25], 0.7
    assert split(8, chances, acceptance, width_cost=1.0)[1] < split(8, chances, acceptance, width_cost=0.3)[1]


def test_nothing_to_share_among_no_heads() -> None:
    assert split(5, [], 0.8) == []


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("budget", [2, 3, 7, 8])
def test_no_other_split_is_worth_more(acceptance: float, budget: int) -> None:
    chances = [0.5, 0.3, 0.15]

    def worth(lengths: tuple[int, ...] | list[int]) -> float:
        return sum(c * acceptance**n for c, length in zip(chances, lengths, strict=True) for n in range(1, length))

    best = max((s for s in product(range(budget + 1), repeat=3) if sum(s) == budget), key=worth)
    assert worth(split(budget, chances, acceptance)) == pytest.approx(worth(best))
