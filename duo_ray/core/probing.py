"""When to probe: to draft only to keep the estimates alive while drafting is not expected to pay."""

from __future__ import annotations

from duo_ray.core.costs import LARGEST


class Purse:
    """What all requests have saved up for probes, seconds."""

    __slots__ = ("price", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.price = 0.0
        """Of the last probe that was due and could not be paid."""


class Probing:
    """Which steps of one request, or rounds of several, are probes.

    Each comes after twice as many steps as the one before, and only when what it may cost has been saved up.
    """

    _RESTS, _LONG_RESTS = 4, 8

    def __init__(self, purse: Purse) -> None:
        self.purse = purse
        self._gap = self._wait = 1
        self._resting = 0

    def save(self, seconds: float, *, most: float) -> None:
        """Put so many aside, up to `most` in all, or to what the last probe that was due would have cost."""
        self.purse.seconds = min(self.purse.seconds + seconds, max(most, self.purse.price))

    def restart(self) -> None:
        """Begin with short gaps again: drafting pays, or has just gone well."""
        self._gap = self._wait = 1
        self._resting, self.purse.price = 0, 0.0

    @property
    def ahead(self) -> int:
        """Coming steps in which nothing need be decided, and no probe is due and paid: planning takes time, too."""
        if not self._resting:
            return 0
        return LARGEST if self.purse.seconds < self.purse.price else max(0, min(LARGEST, self._wait - 1))

    def passed(self, steps: int) -> None:
        """So many steps were taken at once with the one before; together they rest as one."""
        self._wait -= steps

    def rests(self) -> bool:
        """Whether this step is one of those `ahead`; asked once a step."""
        if not self.ahead:
            return False
        self._resting -= 1
        self._wait -= 1
        return True

    def due(self) -> bool:
        """Whether this step may be a probe, if it is paid for; asked once a step."""
        self._wait -= 1
        self._resting = self._RESTS
        return self._wait <= 0

    def pay(self, seconds: float, *, longest_gap: int, hopeless: bool = False) -> bool:
        """Take the price of a probe; False where that has not been saved up.

        Args:
            longest_gap: steps to the next one, at most.
            hopeless: nothing but a probe is likely to change anything.
        """
        if seconds > self.purse.seconds:
            self._resting, self.purse.price = self._LONG_RESTS if hopeless else self._RESTS, seconds
            return False
        self.purse.seconds -= seconds
        self._resting, self.purse.price = 0, 0.0
        self._wait = self._gap = min(2 * self._gap, longest_gap)
        return True
