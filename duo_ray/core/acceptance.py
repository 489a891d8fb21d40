"""What drafting yields: the chances that a drafted token is accepted and that a bet wins, learned from what happens."""

from __future__ import annotations

import math

from duo_ray.core.probing import Purse

_CALIBRATION_RATE = 0.15


class _Chance:
    """Running chance of a yes/no event: a long memory, replaced by a short one once the two contradict each other."""

    __slots__ = ("_long", "_prior", "_short", "_weight", "known")

    _LONG, _SHORT = 1.0 - 1.0 / 60.0, 1.0 - 1.0 / 12.0
    _CONTRADICTION = 2.5
    """Log likelihood ratio, in nats, of the short memory's own chance against the long memory's."""
    _PRIOR_WEIGHT = 1.5
    """Trials that a guess is worth."""
    _POOL_WEIGHT = 8.0
    """Trials that the experience of other requests is worth at most: texts differ."""

    def __init__(self, prior: float) -> None:
        self._prior, self._weight = prior, self._PRIOR_WEIGHT
        self._long = (0.0, 0.0)  # (yes, trials), decayed per trial
        self._short = (0.0, 0.0)
        self.known = False

    @property
    def value(self) -> float:
        yes, trials = self._long
        return (yes + self._prior * self._weight) / (trials + self._weight)

    def observe(self, yes: int, no: int) -> None:
        trials = yes + no
        self.known = self.known or trials > 0
        self._long = self._decayed(self._long, self._LONG**trials, yes, trials)
        self._short = self._decayed(self._short, self._SHORT**trials, yes, trials)
        if self._short[1] * _divergence(self._short[0] / self._short[1], self.value) > self._CONTRADICTION:
            # The short memory still holds a part of the past: what comes next shall count for more.
            self._long = self._short = (self._short[0] / 5.0, self._short[1] / 5.0)
            self._weight = self._PRIOR_WEIGHT

    @staticmethod
    def _decayed(counts: tuple[float, float], decay: float, yes: int, trials: int) -> tuple[float, float]:
        return counts[0] * decay + yes, counts[1] * decay + trials

    def for_request(self) -> _Chance:
        twin = _Chance(self.value)
        twin._weight = min(self._long[1] + self._weight, self._POOL_WEIGHT)
        twin.known = self.known
        return twin


def _divergence(p: float, q: float) -> float:
    """Kullback-Leibler divergence of chance q from chance p, nats; 0 < q < 1."""
    return (p * math.log(p / q) if p > 0.0 else 0.0) + ((1.0 - p) * math.log((1.0 - p) / (1.0 - q)) if p < 1.0 else 0.0)


class Acceptance:
    """Running chances that drafting succeeds: of one request, or of all requests of a pipeline as their prior."""

    __slots__ = ("_head", "_pace_rate", "_token", "pace", "purse", "sharpness")

    _POOL_RATE, _REQUEST_RATE = 0.03, 0.15
    """How much one more block says about the pace."""

    def __init__(self) -> None:
        self._token = _Chance(0.8)
        self._head = _Chance(0.7)
        self.sharpness = 0.5
        """Temperature at which the draft's probability of its best head is the chance that greedy decoding takes it."""
        self.pace = 1.0
        """How many times as long a drafted token takes as the draft's costs say; see `DraftBlock`."""
        self._pace_rate = self._POOL_RATE
        self.purse = Purse()
        """What requests have saved up for probes; that of the pool, not of one request."""

    @property
    def token(self) -> float:
        """Chance that a drafted token of a tail or lead is accepted, given that all before it were."""
        return self._token.value

    @property
    def head(self) -> float:
        """Chance that a bet on the head wins, given that the block before it was fully accepted."""
        return self._head.value

    @property
    def known(self) -> bool:
        """Whether anything was observed yet."""
        return self._token.known or self._head.known

    def observe(self, proposed: int, accepted: int, bet_won: bool | None) -> None:
        """How a step ended; `bet_won` is None when no bets were offered or the block was not fully accepted."""
        if proposed:
            self._token.observe(accepted, int(accepted < proposed))
        if bet_won is not None:
            self._head.observe(int(bet_won), int(not bet_won))

    def observe_pace(self, pace: float) -> None:
        """That of a block."""
        self.pace += self._pace_rate * (min(pace, 3.0) - self.pace)

    def calibrate(self, chance: float, *, won: bool) -> None:
        """The best head was given `chance` at the present sharpness, and won or lost its bet (greedy requests).

        A draft unsure between two tokens often puts the same one first as the target does, so its probabilities taken
        as they are would open sequences for bets that hardly ever win.
        """
        step = _CALIBRATION_RATE * (chance - won)
        self.sharpness = min(1.0, max(0.05, self.sharpness * math.exp(step)))

    def for_request(self) -> Acceptance:
        """What a new request starts from: the same chances, sooner to be corrected by its own text."""
        twin = Acceptance()
        twin.sharpness, twin.pace, twin._pace_rate = self.sharpness, self.pace, self._REQUEST_RATE
        twin._token, twin._head = self._token.for_request(), self._head.for_request()
        return twin
