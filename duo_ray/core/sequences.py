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


def split(budget: int, chances: Sequence[float], acceptance: float, width_cost: float = 1.0) -> list[int]:
    """Tokens per sequence, heads included, that sum to `budget`: each token goes where it is most likely to be used.

    Token n of sequence j is used with chance `chances[j] * acceptance**(n - 1)`: its head must win the bet, then n - 1
    tokens must be accepted. A head alone is worth nothing (the target draws that token itself), so a sequence gets two
    tokens or none. Of all numbers of sequences the one with the most used tokens per unit of draft time is taken.

    Args:
        budget: gamma.
        chances: the draft's probabilities of the opened heads, best first.
        acceptance: chance that one drafted token is accepted, 0 to 1.
        width_cost: time of a token that widens a decode, as a share of one that needs a decode of its own. 1 counts
            tokens alone: right while the draft is done before the target.
    """
    if not chances or budget < 1:
        return [0] * len(chances)
    candidates = [
        _share_out(budget, chances[:opened], acceptance, width_cost)
        for opened in range(1, max(1, min(len(chances), budget // 2)) + 1)
    ]

    def rate(lengths: list[int]) -> float:
        used = sum(_worth(chances[j], acceptance, n) for j, length in enumerate(lengths) for n in range(2, length + 1))
        depth = max(lengths)
        return (1.0 + used) / (depth + width_cost * (budget - depth))

    best = max(candidates, key=rate)  # the first of equals: fewest sequences
    return best + [0] * (len(chances) - len(best))


def _share_out(budget: int, chances: Sequence[float], acceptance: float, width_cost: float) -> list[int]:
    """The budget over exactly these sequences, two tokens each first, then one by one to the best use for its cost."""
    lengths = [min(2, budget)] * len(chances)
    for _ in range(budget - sum(lengths)):
        depth = max(lengths)
        worth = [
            _worth(chance, acceptance, length + 1) / (1.0 if length == depth else width_cost)
            for chance, length in zip(chances, lengths, strict=True)
        ]
        lengths[worth.index(max(worth))] += 1
    return lengths


def _worth(chance: float, acceptance: float, n: int) -> float:
    return chance * acceptance ** (n - 1)
