"""How much to draft, decided step by step from measured times and acceptance.

The published rule is gamma = T_target / T_draft: draft for as long as the target is busy (DuoDecoding, arXiv
2503.00784). A request starts from it. As soon as something is known about acceptance, the (lead, gamma) with the most
expected committed tokens per second is picked instead (`tokens_per_second`), and none at all when plain decoding is
expected to be faster.

Nothing here draws random numbers or reads a clock: the same observations give the same plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duo_ray.types import DraftBlock

Array = NDArray[np.float64]

PROBE = "probe"
"""The reason of a plan that drafts only to keep the estimates alive while a request decodes plainly."""

_CALIBRATION_RATE = 0.15

LARGEST = 64
"""No more than this many tokens are ever planned for one block or one lead."""

_WIDE = 8
"""Ids read by one draft call from which on its time tells something of decodes of many sequences."""

_WIDEST = 1024
"""Passes of many requests: the widest whose time is estimated."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the configuration leaves to the controller. Every fixed setting restricts the search."""

    draft_budget: int | None = None
    """Fixed gamma; None is auto, 0 is plain decoding. Without overlap it is the lead that is fixed."""
    gamma_scale: float = 1.0
    """Draft for this multiple of the time the target is busy: the search takes T_draft for T_draft / gamma_scale."""
    gamma_min: int = 1
    gamma_max: int = 32
    """Bounds of an automatic gamma, and of the lead where there is no overlap."""
    lead: int | None = None
    """Fixed lead; None is auto, 0 is the published loop."""
    overlap: bool | None = None
    """None is auto; False is sequential speculation: a lead, and nothing drafted beside the target."""
    fallback: bool = True
    """Whether a request may go on by plain decoding when drafting does not pay."""

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            (
                "draft_budget",
                self.draft_budget is None or 0 <= self.draft_budget <= LARGEST,
                f"0 to {LARGEST}, or auto",
            ),
            ("gamma_scale", 0.9 <= self.gamma_scale <= 1.1, "0.9 to 1.1"),
            ("gamma_min", 1 <= self.gamma_min <= self.gamma_max, f"1 to gamma_max, which is {self.gamma_max}"),
            ("gamma_max", self.gamma_max <= LARGEST, f"gamma_min to {LARGEST}"),
            ("lead", self.lead is None or 0 <= self.lead <= LARGEST, f"0 to {LARGEST}, or auto"),
        )
        for name, fine, allowed in checks:
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r} is out of range: {allowed}")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to draft in the coming step. Lead 0 with gamma 0 is plain decoding."""

    lead: int
    """Tokens to draft before the target's pass; counts only when no block is in hand."""
    gamma: int
    """Tokens to draft beside the target's pass, over all sequences, heads included."""
    overlap: bool
    reason: str
    """For people: why this and not another."""
    read: int = 0
    """Ids the draft is to read in a step in which it writes nothing: it is too far behind to write in time."""


# --- what things cost -------------------------------------------------------------------------------------------

_NOISE = 0.1**2
"""Variance of one measured log-seconds."""
_LEVEL = 0.3**2
"""Variance, in log-seconds, of the whole curve: another load on the machine, a longer context."""
_SHAPE = 0.2**2
"""Variance of the curve's shape, per doubling of the width."""
_FORGET = 0.005
"""Share of what was known that one more observation makes doubtful again."""
_DRIFT = 0.03**2
"""Variance the level gains with every observation besides: it moves sooner than the shape."""


class _Curve:
    """Seconds of one pass as a function of its width, learned from noisy passes of whatever widths occur.

    A Kalman filter over log-seconds at widths that lie close together up to `dense` and 15% apart from there to
    `_WIDEST`; in between it is interpolated. Prior mean: a line, 1 + slope (n - 1). Prior covariance: a
    common level, plus a Brownian motion in log2(n). So a pass of one width moves the estimate of all (the machine got
    slower), its own and its neighbours' the most (the curve is concave there), and a width not seen lately follows the
    others.

    A pause of the process only ever makes a pass slower. So a value far above the estimate is set aside; the third in a
    row is believed, at once and for all widths. A value far below is believed immediately.
    """

    def __init__(self, dense: int, slope: float) -> None:
        steps = math.ceil(math.log(_WIDEST / dense, 1.15))
        widths = np.concatenate([np.arange(1.0, dense), np.geomspace(dense, _WIDEST, steps + 1)])
        doublings = np.log2(widths)
        self._mean = np.log1p(slope * (widths - 1))
        self._prior = _LEVEL + _SHAPE * np.minimum(doublings[:, None], doublings[None, :])
        self._covariance = self._prior
        self._slow_in_a_row = 0
        self._widths = widths
        self.seen: tuple[int, ...] = ()

    def observe(self, width: int, seconds: float) -> None:
        # Spans come from a wall clock, which may be set back.
        if not (0.0 < seconds < math.inf and 1 <= width <= _WIDEST):
            return
        above = int(np.searchsorted(self._widths, width))
        below = max(0, above - 1)
        share = (self._widths[above] - width) / (self._widths[above] - self._widths[below]) if above else 0.0
        if not self.seen:
            self._mean = self._mean + math.log(seconds) - self._between(self._mean, below, above, share)
        surprise = math.log(seconds) - float(self._between(self._mean, below, above, share))
        # Level and shape have drifted since: less is known than before.
        covariance = (1.0 - _FORGET) * self._covariance + (_FORGET * self._prior + _DRIFT)
        row = self._between(covariance, below, above, share)
        variance = float(self._between(row, below, above, share))
        if abs(surprise) > max(math.log(1.5), 3.0 * math.sqrt(variance + _NOISE)):
            self._slow_in_a_row += surprise > 0.0
            if surprise > 0.0 and self._slow_in_a_row < 3:
                return
            covariance = self._prior + 1.0
            row = self._between(covariance, below, above, share)
            variance = float(self._between(row, below, above, share))
        self._slow_in_a_row = 0
        gain = row / (variance + _NOISE)
        self._mean = self._mean + gain * surprise
        self._covariance = covariance - np.outer(gain, row)
        if width not in self.seen:
            self.seen = (*self.seen, width)

    @staticmethod
    def _between(values: Array, below: int, above: int, share: float) -> Array:
        """`values` along their first axis at a width between two, `share` of the way back from the one above."""
        return np.asarray(values[above] if share == 0.0 else share * values[below] + (1.0 - share) * values[above])

    def seconds(self, widths: Array | float) -> Array:
        """Estimates at fractional `widths` of any shape, never falling, constant beyond the largest."""
        return np.asarray(np.interp(widths, self._widths, np.maximum.accumulate(np.exp(self._mean))))

    def copy(self) -> _Curve:
        twin = _Curve.__new__(_Curve)
        twin.__dict__.update(self.__dict__)  # no attribute is ever changed in place
        return twin


class Costs:
    """Measured seconds, shared by all requests of a pipeline. Recent values weigh more; outliers are damped.

    Until something was measured, the target is taken for 5 times as slow as the draft.
    """

    _ASSUMED_TARGET = 0.05
    _ASSUMED_RATIO = 5.0

    def __init__(self) -> None:
        self._target = _Curve(dense=LARGEST + 1, slope=0.015)
        self._draft = _Curve(dense=LARGEST // 2, slope=0.3)
        self._overheads: deque[float] = deque(maxlen=15)
        self._is_frozen = False

    def observe_target(self, tokens: int, seconds: float) -> None:
        """One target pass over `tokens` new tokens; more than 1024 teach nothing."""
        if not self._is_frozen:
            self._target.observe(tokens, seconds)

    def observe_draft(self, width: int, seconds: float) -> None:
        """One draft decode that advanced `width` sequences by one token; more than 1024 teach nothing."""
        if not self._is_frozen:
            self._draft.observe(width, seconds)

    def observe_call(self, blocks: Sequence[DraftBlock]) -> None:
        """The decodes of one draft call, which these blocks took part in."""
        longest = max(blocks, key=lambda block: len(block.token_seconds))
        for width, seconds in longest.token_seconds:
            self.observe_draft(width, seconds)
        # Ids of one text are read about as fast as ids of many are advanced.
        read = sum(block.prompt_tokens for block in blocks)
        if read >= _WIDE:
            self.observe_draft(read, longest.prompt_seconds)

    def observe_overhead(self, seconds: float) -> None:
        """Wall time of a step minus max(T_target, draft time); below zero counts as zero."""
        if not self._is_frozen and math.isfinite(seconds):
            self._overheads.append(max(0.0, seconds))

    def target_seconds(self, tokens: float) -> float:
        """Estimate of T_target(tokens)."""
        return float(self.target_curve(tokens))

    def draft_seconds(self, width: float) -> float:
        """Estimate for one draft decode of `width` sequences."""
        return float(self.draft_curve(width))

    @property
    def overhead(self) -> float:
        """Median of the last round overheads, seconds."""
        return float(median(self._overheads)) if self._overheads else 0.0

    def target_curve(self, tokens: Array | float) -> Array:
        """`target_seconds` for an array of token counts, fractions allowed."""
        curve = self._target.seconds(tokens)
        if self._target.seen:
            return curve
        known = self._ASSUMED_RATIO * self._draft.seconds(1.0) if self._draft.seen else self._ASSUMED_TARGET
        return np.asarray(curve * known)

    def draft_curve(self, width: Array | float) -> Array:
        """`draft_seconds` for an array of widths, fractions allowed."""
        curve = self._draft.seconds(width)
        if self._draft.seen:
            return curve
        known = self._target.seconds(1.0) if self._target.seen else self._ASSUMED_TARGET
        return np.asarray(curve * known / self._ASSUMED_RATIO)

    def other_draft(self) -> Costs:
        """Costs of another draft beside the same target: what either learns of the target and overhead, both know."""
        twin = Costs()
        twin._target, twin._overheads = self._target, self._overheads
        return twin

    def frozen(self) -> Costs:
        """A copy that ignores further observations: the schedule of a reproducible request rests on it."""
        twin = Costs()
        twin._target, twin._draft = self._target.copy(), self._draft.copy()
        twin._overheads = self._overheads.copy()
        twin._is_frozen = True
        return twin

    def as_dict(self) -> dict[str, Any]:
        """Estimates at powers of two among the widths seen and at the widest, for JSON.

        {"target": {"1": s, ...}, "draft": {...}, "overhead": s}
        """
        return {
            "target": {str(n): self.target_seconds(n) for n in _telling(self._target.seen)},
            "draft": {str(n): self.draft_seconds(n) for n in _telling(self._draft.seen)},
            "overhead": self.overhead,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Costs:
        """What `as_dict` gave, taken as measured once.

        Raises:
            ValueError: the stored calibration is not what `as_dict` writes.
        """
        costs = cls()
        try:
            for tokens, seconds in stored["target"].items():
                costs.observe_target(int(tokens), float(seconds))
            for width, seconds in stored["draft"].items():
                costs.observe_draft(int(width), float(seconds))
            costs.observe_overhead(float(stored["overhead"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"stored calibration {stored!r} cannot be read ({error!r}): delete it to measure anew"
            ) from error
        return costs


def _telling(widths: Sequence[int]) -> list[int]:
    """Of all these widths, as many as a curve needs."""
    return sorted(n for n in widths if n & (n - 1) == 0 or n == max(widths))


# --- what drafting yields ---------------------------------------------------------------------------------------


class _Chance:
    """Running chance of a yes/no event: a long memory, replaced by a short one once the two contradict each other."""

    __slots__ = ("_long", "_prior", "_short")

    _LONG, _SHORT = 1.0 - 1.0 / 60.0, 1.0 - 1.0 / 12.0
    _CONTRADICTION = 2.5
    """Log likelihood ratio, in nats, of the short memory's own chance against the long memory's."""
    _PRIOR_WEIGHT = 1.5

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._long = (0.0, 0.0)  # (yes, trials), decayed per trial
        self._short = (0.0, 0.0)

    @property
    def known(self) -> bool:
        return self._long[1] > 0.0

    @property
    def value(self) -> float:
        yes, trials = self._long
        return (yes + self._prior * self._PRIOR_WEIGHT) / (trials + self._PRIOR_WEIGHT)

    def observe(self, yes: int, no: int) -> None:
        trials = yes + no
        self._long = self._decayed(self._long, self._LONG**trials, yes, trials)
        self._short = self._decayed(self._short, self._SHORT**trials, yes, trials)
        if self._short[1] * _divergence(self._short[0] / self._short[1], self.value) > self._CONTRADICTION:
            # The short memory still holds a part of the past: what comes next shall count for more.
            self._long = self._short = (self._short[0] / 5.0, self._short[1] / 5.0)

    @staticmethod
    def _decayed(counts: tuple[float, float], decay: float, yes: int, trials: int) -> tuple[float, float]:
        return counts[0] * decay + yes, counts[1] * decay + trials

    def copy(self) -> _Chance:
        twin = _Chance(self._prior)
        twin._long, twin._short = self._long, self._short
        return twin


def _divergence(p: float, q: float) -> float:
    """Kullback-Leibler divergence of chance q from chance p, nats; 0 < q < 1."""
    return (p * math.log(p / q) if p > 0.0 else 0.0) + ((1.0 - p) * math.log((1.0 - p) / (1.0 - q)) if p < 1.0 else 0.0)


class Acceptance:
    """Running chances that drafting succeeds: of one request, or of all requests of a pipeline as their prior."""

    __slots__ = ("_head", "_token", "sharpness")

    def __init__(self) -> None:
        self._token = _Chance(0.8)
        self._head = _Chance(0.7)
        self.sharpness = 0.5
        """Temperature at which the draft's probability of its best head is the chance that greedy decoding takes it."""

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

    def calibrate(self, chance: float, *, won: bool) -> None:
        """The best head was given `chance` at the present sharpness, and won or lost its bet (greedy requests).

        A draft unsure between two tokens often puts the same one first as the target does, so its probabilities taken
        as they are would open sequences for bets that hardly ever win.
        """
        step = _CALIBRATION_RATE * (chance - won)
        self.sharpness = min(1.0, max(0.05, self.sharpness * math.exp(step)))

    def copy(self) -> Acceptance:
        twin = Acceptance()
        twin.sharpness = self.sharpness
        twin._token, twin._head = self._token.copy(), self._head.copy()
        return twin


# --- the decision -----------------------------------------------------------------------------------------------


def tokens_per_second(
    leads: Array, gammas: Array, costs: Costs, *, token: float, head: float, share: float = 1.0, speed: float = 1.0
) -> Array:
    """Expected committed tokens per second of every (lead, gamma) kept up for ever: `[len(leads), len(gammas)]`.

    A step starts with nothing in hand (EMPTY) or with a tail of m tokens (HAND). With a the chance of a token, h that
    of a head, A(k) = a + a^2 + ... + a^k = a (1 - a^k) / (1 - a) the expected number accepted of k, d = T_draft, o the
    round overhead, and D(gamma) the draft time of a block:

        EMPTY   commits 1 + A(lead)   in lead d + max(T_target(lead + 1), D(gamma)) + o,   then HAND with v = a^lead h
        HAND    commits 1 + A(m)      in          max(T_target(m + 1),    D(gamma)) + o,   then HAND with w = a^m h

    Every visit to EMPTY is followed by v / (1 - w) visits to HAND on average, so by the renewal-reward theorem

        rate = ((1 - w) commits_EMPTY + v commits_HAND) / ((1 - w) seconds_EMPTY + v seconds_HAND).

    gamma = 0 is sequential speculation (v = 0), and with lead = 0 plain decoding.

    Args:
        share: how much of gamma the best sequence of a block gets, its head included: m = share gamma - 1, written in
            m + 1 decodes that advance gamma / (m + 1) sequences on average. One sequence: share 1, D(gamma) = gamma d.
        speed: multiplies the draft's speed (`Policy.gamma_scale`).
    """
    a = min(max(token, 1e-6), 1.0 - 1e-9)

    def accepted(count: Array) -> Array:
        return a * -np.expm1(count * math.log(a)) / (1.0 - a)

    tails = np.maximum(share * gammas - 1.0, 0.0)
    decodes = np.minimum(tails + 1.0, gammas)
    drafting = decodes * costs.draft_curve(gammas / np.maximum(decodes, 1.0)) / speed
    lead_seconds = leads * (costs.draft_seconds(1) / speed)
    empty_seconds = (lead_seconds + costs.overhead)[:, None] + np.maximum(
        costs.target_curve(leads + 1.0)[:, None], drafting[None, :]
    )
    hand_seconds = np.maximum(costs.target_curve(tails + 1.0), drafting) + costs.overhead
    bet = np.where(gammas > 0, head, 0.0)
    to_hand = a ** leads[:, None] * bet
    leave = 1.0 - a**tails * bet
    tokens = leave * (1.0 + accepted(leads))[:, None] + to_hand * (1.0 + accepted(tails))
    return np.asarray(tokens / (leave * empty_seconds + to_hand * hand_seconds))


class GammaController:
    """Plans the steps of one request.

    `acceptance` is what other requests have shown so far. The controller starts from a copy of it (`self.acceptance`:
    this request's own) and feeds what it observes into both, so that the next request starts wiser. A reproducible
    request brings a fresh `Acceptance` and `costs.frozen()`.

    Plain decoding begins when no plan is expected to be 1% faster, and ends when one is expected to be 4% faster. In
    between, small probes beside the target's pass keep the estimates alive: each after twice as many steps as the one
    before (up to 6 where they fit beside the pass, 256 where they do not), and only when the time a probe may cost has
    been saved up from 2% of the time of plain decoding. A bet won by a probe is followed by another at once.
    """

    _LEAVE, _RETURN = 1.01, 1.04
    _SWITCH = 1.01
    _PROBE_SHARE = 0.02
    _SAVED_STEPS = 2.0
    _FREE_GAP, _LONGEST_GAP = 6, 256

    def __init__(self, policy: Policy, costs: Costs, acceptance: Acceptance) -> None:
        self.acceptance = acceptance.copy()
        self.costs = costs
        self._pooled = acceptance
        self._policy = policy
        self._leads, self._gammas, self._allowed = choices(policy)
        self._choice: tuple[int, int] | None = None
        self.share = 1.0
        """How much of a block's budget its best sequence has been getting."""
        self._plain = False
        self._savings = 0.0
        self._gap = self._wait = 1

    def plan(self) -> Plan:
        """For the coming step."""
        if not self._allowed.any():
            return Plan(0, 0, False, "plain: the configuration leaves nothing to draft")
        second = self.costs.target_seconds(1) + self.costs.overhead
        self._savings = min(self._savings + self._PROBE_SHARE * second, self._SAVED_STEPS * second)
        lead, gamma = self._best()
        gain = self._gain(lead, gamma)
        self._plain = self._policy.fallback and gain < (self._RETURN if self._plain else self._LEAVE)
        if not self._plain:
            self._gap = self._wait = 1
            return Plan(lead, gamma, gamma > 0, "fixed" if self._allowed.sum() == 1 else "auto")
        return self._probe() or Plan(0, 0, False, f"plain: drafting {gain:.2f}x of plain decoding")

    def calibrate(self, chance: float, *, won: bool) -> None:
        """See `Acceptance.calibrate`; learned for this request and for those after it."""
        for acceptance in (self.acceptance, self._pooled):
            acceptance.calibrate(chance, won=won)

    def width_cost(self, gamma: int) -> float:
        """Cost of a token in a parallel sequence as a share of one in a longer sequence, for `core.sequences.split`.

        While a block of `gamma` tokens is done before the target, their number is all that counts. When the target
        would wait for the draft, time counts, and a wider decode is cheaper than one more.
        """
        one = self.costs.draft_seconds(1)
        if gamma * one <= self.costs.target_seconds(1):
            return 1.0
        return min(1.0, max(0.05, self.costs.draft_seconds(2) / one - 1.0))

    def observe(self, *, proposed: int, accepted: int, bet_won: bool | None, gamma: int, best_tail: int | None) -> None:
        """How a step ended.

        Args:
            proposed, accepted: block tokens verified and kept.
            bet_won: whether the token after a fully accepted block was a head; None when there was nothing to win.
            gamma: budget of the block drafted beside the target's pass.
            best_tail: length of the best tail of that block; None when there was no block.
        """
        for acceptance in (self.acceptance, self._pooled):
            acceptance.observe(proposed, accepted, bet_won)
        if gamma > 0 and best_tail is not None:
            self.share += 0.2 * (min(1.0, (best_tail + 1) / gamma) - self.share)
        if self._plain and bet_won:
            self._gap = self._wait = 1  # good news: look again at once

    def _best(self) -> tuple[int, int]:
        """(lead, gamma) with the highest rate; the one before stays while it is within 1% of that."""
        rates = np.where(self._allowed, self._rates(self._leads, self._gammas, self._policy.gamma_scale), 0.0)
        if self._policy.draft_budget is None and self._policy.overlap is not False and not self.acceptance.known:
            ratio = self._policy.gamma_scale * self.costs.target_seconds(1) / self.costs.draft_seconds(1)
            start = min(max(round(ratio), self._policy.gamma_min), self._policy.gamma_max)
            rates[:, self._gammas != start] = 0.0
        best = divmod(int(rates.argmax()), rates.shape[1])
        if self._choice is None or rates[self._choice] * self._SWITCH < rates[best]:
            self._choice = best
        lead, gamma = self._choice
        return int(self._leads[lead]), int(self._gammas[gamma])

    def _gain(self, lead: int, gamma: int) -> float:
        """Rate of a plan as a multiple of plain decoding's, with the draft's true speed."""
        costs = self.costs
        rate = self._rates(np.array([float(lead)]), np.array([float(gamma)]), 1.0)
        return float(rate[0, 0]) * (costs.target_seconds(1) + costs.overhead)

    def _rates(self, leads: Array, gammas: Array, speed: float) -> Array:
        chances = self.acceptance
        return tokens_per_second(
            leads, gammas, self.costs, token=chances.token, head=chances.head, share=self.share, speed=speed
        )

    def _probe(self) -> Plan | None:
        """A small block, if one is due and paid for; with a fast draft a lead of one token too, if paid for."""
        costs, policy = self.costs, self._policy
        self._wait -= 1
        if self._wait > 0:
            return None
        second, token = costs.target_seconds(1), costs.draft_seconds(1)
        fits = int(second / token) - 1  # one decode less: the draft has to catch up with the context
        # With a draft slower than the target its speed is in doubt, not its guesses: one token tells.
        size = min(max(fits, 2), 4) if fits >= 0 else 1
        size = (
            min(max(size, policy.gamma_min), policy.gamma_max) if policy.draft_budget is None else policy.draft_budget
        )
        if policy.overlap is False:
            plan = Plan(policy.lead or size, 0, False, PROBE)
            block = 0.0
        else:
            plan = Plan(0, size, True, PROBE)
            block = max(0.0, size * token - second) + self.acceptance.head * (costs.target_seconds(size) - second)
        cost = block + self._lead_cost(plan.lead)
        if plan.overlap and policy.lead is None and fits >= 4 and cost + self._lead_cost(1) <= self._savings:
            plan, cost = replace(plan, lead=1), cost + self._lead_cost(1)
        if cost > self._savings:
            return None
        self._savings -= cost
        self._gap = min(2 * self._gap, self._FREE_GAP if size * token <= second else self._LONGEST_GAP)
        self._wait = self._gap
        return plan

    def _lead_cost(self, lead: int) -> float:
        """Seconds a lead adds to plain decoding when none of it is accepted."""
        costs = self.costs
        return lead * costs.draft_seconds(1) + costs.target_seconds(lead + 1) - costs.target_seconds(1)


def choices(policy: Policy) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Leads, gammas, and which pairs of them a policy allows besides plain decoding."""
    automatic = range(policy.gamma_min, policy.gamma_max + 1)
    leads = range(policy.gamma_max + 1) if policy.lead is None else (policy.lead,)
    gammas = (0, *automatic) if policy.overlap is None else automatic
    if policy.draft_budget is not None:
        gammas = (policy.draft_budget,)
    if policy.overlap is False:
        leads = gammas if policy.lead is None else leads
        gammas = (0,)
    lead_array, gamma_array = np.array(leads, dtype=np.float64), np.array(gammas, dtype=np.float64)
    least = policy.gamma_min if policy.lead is None and policy.draft_budget is None else 1
    allowed = (lead_array >= least)[:, None] | (gamma_array > 0)
    return lead_array, gamma_array, allowed & (policy.draft_budget != 0)
