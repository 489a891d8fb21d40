"""How much to draft, decided step by step from measured times and acceptance.

The published rule is gamma = T_target / T_draft: draft for as long as the target is busy (DuoDecoding, arXiv
2503.00784). A request starts from it, where a target with a draft beside it is as fast as one alone. As soon as
something is known about acceptance, the (lead, gamma) with the most expected committed tokens per second is picked
instead (`tokens_per_second`), and none at all when plain decoding is expected to be faster.

Nothing here draws random numbers or reads a clock: the same observations give the same plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.costs import LARGEST, Array, Costs
from duo_ray.core.probing import Probing

COMPARE = "compare"
"""The reason of a plain step among others, whose overhead is to be compared with theirs."""
PROBE = "probe"
"""The reason of a plan that drafts only to keep the estimates alive while a request decodes plainly."""


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
    contention: float = 0.0
    """Share by which steps last longer while the draft works, beyond what its own passes take: not 0 where both models
    run on one CPU. Drafting has to earn that."""

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
            ("contention", 0.0 <= self.contention <= 1.0, "0 to 1"),
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
    further: int = 0
    """Plain steps after this one that may be taken at once with it."""


def tokens_per_second(
    leads: Array,
    gammas: Array,
    costs: Costs,
    *,
    token: float,
    head: float,
    share: float = 1.0,
    speed: float = 1.0,
    reading: float = 1.0,
) -> Array:
    """Expected committed tokens per second of every (lead, gamma) kept up for ever: `[len(leads), len(gammas)]`.

    A step starts with nothing in hand (EMPTY) or with a tail of m tokens (HAND). With a the chance of a token, h that
    of a head, A(k) = a + a^2 + ... + a^k = a (1 - a^k) / (1 - a) the expected number accepted of k, d = T_draft, o the
    round overhead of such steps, and D(gamma) the draft time of a block:

        EMPTY   commits 1 + A(lead)   in lead d + max(T_target(lead + 1), D(gamma)) + o,   then HAND with v = a^lead h
        HAND    commits 1 + A(m)      in          max(T_target(m + 1),    D(gamma)) + o,   then HAND with w = a^m h

    Every visit to EMPTY is followed by v / (1 - w) visits to HAND on average, so by the renewal-reward theorem

        rate = ((1 - w) commits_EMPTY + v commits_HAND) / ((1 - w) seconds_EMPTY + v seconds_HAND).

    gamma = 0 is sequential speculation (v = 0), and with lead = 0 plain decoding; the target is alone at work then.

    Args:
        share: how much of gamma the best sequence of a block gets, its head included: m = share gamma - 1, written in
            m + 1 decodes that advance gamma / (m + 1) sequences on average. One sequence: share 1, D(gamma) = gamma d.
        speed: multiplies the speed at which the draft writes (`Policy.gamma_scale`, the pace of the text).
        reading: ids the first decode of a block or lead reads: more than one where a token of the target is several of
            the draft's. They take about what a decode of as many sequences does.
    """
    a = min(max(token, 1e-6), 1.0 - 1e-9)

    def accepted(count: Array) -> Array:
        return a * -np.expm1(count * math.log(a)) / (1.0 - a)

    tails = np.maximum(share * gammas - 1.0, 0.0)
    decodes = np.minimum(tails + 1.0, gammas)
    more_to_read = costs.draft_seconds(max(1.0, reading)) - costs.draft_seconds(1)
    drafting = decodes * costs.draft_curve(gammas / np.maximum(decodes, 1.0)) / speed + more_to_read * (gammas > 0)
    lead_seconds = leads * (costs.draft_seconds(1) / speed) + more_to_read * (leads > 0)
    beside, alone = (costs.target_curve(leads + 1.0, alone=each)[:, None] for each in (False, True))
    plain, overhead = (costs.overhead(drafting=each) for each in (False, True))
    overheads = np.where((leads[:, None] > 0) | (gammas > 0), overhead, plain)
    empty_seconds = (
        lead_seconds[:, None] + np.maximum(np.where(gammas > 0, beside, alone), drafting[None, :]) + overheads
    )
    hand_seconds = np.maximum(costs.target_curve(tails + 1.0), drafting) + overhead
    bet = np.where(gammas > 0, head, 0.0)
    to_hand = a ** leads[:, None] * bet
    leave = 1.0 - a**tails * bet
    tokens = leave * (1.0 + accepted(leads))[:, None] + to_hand * (1.0 + accepted(tails))
    return np.asarray(tokens / (leave * empty_seconds + to_hand * hand_seconds))


class GammaController:
    """Plans the steps of one request.

    `acceptance` is what other requests have shown so far. The controller starts from it (`self.acceptance`:
    this request's own) and feeds what it observes into both, so that the next request starts wiser. A reproducible
    request brings a fresh `Acceptance` and `costs.frozen()`.

    Plain decoding begins when no plan is expected to be 1% faster, and ends when one is expected to be 2% faster. In
    between, small probes beside the target's pass keep the estimates alive: each after twice as many steps as the one
    before (up to 6 where they fit beside the pass, 256 where they do not), and only when the time a probe may cost has
    been saved up from 2% of the time of plain decoding (1% where a target alone is faster than one beside a draft). A
    bet won by a probe is followed by another at once.

    While drafting gains little, a step now and then is a plain one: how the overheads of both differ counts then.
    """

    _LEAVE, _RETURN = 1.01, 1.02
    _UNTRIED = 0.9
    """A draft much faster than the target, of which nothing else is known yet, is tried unless it is expected to lose
    more: a guess is no reason."""
    _SWITCH = 1.01
    _PROBE_SHARE, _COSTLY_PROBE_SHARE = 0.02, 0.01
    _SAVED_STEPS = 2.0
    _FREE_GAP, _LONGEST_GAP = 6, 256
    _DOUBTFUL = 1.3
    """A gain below which it counts how the overheads of both kinds of steps differ."""
    _COMPARED, _COMPARED_AGAIN, _COMPARISONS = 4, 100, 4
    """How many steps draft before a plain one, while that is not known, up to so many of them, and afterwards."""

    def __init__(self, policy: Policy, costs: Costs, acceptance: Acceptance) -> None:
        self.acceptance = acceptance.for_request()
        self.costs = costs
        self._pooled = acceptance
        self._policy = policy
        self._leads, self._gammas, self._allowed = choices(policy)
        self._choice: tuple[int, int] | None = None
        self.share = 1.0
        """How much of a block's budget its best sequence has been getting."""
        self._reading = 1.0
        self._plain, self._why_plain = False, ""
        self._probing = Probing(acceptance.purse)
        self._drafted = self._comparisons = 0
        """Steps since the last one that was plain to be compared, and how many there were of those."""

    def plan(self, *, may_lead: bool = True, behind: int = 1, further: int = 0) -> Plan:
        """For the coming step.

        Args:
            may_lead: whether a lead would be drafted before it, if the plan has one.
            behind: ids the draft has not read yet.
            further: plain steps that were taken at once with the one before.
        """
        if not self._allowed.any():
            return Plan(0, 0, False, "plain: the configuration leaves nothing to draft", further=LARGEST)
        costs = self.costs
        plain = costs.target_seconds(1, alone=True)
        second, share = self.costs.plain_seconds(), self._PROBE_SHARE
        if costs.target_seconds(1) > plain:  # no probe is free, and all that is saved up will be spent
            share = self._COSTLY_PROBE_SHARE
        self._probing.save((1 + further) * share * second, most=self._SAVED_STEPS * second)
        self._probing.passed(further)
        if self._plain and self._probing.rests():
            return self._rest()
        lead, gamma = self._best()
        gain = self._gain(lead, gamma)
        needed = self._RETURN if self._plain else self._LEAVE
        if not self.acceptance.known and 1.5 * self._draft_seconds(1) <= plain:
            needed = self._UNTRIED
        self._plain = self._policy.fallback and gain < needed
        if not self._plain:
            self._probing.restart()
            self._drafted += 1
            if self._policy.fallback and gain < self._DOUBTFUL and self._compares():
                return Plan(0, 0, False, COMPARE)
            return Plan(lead, gamma, gamma > 0, "fixed" if self._allowed.sum() == 1 else "auto")
        self._why_plain = f"plain: drafting {gain:.2f}x of plain decoding"
        return self._probe(lead, gamma, gain, may_lead=may_lead, behind=behind) or self._rest()

    def _rest(self) -> Plan:
        return Plan(0, 0, False, self._why_plain, further=self._probing.ahead)

    def _compares(self) -> bool:
        """Whether this step is a plain one, so that its overhead can be compared with that of the one before."""
        known = self.costs.both_overheads_known or self._comparisons >= self._COMPARISONS
        if self._drafted <= (self._COMPARED_AGAIN if known else self._COMPARED):
            return False
        self._drafted = 0
        self._comparisons += 1
        return True

    def observe_reading(self, read: int, behind: int) -> None:
        """The draft read `read` ids of its own for `behind` ids of the target's."""
        self._reading += 0.3 * (max(1.0, read / max(1, behind)) - self._reading)

    def observe_pace(self, pace: float) -> None:
        """See `Acceptance.observe_pace`; learned for this request and for those after it."""
        for acceptance in (self.acceptance, self._pooled):
            acceptance.observe_pace(pace)

    def usual_tokens(self, count: int) -> int:
        """Tokens of a usual text that take the draft as long as `count` of this one."""
        return math.ceil(count * self.acceptance.pace - 1e-9)

    def _draft_seconds(self, width: int) -> float:
        """Of a drafted token of this text, in so many sequences at once."""
        return self.costs.draft_seconds(width) * self.acceptance.pace

    def calibrate(self, chance: float, *, won: bool) -> None:
        """See `Acceptance.calibrate`; learned for this request and for those after it."""
        for acceptance in (self.acceptance, self._pooled):
            acceptance.calibrate(chance, won=won)

    def width_cost(self, gamma: int) -> float:
        """Cost of a token in a parallel sequence as a share of one in a longer sequence, for `core.sequences.split`.

        While a block of `gamma` tokens is done before the target, their number is all that counts. When the target
        would wait for the draft, time counts, and a wider decode is cheaper than one more.
        """
        one = self._draft_seconds(1)
        if gamma * one <= self.costs.target_seconds(1):
            return 1.0
        return min(1.0, max(0.05, self._draft_seconds(2) / one - 1.0))

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
            self._probing.restart()  # good news: look again at once

    def _best(self) -> tuple[int, int]:
        """(lead, gamma) with the highest rate; the one before stays while it is within 1% of that."""
        rates = np.where(self._allowed, self._rates(self._leads, self._gammas, self._policy.gamma_scale), 0.0)
        second, plain = self.costs.target_seconds(1), self.costs.target_seconds(1, alone=True)
        automatic = self._policy.draft_budget is None and self._policy.overlap is not False
        if automatic and not self.acceptance.known and second <= plain:
            ratio = self._policy.gamma_scale * second / self._draft_seconds(1)
            start = min(max(round(ratio), self._policy.gamma_min), self._policy.gamma_max)
            rates[:, self._gammas != start] = 0.0
        best = divmod(int(rates.argmax()), rates.shape[1])
        if self._choice is None or rates[self._choice] * self._SWITCH < rates[best]:
            self._choice = best
        lead, gamma = self._choice
        return int(self._leads[lead]), int(self._gammas[gamma])

    def _gain(self, lead: int, gamma: int) -> float:
        """Rate of a plan as a multiple of plain decoding's, with the draft's true speed."""
        rate = self._rates(np.array([float(lead)]), np.array([float(gamma)]), 1.0)
        return float(rate[0, 0]) * self.costs.plain_seconds() / (1.0 + self._policy.contention)

    def _rates(self, leads: Array, gammas: Array, speed: float) -> Array:
        chances = self.acceptance
        return tokens_per_second(
            leads, gammas, self.costs, token=chances.token, head=chances.head, share=self.share,
            speed=speed / chances.pace, reading=self._reading,
        )  # fmt: skip

    def _probe(self, lead: int, gamma: int, gain: float, *, may_lead: bool, behind: int) -> Plan | None:
        """A small block, if one is due and paid for; with a fast draft a lead of one token too, if paid for.

        Where no probe is free it is a step by the best plan, at the price of what that is expected to lose. Where even
        a draft that is always right would not pay, there is only its speed to be learned, at the price of a step.
        What the draft has to read before comes on top: a lead waits for it, and a target that has more cores while no
        draft works is without them for as long.
        """
        costs, policy = self.costs, self._policy
        if not self._probing.due():
            return None
        second, plain, token = costs.target_seconds(1), costs.target_seconds(1, alone=True), self._draft_seconds(1)
        fits = int(second / token) - 1  # one decode less: the draft has to catch up with the context
        # With a draft slower than the target its speed is in doubt, not its guesses: one token tells.
        reading = costs.draft_seconds(max(1, behind)) - costs.draft_seconds(1)
        slowed = reading * (second - plain) / second
        size = min(max(fits, 2), 4) if fits >= 0 else 1
        size = (
            min(max(size, policy.gamma_min), policy.gamma_max) if policy.draft_budget is None else policy.draft_budget
        )
        if policy.overlap is False:
            probe = Plan(policy.lead or size, 0, False, PROBE)
            block = 0.0
        else:
            probe = Plan(0, size, True, PROBE)
            block = max(second, size * token) - plain + self.acceptance.head * (costs.target_seconds(size) - second)
            # While it reads, plain steps are slowed down, too, and each bears the whole overhead.
            waiting = reading / plain * (costs.overhead(drafting=False) - (costs.plain_seconds() - plain))
            block += policy.contention * max(second, reading) + max(slowed, waiting)
        overhead = costs.overhead(drafting=True)
        block += overhead - (costs.plain_seconds() - plain)
        cost = block + self._lead_cost(probe.lead, alone=not probe.overlap) + (reading if probe.lead else 0.0)
        one_more = self._lead_cost(1, alone=False) + reading
        if second > plain:
            probe = Plan(lead, gamma, gamma > 0, PROBE)
            usual = second if gamma else plain
            cost = max(0.0, 1.0 - gain) * (usual + self._lead_cost(lead, alone=gamma == 0) + overhead)
            cost += reading if lead else slowed
        elif probe.overlap and policy.lead is None and fits >= 4 and cost + one_more <= self._pooled.purse.seconds:
            probe, cost = replace(probe, lead=1), cost + one_more
        hopeless = self._hopeless()
        if hopeless:
            cost = max(cost, self.costs.plain_seconds())
        if not (may_lead or probe.gamma):
            return None  # nothing would be drafted
        gap = self._FREE_GAP if max(second, size * token) <= plain else self._LONGEST_GAP
        return probe if self._probing.pay(cost, longest_gap=gap, hopeless=hopeless) else None

    def _hopeless(self) -> bool:
        """Whether drafting would not pay if all that is drafted were accepted."""
        speed = 1.0 / self.acceptance.pace
        rates = tokens_per_second(self._leads, self._gammas, self.costs, token=1.0, head=1.0, speed=speed)
        needed = self._RETURN * (1.0 + self._policy.contention)
        return float(rates[self._allowed].max()) * self.costs.plain_seconds() < needed

    def _lead_cost(self, lead: int, *, alone: bool) -> float:
        """Seconds a lead adds to a pass when none of it is accepted."""
        one, more = (self.costs.target_seconds(tokens, alone=alone) for tokens in (1, lead + 1))
        return lead * self._draft_seconds(1) + more - one


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
