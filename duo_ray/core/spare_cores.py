"""Whether a target pass beside which no draft works takes the drafts' cores, too."""

from __future__ import annotations

from duo_ray.core.costs import Costs


class SpareCores:
    """Decides by what turns out to be the faster.

    A pass on all cores waits for the slowest of them, and whatever else the machine does is done on one of them: what
    a start measured, when nothing else was done, is too good. So while both ways are close, the other one is taken
    now and then.
    """

    _CLOSE, _EVERY = 1.25, 16

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._close_calls = 0

    def lent(self, tokens: int) -> bool:
        """Whether the coming pass, over so many tokens, is to have them; asked once a pass."""
        own, whole = self._costs.target_seconds(tokens), self._costs.all_cores_seconds(tokens)
        if whole is None:
            return False
        if max(own, whole) > self._CLOSE * min(own, whole):
            return whole < own
        self._close_calls += 1
        return (whole < own) is not (self._close_calls % self._EVERY == 0)
