"""Logits to a distribution; draws; random numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duo_ray.core.sampling import Purpose, distribution, draw, most_probable, penalise, uniform
from duo_ray.types import InvalidRequest, NonFiniteLogits, SamplingParams

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1]))


def params(**changes):
    return SamplingParams(**{"temperature": 1.0, **changes})


def test_temperature_sharpens():
    np.testing.assert_allclose(distribution(LOGITS, params(temperature=0.5))[0], 0.16 / 0.30)


def test_greedy_is_all_mass_on_the_first_of_the_best():
    np.testing.assert_array_equal(distribution(np.array([1.0, 2.0, 2.0]), params(temperature=0.0)), [0, 1, 0])


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.5}, [0, 1]),
    ],
)
def test_truncation_keeps_and_renormalises(changes, kept):
    probs = distribution(LOGITS, params(**changes))
    assert list(np.flatnonzero(probs)) == kept
    np.testing.assert_allclose(probs[kept], np.exp(LOGITS)[kept] / np.exp(LOGITS)[kept].sum())


def test_penalties_follow_their_definitions():
    logits = np.array([2.0, -1.0, 3.0, 0.5])
    out = penalise(logits, [0, 1, 2, 2], 2, params(repetition_penalty=2.0))
    np.testing.assert_allclose(out, [1.0, -2.0, 1.5, 0.5])
    out = penalise(logits, [0, 1, 2, 2], 2, params(presence_penalty=0.5, frequency_penalty=0.25))
    np.testing.assert_allclose(out, [2.0, -1.0, 3.0 - 0.5 - 2 * 0.25, 0.5])


def test_bias_bans_a_token_and_ignores_ids_beyond_the_vocabulary():
    out = penalise(LOGITS, [], 0, params(logit_bias=((0, float("-inf")), (9, 3.0))))
    assert distribution(out, params())[0] == 0


def test_penalties_leave_the_input_alone():
    logits = LOGITS.copy()
    penalise(logits, [0], 0, params(repetition_penalty=2.0, logit_bias=((1, 5.0),)))
    np.testing.assert_array_equal(logits, LOGITS)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_refused(bad):
    with pytest.raises(NonFiniteLogits):
        distribution(np.array([0.0, bad]), params())


def test_nothing_left_to_choose_is_refused():
    with pytest.raises(NonFiniteLogits):
        distribution(np.full(3, -np.inf), params())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda w: sum(w) > 0), st.floats(0, 1 - 2**-53))
def test_a_draw_never_lands_on_probability_zero(weights, u):
    assert weights[draw(np.array(weights), u)] > 0


def test_draws_follow_the_distribution():
    counts = np.bincount([draw(np.exp(LOGITS), (i + 0.5) / 1000) for i in range(1000)], minlength=4)
    np.testing.assert_allclose(counts, [400, 300, 200, 100], atol=1)


def test_most_probable_breaks_ties_by_the_lower_id():
    assert list(most_probable(np.array([1.0, 3.0, 3.0, 2.0, 3.0]), 3)) == [1, 2, 4]


def test_random_numbers_depend_on_all_of_their_key_and_nothing_else():
    keys = [(seed, position, purpose) for seed in (0, 1) for position in (0, 1, 2) for purpose in Purpose]
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(keys)
    assert values == [uniform(*key) for key in keys]
    assert all(0 <= value < 1 for value in values)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("min_p", 2.0),
     ("repetition_penalty", 5e-324), ("seed", -1), ("logprobs", 101)],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(field, value):
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value})
