"""Accept, correct, continue: the rule that makes a drafted block cost nothing in quality.

p is the target's distribution at a position, q the one the draft sampled from, both `[V]`.

- A sampled token x ~ q is kept with probability min(1, p(x)/q(x)); at the first rejection the correction is drawn from
  normalize(max(p - q, 0)) (Leviathan et al., arXiv 2211.17192, section 2.3 and appendix A.1). If nothing is left there
  (p = q up to rounding), from p.
- A picked token (no q) is kept when it is the token drawn from p.
- After a fully accepted block the next token is drawn from p. The heads of the next block are picked, so trying them
  one after the other against what is left of p ("recursive rejection") keeps head j with probability p(h_j), and
  otherwise draws from p without the heads. Drawing x ~ p and looking it up among the heads is the same distribution,
  decided where p is: no vocabulary-sized array crosses a process. `continuation` is that look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.sampling import Floats, draw
from duo_ray.types import DraftBlock, Ids

Row = tuple[NDArray[np.int32], NDArray[np.float32]]
"""q at one position, truncated: ids `[K]` and probabilities `[K]`."""


def verify(
    p: Callable[[int], Floats],
    block: Ids,
    q: Sequence[Row] | None,
    accept: Callable[[int], float],
    token: Callable[[int], float],
    lossy: Callable[[int], bool] | None = None,
) -> tuple[int, int]:
    """How many tokens of `block` stay, and the token that follows them.

    Args:
        p: `p(i)` is the target's distribution `[V]` after the first i tokens of the block; asked for only as needed.
        q: rows for the block's tokens; None for a deterministic proposal.
        accept, token: `accept(i)`, `token(i)` are the random numbers in [0, 1) for block position i.
        lossy: opt-in departure from the rule: `lossy(i)` says that block token i stays whatever p and q are.
    """
    for i, drafted in enumerate(block):
        if lossy is not None and lossy(i):
            continue
        row = p(i)
        if q is None:
            drawn = draw(row, token(i))
            if drawn != drafted:
                return i, drawn
            continue
        ids, probs = q[i]
        chance = float(probs[ids == drafted].max(initial=0.0))
        if accept(i) * chance >= row[drafted]:
            return i, draw(residual(row, ids, probs), token(i))
    return len(block), draw(p(len(block)), token(len(block)))


def residual(p: Floats, ids: NDArray[np.int32], probs: NDArray[np.float32]) -> Floats:
    """max(p - q, 0), not normalised; p itself when that is zero everywhere (p = q up to rounding)."""
    left = p.astype(np.float64)
    np.subtract.at(left, ids, probs)  # unused columns repeat id 0 with probability 0
    np.maximum(left, 0.0, out=left)
    return left if left.any() else p


def continuation(block: DraftBlock, assumed: Ids, committed: Ids) -> tuple[int, int] | None:
    """Find the drafted sequence that begins with what was committed since the block's job was sent.

    `assumed` are the ids the job took as accepted, `committed` those that really followed the same base. Returns
    (sequence index, offset of its first uncommitted id), or None when every bet lost.
    """
    for index, sequence in enumerate(block.sequences):
        head = () if sequence.bet is None else (sequence.bet.token,)
        guess = (*assumed, *head, *sequence.ids)
        lead_in = len(assumed) + len(head)
        if len(committed) >= lead_in and guess[: len(committed)] == committed:
            return index, len(committed) - lead_in
    return None
