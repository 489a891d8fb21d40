"""Which heads open a sequence of their own, and how the budget is shared among them (DuoDecoding, arXiv 2503.00784)."""

from __future__ import annotations

from collections.abc import Sequence


def open_heads(chances: Sequence[float], second: float, max_sequences: int) -> int:
    """How many heads open a sequence: the best one always, another one when it beats theta.

    A second token of the best sequence comes to be used with chance theta = p(1st,1) x p(2nd,1). A head that is more
    probable than that is the better use of a token.

    Args:
        chances: the draft's probabilities of the head candidates, p(1st, j), best first.
        second: p(2nd,1), the top probability at the position after the best head.
        max_sequences: open at most this many.
    """
    if not chances or max_sequences < 1:
        raise ValueError(f"{len(chances)} candidates for {max_sequences} sequences: at least one of each is needed")
    theta = chances[0] * second
    return 1 + sum(chance > theta for chance in chances[1:max_sequences])


def split(budget: int, chances: Sequence[float], acceptance: float) -> list[int]:
    """Tokens per sequence, heads included, that sum to `budget`: each token goes where it is most likely to be used.

    Token n of sequence j is used with chance `chances[j] * acceptance**(n - 1)`: its head must win the bet, then n - 1
    tokens must be accepted. Every head gets one token first, best first, as far as the budget goes.

    Args:
        budget: gamma.
        chances: the draft's probabilities of the opened heads, best first.
        acceptance: chance that one drafted token is accepted, 0 to 1.
    """
    lengths = [int(j < budget) for j in range(len(chances))]
    worth = [chance * acceptance for chance in chances]
    for _ in range(budget - sum(lengths) if chances else 0):
        best = worth.index(max(worth))
        lengths[best] += 1
        worth[best] *= acceptance
    return lengths
