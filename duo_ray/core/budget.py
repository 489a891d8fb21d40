"""gamma as a shared budget: what several requests draft, decided together for every round.

A round is one target pass over the blocks of all running requests and the draft pass beside it. One more drafted token
costs the same time whoever it belongs to, but requests differ in how likely it is accepted; and with many requests the
target has less time to spare for it. So the requests are ranked by what a drafted token of theirs is worth, and as many
of them draft as much as promises the most committed tokens per second over all. With growing load that shrinks to plain
batched decoding, and grows back.

A request alone is planned by its own controller (`core.gamma`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.costs import Array, Costs
from duo_ray.core.gamma import PROBE, GammaController, Plan, Policy, choices
from duo_ray.core.probing import Probing, Purse
from duo_ray.core.slowdown import Slowdown

_FINE = 8
"""Leads and gammas up to this are all tried, beyond it those about a quarter apart."""

_FAR_BEHIND = 4
"""Ids a draft has to read before it can write: with more, the others would wait for that."""
_READ_BESIDE = 8
"""Ids worth reading in one call beside what others write."""
_READ_ALONE = 64
"""Ids read in one call when nobody waits for a block of it."""
_NEAR = 32
"""Ids a draft may have to read before it writes a probe."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A request that could draft in the coming round."""

    controller: GammaController
    hand: int
    """Tokens of the block it holds."""
    behind: int
    """Ids its draft has not read yet."""
    draft: Hashable = None
    """Which draft actor it uses."""
    busy: bool = False
    """Whether that is still at work for an earlier round."""


class Chances(NamedTuple):
    """What is to be expected of a request's blocks."""

    head: float
    token: float
    share: float = 1.0
    """How much of gamma the best sequence gets."""
    pace: float = 1.0
    """See `Acceptance.pace`."""


class _Choice(NamedTuple):
    """Index of a plan: how many requests draft, which lead, which gamma."""

    drafting: int
    lead: int
    gamma: int


class SharedBudget:
    """Plans rounds of several requests. Like the controllers, it draws no random numbers and reads no clock."""

    _LEAVE, _RETURN = 1.02, 1.05
    _SWITCH = 1.02
    _PROBE_SHARE = 0.01
    _SAVED_ROUNDS = 4.0
    _FREE_GAP, _LONGEST_GAP = 4, 256
    """Rounds between probes that fit beside a pass, for each request: the more there are the less is to be won."""
    _TURN = 12
    """Rounds a request drafts before an equal one may take its place."""
    _SURE, _DUE = 2.0, 1.9
    """How much more the tokens of a request count in its turn, and at most after having waited for one."""
    _CONTENTION = 0.05
    """How much longer rounds with drafting are taken to last before any was timed, log-seconds."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self._policy, self.costs = policy, costs
        """The present costs: of the draft that most of the last seats had."""
        leads, gammas, allowed = choices(policy)
        few_leads, few_gammas = _thinned(leads), _thinned(gammas)
        self._leads, self._gammas = leads[few_leads], gammas[few_gammas]
        self._allowed = allowed[np.ix_(few_leads, few_gammas)]
        self._choice: tuple[float, Plan] | None = None
        self._plain, self._why_plain = False, ""
        self._idle: WeakKeyDictionary[GammaController, int] = WeakKeyDictionary()
        """For how many rounds each request has not drafted."""
        self._turns: WeakKeyDictionary[GammaController, int] = WeakKeyDictionary()
        """For how many rounds each of those whose turn it is has drafted."""
        self._probing = Probing(Purse())
        self._planned: tuple[int, int, Costs] | None = None
        """Seats, rows and draft of the round that was planned last."""
        self._slowdown = Slowdown(self._CONTENTION)
        self._expected: tuple[bool, float] | None = None
        """Whether the round before drafted, and how long it should have taken."""

    def plan(
        self, seats: Sequence[Seat], *, rows: int, drafts: int = 1, elapsed: float | None = None, busy: bool = False
    ) -> list[Plan]:
        """A plan for each seat.

        Args:
            rows: requests of the coming round, those without a seat included.
            drafts: draft actors the seats are spread over.
            elapsed: seconds since the round before began, if nothing out of the ordinary happened in it.
            busy: a draft is still at work for an earlier round.
        """
        if self._expected is not None and elapsed is not None:
            drafting, expected = self._expected
            self._slowdown.observe(drafting=drafting, expected=expected, elapsed=elapsed)
        self._expected = None
        if seats:
            # Those who use another quantisation of the draft are too few to be worth a sum of their own.
            self.costs = Counter(seat.controller.costs for seat in seats).most_common(1)[0][0]
        if rows == 1:
            return [seat.controller.plan(behind=seat.behind) for seat in seats]
        if busy:
            self._expected = True, self._seconds((), (), rows, drafts, busy=True)
        free = [i for i, seat in enumerate(seats) if not seat.busy]
        plans = [Plan(0, 0, False, "draft is busy")] * len(seats)
        for seat in seats:
            self._idle[seat.controller] = self._idle.get(seat.controller, 0) + 1
        if free:
            shared = self._plan([seats[i] for i in free], rows, drafts, all_free=len(free) == len(seats))
            for i, plan in zip(free, shared, strict=True):
                plans[i] = plan
            at_work = any((plan.gamma or plan.lead or plan.read) and plan.reason != PROBE for plan in plans)
            self._expected = busy or at_work, self._seconds(seats, plans, rows, drafts, busy=busy)
        return plans

    def _plan(self, seats: Sequence[Seat], rows: int, drafts: int, *, all_free: bool) -> list[Plan]:
        """A plan for each of these seats, whose drafts are free."""
        if not self._allowed.any():
            return [Plan(0, 0, False, "plain: the configuration leaves nothing to draft")] * len(seats)
        plain, crowd = self.costs.target_seconds(rows, alone=True), (len(seats), rows, self.costs)
        saved, most = self._PROBE_SHARE * plain, self._SAVED_ROUNDS * plain
        if self._plain and self._planned == crowd and self._probing.rests():
            self._probing.save(saved, most=most)
            return [Plan(0, 0, False, self._why_plain)] * len(seats)
        self._planned = crowd
        drafting, shared, gain = self._best(seats, rows, drafts)
        if drafting:
            self._probing.restart()
            plans = self._turn(seats, drafting, shared, rows)
        else:
            self._probing.save(saved, most=most)
            self._why_plain = f"plain: drafting {gain:.2f}x of plain decoding, {rows} requests"
            plans = [Plan(0, 0, False, self._why_plain)] * len(seats)
            # One that has little to read, else the one that has waited longest.
            near = [i for i, seat in enumerate(seats) if seat.behind <= _NEAR] or range(len(seats))
            asked = max(near, key=lambda i: self._idle[seats[i].controller])
            if all_free and (probe := self._probe(seats, rows, drafts, seats[asked].behind)) is not None:
                plans[asked] = probe
        for seat, plan in zip(seats, plans, strict=True):
            if plan.gamma or plan.lead or plan.read:
                self._idle[seat.controller] = 0
        return plans

    def _turn(self, seats: Sequence[Seat], drafting: int, shared: Plan, rows: int) -> list[Plan]:
        """`drafting` of the seats draft by this plan, or have their text read so that they can."""
        chosen = self._ranked(seats)[:drafting]
        plans = [Plan(0, 0, False, f"plain: it is others' turn, {rows} requests")] * len(seats)
        for i, seat in enumerate(seats):
            if i in chosen:
                self._turns.setdefault(seat.controller, 0)
            else:
                self._turns.pop(seat.controller, None)
        for draft in {seats[i].draft for i in chosen}:
            own = [i for i in chosen if seats[i].draft == draft]
            behind = [i for i in own if seats[i].behind > _FAR_BEHIND]
            writing = [i for i in own if i not in behind]
            if behind:
                room = self._readable(rows, [seats[i] for i in writing], shared)
                if room < min(_READ_BESIDE, seats[behind[0]].behind):
                    # There is no time for both. For reading no one waits, and all get as near as they can.
                    behind, writing, room = own, [], _READ_ALONE
                for i in behind:
                    read = min(seats[i].behind, room)
                    room -= read
                    plans[i] = Plan(0, 0, False, "draft reads", read=read)
            for i in writing:
                plans[i] = Plan(shared.lead, shared.gamma, shared.overlap, "auto")
                self._turns[seats[i].controller] += 1
        return plans

    def _seconds(self, seats: Sequence[Seat], plans: Sequence[Plan], rows: int, drafts: int, *, busy: bool) -> float:
        """How long the coming round should take; `busy`: a draft is at work for an earlier one."""
        costs = self.costs
        leading = [
            (seat.controller, plan.lead) for seat, plan in zip(seats, plans, strict=True) if plan.lead and not seat.hand
        ]
        longest = max((controller.usual_tokens(lead) for controller, lead in leading), default=0)
        lead_seconds = longest * costs.draft_seconds(max(1.0, len(leading) / drafts))
        writing = [
            (seat.controller.usual_tokens(plan.gamma), seat.behind) for seat, plan in zip(seats, plans, strict=True)
        ]
        tokens = rows + sum(seat.hand for seat in seats) + sum(lead for _, lead in leading)
        drafting = draft_call_seconds(costs, writing, drafts)
        alone = not busy and drafting == 0.0 and not any(plan.read for plan in plans)
        overhead = costs.overhead(drafting=not alone or bool(leading))
        return lead_seconds + max(costs.target_seconds(tokens, alone=alone), drafting) + overhead

    def _readable(self, rows: int, writing: Sequence[Seat], shared: Plan) -> int:
        """Ids a draft can read beside what it writes while the target is busy; any number when it writes nothing."""
        if not writing:
            return _READ_ALONE
        costs, count = self.costs, len(writing)
        spare = costs.target_seconds(rows) - (shared.gamma - 1) * costs.draft_seconds(count)
        rows_read = sum(max(1, seat.behind) for seat in writing)
        widths = np.arange(1.0, _READ_ALONE + 1)
        return int(np.searchsorted(costs.draft_curve(rows_read + widths), spare))

    def _ranked(self, seats: Sequence[Seat]) -> list[int]:
        """Seats by what a drafted token is worth now: its block counts only if all of the one in hand is accepted."""

        def worth(i: int) -> tuple[float, int, int]:
            controller = seats[i].controller
            chances, idle = controller.acceptance, self._idle[controller]
            reached = chances.head * chances.token ** (1 + seats[i].hand)
            turn = self._turns.get(controller)
            if turn is None:
                return -reached * min(self._DUE, idle / self._TURN), -idle, seats[i].behind
            return -reached * (self._SURE if turn < self._TURN else 1.0), -idle, seats[i].behind

        return sorted(range(len(seats)), key=worth)

    def _best(self, seats: Sequence[Seat], rows: int, drafts: int) -> tuple[int, Plan, float]:
        """How many draft, their plan, and the rate as a multiple of plain decoding's."""
        known = [(seat.controller.acceptance, seat.controller.share) for seat in seats]
        chances = sorted(
            (Chances(each.head, each.token, share, each.pace) for each, share in known),
            key=lambda chance: -chance.head * chance.token,
        )
        rates = shared_rates(self._leads, self._gammas, self.costs, chances, rows=rows, drafts=drafts)
        none = rates[0, 0, 0]
        rates = np.where(self._allowed, rates, 0.0)
        if not self._policy.fallback:
            rates[:-1] = 0.0
        best = _Choice(*(int(i) for i in np.unravel_index(rates.argmax(), rates.shape)))
        if self._choice is not None:
            share, plan = self._choice
            before = _Choice(
                math.ceil(share * len(seats)),
                int(np.searchsorted(self._leads, plan.lead)),
                int(np.searchsorted(self._gammas, plan.gamma)),
            )
            if rates[before] * self._SWITCH >= rates[best]:
                best = before
        gain = float(rates[best] / none) / (1.0 + self._slowdown.extra)
        needed = self._RETURN + self._restart(seats, best.drafting, rows) if self._plain else self._LEAVE
        self._plain = self._policy.fallback and gain < needed
        lead, gamma = int(self._leads[best.lead]), int(self._gammas[best.gamma])
        plan = Plan(lead, gamma, gamma > 0, "auto")
        if self._plain:
            self._choice = None
            return 0, plan, gain
        self._choice = (best.drafting / len(seats), plan)
        return best.drafting, plan, gain

    def _restart(self, seats: Sequence[Seat], drafting: int, rows: int) -> float:
        """Price of reading what is new to the draft before any of it pays, as a share of the next turns."""
        behind = sum(sorted(seat.behind for seat in seats)[:drafting])
        rounds = self.costs.draft_seconds(max(1, behind)) / self.costs.target_seconds(rows)
        return rounds * self._slowdown.extra / (2 * self._TURN)

    def _hopeless(self, seats: Sequence[Seat], rows: int, drafts: int) -> bool:
        """Whether drafting would not pay if all that is drafted were accepted."""
        right = [Chances(1.0, 1.0, pace=seat.controller.acceptance.pace) for seat in seats]
        rates = shared_rates(self._leads, self._gammas, self.costs, right, rows=rows, drafts=drafts)
        best = float(np.where(self._allowed, rates, 0.0).max())
        return best < self._RETURN * float(rates[0, 0, 0])

    def _probe(self, seats: Sequence[Seat], rows: int, drafts: int, behind: int) -> Plan | None:
        """A small block of one request, if one is due and paid for: one for all requests, not for each.

        No one waits for it, so its price is what a draft at work slows the target down by, and what it adds to a pass.
        Where even a draft that is always right would not pay, there is only its speed to be learned, and that costs
        all that can be saved.
        """
        costs = self.costs
        second, plain = costs.target_seconds(rows), costs.target_seconds(rows, alone=True)
        if not self._probing.due():
            return None
        size = max(2, self._policy.gamma_min)
        drafting = draft_call_seconds(costs, [(size, behind)], 1)
        cost = max(second, drafting) * self._slowdown.extra
        cost += costs.overhead(drafting=True) - costs.overhead(drafting=False)
        if self._policy.overlap is False:
            plan = Plan(size, 0, False, PROBE)
            cost += costs.target_seconds(rows + size - 1, alone=True) - plain + drafting
        else:
            plan = Plan(0, size, True, PROBE)
            cost += costs.target_seconds(rows + size - 1) - plain
        # Whether there is hope takes time to tell, so only where the probe could be paid.
        hopeless = cost <= self._probing.purse.seconds and self._hopeless(seats, rows, drafts)
        if hopeless:
            cost = max(cost, 0.99 * self._SAVED_ROUNDS * plain)
        free = max(second, size * costs.draft_seconds(1)) <= plain
        gap = self._FREE_GAP * rows if free else self._LONGEST_GAP
        return plan if self._probing.pay(cost, longest_gap=gap, hopeless=hopeless) else None


def draft_call_seconds(costs: Costs, blocks: Sequence[tuple[int, int]], drafts: int) -> float:
    """Estimate of one draft call for blocks of these (budget, ids to read before), spread over so many draft actors.

    The first decode reads, the last of those ids included in any case; decode k after it advances every block longer
    than k. A decode of some ids of one text costs about what it would of as many texts.
    """
    writing = [(gamma, behind) for gamma, behind in blocks if gamma > 0]
    widths = [sum(gamma > k for gamma, _ in writing) for k in range(1, max((g for g, _ in writing), default=1))]
    if writing:
        widths.append(sum(max(1, behind) for _, behind in writing))
    return sum(costs.draft_seconds(max(1.0, width / max(1, drafts))) for width in widths)


def shared_rates(
    leads: Array,
    gammas: Array,
    costs: Costs,
    chances: Sequence[Chances],
    *,
    rows: int,
    drafts: int = 1,
) -> Array:
    """Committed tokens per second of a round if the first s requests draft (lead, gamma) each and all others nothing.

    The chain of one request is that of `core.gamma.tokens_per_second`: it holds a block in a share

        x = v / (1 - w + v),  v = a^lead h,  w = a^m h

    of the rounds and then commits 1 + A(m) of m + 1 tokens, else 1 + A(lead) of lead + 1. Over many requests the
    sums of both go their steady way, and a round takes

        P(someone leads) lead T_draft(those who lead) + max(T_target(all tokens), D(s gamma) + R) + overhead.

    R: those who do not draft get one token a round, which the draft has to read before it is their turn. In rounds in
    which it neither writes a block nor reads, the target is alone at work.

    Args:
        chances: of each request, the worthiest first.
        rows: requests of a round, those included that cannot draft.

    Returns:
        `[len(chances) + 1, len(leads), len(gammas)]`; s = 0 is plain decoding whatever the lead and gamma.
    """
    head, token, share, pace = (np.array(column)[:, None, None] for column in zip(*chances, strict=True))
    a = np.clip(token, 1e-6, 1.0 - 1e-9)
    lead, gamma = leads[None, :, None], gammas[None, None, :]
    tail = np.maximum(share * gamma - 1.0, 0.0)
    bet = np.where(gamma > 0, head, 0.0)
    log = np.log(a)
    scale = a / (1.0 - a)
    to_hand, stay = np.exp(lead * log) * bet, np.exp(tail * log) * bet
    holds = to_hand / np.maximum(1.0 - stay + to_hand, 1e-12)
    after_lead, after_tail = -scale * np.expm1(lead * log), -scale * np.expm1(tail * log)
    committed = (1.0 - holds) * after_lead + holds * after_tail
    tokens = (1.0 - holds) * lead + holds * tail
    count = np.arange(len(chances) + 1, dtype=np.float64)[:, None, None]
    mean_share, mean_pace = (_summed(each) / np.maximum(count, 1.0) for each in (share, pace))
    decodes = np.minimum(np.maximum(mean_share * gamma, 1.0), gamma)
    width = count * gamma / np.maximum(decodes, 1.0) / drafts
    reading = (len(chances) - count) / drafts * costs.draft_curve(float(_READ_ALONE)) / _READ_ALONE
    drafting = (decodes * costs.draft_curve(np.maximum(width, 1.0)) * mean_pace + reading) * (count > 0)
    leading = _summed(1.0 - holds) / drafts
    someone = 1.0 - np.exp(_summed(np.log(np.maximum(holds, 1e-12))))
    lead_seconds = someone * lead * costs.draft_curve(np.maximum(leading, 1.0)) * mean_pace
    beside, alone = (costs.target_curve(rows + _summed(tokens), alone=each) for each in (False, True))
    at_work = (count > 0) & ((gamma > 0) | (count < len(chances)))
    plain, overhead = (costs.overhead(drafting=each) for each in (False, True))
    overheads = np.where(at_work | (someone * lead > 0), overhead, plain)
    seconds = lead_seconds + np.maximum(np.where(at_work, beside, alone), drafting) + overheads
    return np.asarray((rows + _summed(committed)) / seconds)


def _summed(values: Array) -> Array:
    """Sums over none, the first, the first two, ... along the first axis."""
    return np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])


def _thinned(values: Array) -> NDArray[np.int64]:
    """Indices of all values up to a few, beyond those of about every fourth part."""
    kept: list[int] = []
    for i, value in enumerate(values):
        if value <= _FINE or not kept or value >= 1.25 * values[kept[-1]] or i == len(values) - 1:
            kept.append(i)
    return np.array(kept)
