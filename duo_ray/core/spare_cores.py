"""Whether a target pass beside which no draft works takes the spare cores, too: the drafts', or one left to others."""

from __future__ import annotations

from duo_ray.core.costs import Costs


class SpareCores:
    """Decides by what turns out to be the faster.

    A pass on all cores waits for the slowest of them, and whatever else the machine does is done on one of them: what
    a start measured, when nothing else was done, is too good. So the other way is taken now and then, oftener while
    both are close.
    """

    _CLOSE, _EVERY, _SELDOM = 1.25, 16, 256

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._passes = 0

    def lent(self, tokens: int) -> bool:
        """Whether the coming pass, over so many tokens, is to have them; asked once a pass."""
        own, whole = self._costs.target_seconds(tokens), self._costs.all_cores_seconds(tokens)
        if whole is None:
            return False
        close = max(own, whole) <= self._CLOSE * min(own, whole)
        self._passes += 1
        return (whole < own) is not (self._passes % (self._EVERY if close else self._SELDOM) == 0)
