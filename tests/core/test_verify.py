"""The rule itself, row by row."""

import numpy as np
import pytest

from duo_ray.core.verify import continuation, residual, verify
from duo_ray.types import DraftBlock, DraftSequence, Outcome, Span

P = np.array([0.5, 0.3, 0.2, 0.0])


def q_row(*pairs):
    return np.array([i for i, _ in pairs], np.int32), np.array([p for _, p in pairs], np.float32)


def judge(block, q, *, accept=0.0, token=0.0, p=P, lossy=None):
    return verify(lambda _: p, block, q, lambda _: accept, lambda _: token, lossy)


def test_a_token_the_target_likes_more_than_the_draft_is_always_kept():
    assert judge((0,), [q_row((0, 0.4), (1, 0.6))], accept=0.999999, token=0.99)[0] == 1


@pytest.mark.parametrize(("accept", "kept"), [(0.49, 1), (0.51, 0)])
def test_a_token_is_kept_with_probability_p_over_q(accept, kept):
    assert judge((1,), [q_row((0, 0.4), (1, 0.6))], accept=accept)[0] == kept


def test_the_correction_comes_from_what_the_draft_undervalued():
    accepted, token = judge((1,), [q_row((0, 0.4), (1, 0.6))], accept=0.9, token=0.0)
    assert (accepted, token) == (0, 0)
    assert judge((1,), [q_row((0, 0.4), (1, 0.6))], accept=0.9, token=0.99) == (0, 2)


def test_a_token_the_target_excludes_is_never_kept():
    assert judge((3,), [q_row((3, 1.0))], accept=0.0)[0] == 0


def test_an_identical_draft_leaves_no_residual_and_the_draw_is_from_p():
    """Case 9: normalising it would divide by zero."""
    ids, probs = q_row((0, 0.5), (1, 0.3), (2, 0.2))
    p = np.zeros(4)
    p[ids] = probs
    np.testing.assert_array_equal(residual(p, ids, probs), p)


def test_unused_columns_of_a_truncated_row_do_not_touch_token_0():
    ids, probs = q_row((1, 1.0), (0, 0.0), (0, 0.0))
    np.testing.assert_allclose(residual(P, ids, probs), [0.5, 0.0, 0.2, 0.0])


@pytest.mark.parametrize(("u", "outcome"), [(0.1, (1, 0)), (0.6, (0, 1)), (0.9, (0, 2))])
def test_a_picked_token_is_kept_when_it_is_the_one_drawn(u, outcome):
    assert judge((0,), None, token=u) == outcome


def test_after_a_fully_kept_block_the_next_token_is_drawn_from_p():
    assert judge((), None, token=0.85) == (0, 2)


def test_lossy_acceptance_overrides_both_distributions():
    assert judge((3,), [q_row((3, 1.0))], lossy=lambda _: True)[0] == 1


def test_looking_a_draw_up_among_the_heads_is_recursive_rejection():
    """Trying heads in turn against what is left of p gives every outcome the probability p has."""
    heads, left, taken = [1, 0], P.copy(), {}
    rest = 1.0
    for head in heads:
        chance = left[head] / left.sum()
        taken[head] = rest * chance
        rest *= 1 - chance
        left[head] = 0.0
    taken |= {i: rest * left[i] / left.sum() for i in range(4) if i not in heads}
    np.testing.assert_allclose([taken[i] for i in range(4)], P)


def block(*sequences):
    return DraftBlock("r", 10, tuple(sequences), Span(0, 0))


def bet(head, *ids):
    return DraftSequence(Outcome(2, head), ids, 0.5)


def test_the_sequence_whose_head_was_drawn_continues():
    assert continuation(block(bet(7, 1, 2), bet(8, 3, 4)), (5, 6), (5, 6, 8)) == (1, 0)


def test_a_lost_bet_or_a_rejection_leaves_nothing():
    both = block(bet(7, 1, 2), bet(8, 3, 4))
    assert continuation(both, (5, 6), (5, 6, 9)) is None
    assert continuation(both, (5, 6), (5, 9)) is None
    assert continuation(both, (5, 6), (5,)) is None


def test_a_late_block_continues_where_the_committed_ids_reached():
    assert continuation(block(bet(7, 1, 2, 3)), (5,), (5, 7, 1)) == (0, 1)
    assert continuation(block(bet(7, 1, 2, 3)), (5,), (5, 7, 2)) is None


def test_a_late_lead_continues_too():
    lead = block(DraftSequence(None, (5, 6, 7), 1.0))
    assert continuation(lead, (), (5,)) == (0, 1)
    assert continuation(lead, (), (6,)) is None
