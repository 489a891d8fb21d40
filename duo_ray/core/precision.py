"""Which quantisation of the draft a request uses: the one that promises the most committed tokens per second.

Coarser weights are read sooner and guess worse. What counts for more depends on the machine, the target and the texts,
so it is measured: requests show T_draft and acceptance of the quantisation they use, and now and then one uses another
than the best, for what it may show.

Nothing here draws random numbers or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.costs import Array, Costs
from duo_ray.core.gamma import Policy, choices, tokens_per_second
from duo_ray.core.stats import RequestStats

_TIMING = 0.03
"""Standard deviation of a measured T_draft, in log-seconds."""
_TEXTS, _SUITS = 0.5, 0.2
"""Standard deviations, in log-odds: how much easier one text is than another, and how much better it suits one
quantisation than another."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the target said of one request's drafted tokens."""

    judged: int
    """Tokens of tails and leads it looked at."""
    kept: int
    judged_heads: int
    """How often heads could win."""
    won_heads: int

    @classmethod
    def of(cls, stats: RequestStats) -> Trial:
        return cls(stats.judged_tokens, stats.kept_tokens, stats.judged_heads, stats.won_heads)

    def __add__(self, other: Trial) -> Trial:
        return Trial(
            self.judged + other.judged,
            self.kept + other.kept,
            self.judged_heads + other.judged_heads,
            self.won_heads + other.won_heads,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of one quantisation."""

    quant: str
    in_use: bool
    """Whether the next request uses it, unless it tries another one."""
    draft_seconds: float
    """T_draft of one sequence."""
    token: float
    """Chance that a drafted token is kept; see `Acceptance`."""
    head: float
    tokens_per_second: float
    """With the best (lead, gamma), or plain decoding where that is faster; one request alone."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What requests with the same quantisation learn from each other."""

    costs: Costs
    acceptance: Acceptance


def best_rate(policy: Policy, costs: Costs, *, token: float, head: float, speed: float = 1.0) -> float:
    """Expected committed tokens per second of the best plan a policy allows; arguments as of `tokens_per_second`."""
    leads, gammas, allowed = choices(policy)
    plain = 1.0 / costs.plain_seconds()
    if not allowed.any():
        return plain
    rates = tokens_per_second(leads, gammas, costs, token=token, head=head, speed=speed)
    best = float(rates[allowed].max())
    return max(best, plain) if policy.fallback else best


class PrecisionChooser:
    """Chooses for every request and learns from what became of it.

    The best is used. Another is tried when it could be better (it would be, were all its estimates one standard
    deviation better) and when that is paid for: every request saves up 2% of a request's time, a trial costs what it
    is expected to lose, and never less than 15%, as the other model has to read the prompt anew.
    """

    _SHARE = 0.02
    _LEAST_COST = 0.15
    _FIRST_SAVINGS, _MOST_SAVINGS = 0.5, 2.0
    _SWITCH = 1.02
    """How much better another must be to become the one in use: its cache is empty."""

    def __init__(self, quants: Sequence[str], policy: Policy, costs: Costs) -> None:
        """The first of `quants` is in use until more is known; its draft times are those of `costs`."""
        self.quants = tuple(quants)
        self.knowledge = {
            quant: Knowledge(costs.other_draft() if i else costs, Acceptance()) for i, quant in enumerate(self.quants)
        }
        self.in_use = self.quants[0]
        self._policy = policy
        count = len(self.quants)
        self._seconds = _Related(count, math.log(0.01), together=1.0, apart=0.5, drift=0.15, own_drift=0.01)
        self._tokens = _Related(count, _logit(0.8), together=1.0, apart=0.7, drift=0.15, own_drift=0.04)
        self._heads = _Related(count, _logit(0.7), together=1.0, apart=0.7, drift=0.15, own_drift=0.04)
        self._savings = self._FIRST_SAVINGS

    def compare(self, trials: Mapping[str, Trial]) -> None:
        """Before the first request: take the best into use. All wrote the same text, in one state of the machine."""
        for i, quant in enumerate(self.quants):
            self._time(i)
            if quant in trials:
                self._count(i, trials[quant], _SUITS**2)
        for chances in (self._tokens, self._heads):
            chances.shift(_TEXTS)
        rates = self._rates(0.0)
        self.in_use = max(self.quants, key=rates.__getitem__)

    def choose(self) -> str:
        """The quantisation for a new request."""
        if len(self.quants) == 1:
            return self.in_use
        rates = self._rates(0.0)
        best = max(self.quants, key=rates.__getitem__)
        if rates[best] > self._SWITCH * rates[self.in_use]:
            self.in_use = best
        self._savings = min(self._savings + self._SHARE, self._MOST_SAVINGS)
        hopes = self._rates(1.0)
        rival = max((quant for quant in self.quants if quant != self.in_use), key=hopes.__getitem__)
        cost = max(self._LEAST_COST, rates[self.in_use] / rates[rival] - 1.0)
        if hopes[rival] <= rates[self.in_use] or cost > self._savings:
            return self.in_use
        self._savings -= cost
        return rival

    def observe(self, quant: str, trial: Trial) -> None:
        """A request ended."""
        for estimates in (self._seconds, self._tokens, self._heads):
            estimates.drift()
        index = self.quants.index(quant)
        if trial.judged or trial.judged_heads:  # else its T_draft is of an earlier request, too
            self._time(index)
        self._count(index, trial, _TEXTS**2 + _SUITS**2)

    def _time(self, index: int) -> None:
        costs = self.knowledge[self.quants[index]].costs
        self._seconds.observe(index, math.log(costs.draft_seconds(1)), _TIMING**2)

    def _count(self, index: int, trial: Trial, variance: float) -> None:
        for chances, yes, trials in (
            (self._tokens, trial.kept, trial.judged),
            (self._heads, trial.won_heads, trial.judged_heads),
        ):
            if trials:  # the log-odds that these counts show, with Haldane's correction, and their variance
                for_, against = yes + 0.5, trials - yes + 0.5
                chances.observe(index, math.log(for_ / against), 1.0 / for_ + 1.0 / against + variance)

    def estimates(self) -> tuple[Estimate, ...]:
        """In the order of `quants`."""
        rates = self._rates(0.0)
        return tuple(
            Estimate(
                quant,
                quant == self.in_use,
                math.exp(self._seconds.mean[i]),
                _chance(self._tokens.mean[i]),
                _chance(self._heads.mean[i]),
                rates[quant],
            )
            for i, quant in enumerate(self.quants)
        )

    def _rates(self, hope: float) -> dict[str, float]:
        """Expected tokens per second; with every estimate `hope` standard deviations better beside the one in use."""
        reference = self.quants.index(self.in_use)
        rates = {}
        for i, quant in enumerate(self.quants):
            costs = self.knowledge[quant].costs
            token, head, seconds = (
                float(each.mean[i]) + sign * hope * each.spread(i, reference)
                for each, sign in ((self._tokens, 1), (self._heads, 1), (self._seconds, -1))
            )
            # A quantisation not used lately has the curve of then, and the load of the machine now.
            speed = costs.draft_seconds(1) / math.exp(seconds) / self.knowledge[quant].acceptance.pace
            rates[quant] = best_rate(self._policy, costs, token=_chance(token), head=_chance(head), speed=speed)
        return rates


class _Related:
    """A number for each quantisation, learned from noisy values of one at a time.

    What changes it changes it for all (a hard text, a busy machine) far more than for one. So each is a common level
    plus a part of its own, both in random motion, and a Kalman filter over all of them lets one that was not used
    lately follow the others. All arguments but `mean` are standard deviations.
    """

    def __init__(
        self, count: int, mean: float, *, together: float, apart: float, drift: float, own_drift: float
    ) -> None:
        """`together`, `apart`: of level and own part before anything was seen; the drifts: what each request adds."""
        own = np.eye(count)
        self.mean: Array = np.full(count, mean)
        self._covariance: Array = together**2 + apart**2 * own
        self._drift: Array = drift**2 + own_drift**2 * own

    def drift(self) -> None:
        """A request later."""
        self._covariance = self._covariance + self._drift

    def shift(self, deviation: float) -> None:
        """The level may be another one now."""
        self._covariance = self._covariance + deviation**2

    def observe(self, index: int, value: float, variance: float) -> None:
        row = self._covariance[index]
        gain = row / (row[index] + variance)
        self.mean = self.mean + gain * (value - self.mean[index])
        self._covariance = self._covariance - np.outer(gain, row)

    def spread(self, index: int, other: int) -> float:
        """Standard deviation of the difference of two of them."""
        c = self._covariance
        return math.sqrt(max(0.0, float(c[index, index] + c[other, other] - 2.0 * c[index, other])))


def _logit(chance: float) -> float:
    return math.log(chance / (1.0 - chance))


def _chance(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
