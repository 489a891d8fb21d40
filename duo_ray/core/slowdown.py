"""What drafting costs beyond what passes cost alone, learned from how long rounds take."""

from __future__ import annotations

import math


class Slowdown:
    """How much longer rounds take than the curves of `core.costs` say, without drafting and with it.

    Two models on one machine slow each other down, blocks come late, a draft has to read: nothing of that is in the
    curves, and all of it is in the time between two rounds.
    """

    _LEARNING, _FORGETTING = 0.2, 0.005

    def __init__(self, drafting: float) -> None:
        """`drafting` is what is assumed before any round was timed, log-seconds."""
        self._plain, self._drafting = 0.0, drafting

    def observe(self, *, drafting: bool, expected: float, elapsed: float) -> None:
        """A round, with a draft at work or not, was expected to take so many seconds, and took so many."""
        if elapsed <= 0.0 or expected <= 0.0:
            return
        surprise = min(max(math.log(elapsed / expected), -1.0), 1.0)
        if drafting:
            self._drafting += self._LEARNING * (surprise - self._drafting)
        else:
            self._plain += self._LEARNING * (surprise - self._plain)
            # What drafting costs besides is forgotten slowly, so that it is tried again.
            self._drafting += self._FORGETTING * (self._plain - self._drafting)

    @property
    def extra(self) -> float:
        """What a draft at work adds to a round, as a share of it; never below 0."""
        return math.expm1(max(0.0, self._drafting - self._plain))
