"""The loop of one request, simulated: lead, verification beside drafting, bets, and what a clock would show.

Independent of `core.gamma`: the formula here is a scalar one, and the simulated loop checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.budget import Seat, SharedBudget
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import PROBE, GammaController, Plan, Policy

PLAIN = Plan(0, 0, False, "plain")


@dataclass(frozen=True, slots=True)
class World:
    """True costs (seconds) and chances."""

    ratio: float = 7.0
    """T_target(1) / T_draft(1)."""
    token: float = 0.8
    head: float | None = None
    """Chance that a bet wins; None: that of a token."""
    target: Callable[[float], float] = lambda n: 1.0 + 0.015 * (n - 1)
    """T_target(n)."""
    width_cost: float = 0.3
    """What one more sequence adds to a draft decode, as a share of a single one."""
    overhead: float = 0.0
    extra: float = 0.0
    """What a step that drafts has more of that."""
    noise: float = 0.0
    """Standard deviation of measured log-seconds."""
    pauses: float = 0.0
    """Chance that a measurement is 20 times too long: the process was paused."""
    contention: float = 1.0
    """How many times slower both models are while both work (seen by no curve: their levels follow both)."""
    share: float = 1.0
    """How much of gamma the best sequence gets, its head included."""
    spread: float = 1.0
    """How many times faster the target is while no draft works."""
    by_position: Callable[[int], float] | None = None
    """Chance of the i-th token of a lead or tail, in place of `token`."""

    @property
    def bet(self) -> float:
        return self.token if self.head is None else self.head

    def survival(self, count: int) -> list[float]:
        """Chances that the first 0, 1, ... count tokens are all accepted; their sum is 1 + A(count)."""
        out = [1.0]
        for i in range(count):
            out.append(out[-1] * self.chance(i))
        return out

    def chance(self, position: int) -> float:
        return self.token if self.by_position is None else self.by_position(position)

    def target_pass(self, tokens: float, *, alone: bool) -> float:
        """Seconds of a target pass beside which a draft works, or none."""
        return self.target(tokens) / (self.spread if alone else 1.0)

    def draft(self, width: float) -> float:
        """Seconds of one draft decode."""
        return self.target(1) / self.ratio * (1.0 + self.width_cost * (width - 1.0))

    def tail(self, gamma: int) -> int:
        return max(0, int(self.share * gamma + 1e-9) - 1)

    def block_seconds(self, gamma: int) -> float:
        if gamma == 0:
            return 0.0
        decodes = self.tail(gamma) + 1
        return decodes * self.draft(gamma / decodes)


def calibrated(world: World, *, overheads: bool = True) -> Costs:
    """Costs that were measured once; `overheads`: those of steps, too."""
    costs = Costs()
    for tokens in (1, 8):
        costs.observe_target(tokens, world.target(tokens))
        if world.spread > 1.0:
            costs.observe_target(tokens, world.target_pass(tokens, alone=True), alone=True)
    costs.observe_draft(1, world.draft(1))
    for drafting in (False, True, False, True) if overheads else ():
        costs.observe_overhead(world.overhead + world.extra * drafting, drafting=drafting)
    return costs


def known(token: float, head: float, trials: int = 100) -> Acceptance:
    """Acceptance after so many observations of these chances."""
    acceptance = Acceptance()
    for i in range(trials):
        hit = int(token * (i + 1)) - int(token * i)
        acceptance.observe(1, hit, int(head * (i + 1)) > int(head * i))
    return acceptance


def rate(world: World, plan: Plan) -> float:
    """Committed tokens per second of a plan kept up for ever: the stationary chain over EMPTY and HAND."""
    gamma = plan.gamma if plan.overlap else 0
    lead, tail = world.survival(plan.lead), world.survival(world.tail(gamma))
    drafting = world.block_seconds(gamma)
    bet = world.bet if gamma else 0.0
    empty_pass = world.target_pass(len(lead), alone=gamma == 0)
    overhead = world.overhead + (world.extra if plan.lead or gamma else 0.0)
    empty_seconds = plan.lead * world.draft(1) + max(empty_pass, drafting) + overhead
    hand_seconds = max(world.target(len(tail)), drafting) + overhead
    into, stay = lead[-1] * bet, tail[-1] * bet
    # Time spent in each state: leaving EMPTY balances leaving HAND.
    empty, hand = (0.0, 1.0) if stay == 1.0 else (1.0 - stay, into)
    return (empty * sum(lead) + hand * sum(tail)) / (empty * empty_seconds + hand * hand_seconds)


def plain_rate(world: World) -> float:
    return rate(world, PLAIN)


def best_plan(world: World, largest: int = 32) -> Plan:
    """The fixed choice that earns most, plain decoding included."""
    plans = [Plan(lead, gamma, gamma > 0, "") for lead in range(largest + 1) for gamma in range(largest + 1)]
    return max(plans, key=lambda plan: rate(world, plan))


@dataclass(frozen=True, slots=True)
class Step:
    plan: Plan
    committed: float
    """Expected, given how many tokens were proposed: what the plans earn without the luck of the draw."""
    seconds: float
    proposed: int
    accepted: int
    bet_won: bool | None
    tokens: int
    """New tokens of the target's pass."""


class Loop:
    """One request. `world` may be replaced between steps: a sudden change."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self._random = np.random.default_rng(seed)
        self._hand: int | None = None

    def step(self, plan: Plan) -> Step:
        world = self.world
        lead = plan.lead if self._hand is None else 0
        proposed = lead if self._hand is None else self._hand
        gamma = plan.gamma if plan.overlap else 0
        accepted = 0
        while accepted < proposed and self._random.random() < world.chance(accepted):
            accepted += 1
        bet_won = bool(self._random.random() < world.bet) if gamma and accepted == proposed else None
        self._hand = world.tail(gamma) if bet_won else None
        target = world.target_pass(proposed + 1, alone=gamma == 0)
        seconds = max(target, world.block_seconds(gamma)) + lead * world.draft(1) + world.overhead
        if gamma or lead:
            seconds = world.contention * (seconds + world.extra)
        committed = sum(world.survival(proposed))
        return Step(plan, committed, seconds, proposed, accepted, bet_won, proposed + 1)

    def _measured(self, seconds: float) -> float:
        pause = 20.0 if self._random.random() < self.world.pauses else 1.0
        return float(seconds * pause * np.exp(self.world.noise * self._random.standard_normal()))

    def show(self, step: Step, costs: Costs) -> None:
        """What the clocks showed in a step."""
        world, gamma = self.world, step.plan.gamma
        alone = gamma == 0
        seconds = world.target_pass(step.tokens, alone=alone)
        costs.observe_target(step.tokens, self._measured(seconds), alone=alone and world.spread > 1.0)
        if step.plan.lead and step.proposed:
            costs.observe_draft(1, self._measured(world.draft(1)))
        if gamma:
            decodes = world.tail(gamma) + 1
            for _ in range(decodes):
                costs.observe_draft(round(gamma / decodes), self._measured(world.draft(round(gamma / decodes))))
        drafting = bool(gamma or step.plan.lead)
        overhead = world.overhead + (world.extra if drafting else 0.0)
        costs.observe_overhead(self._measured(overhead) if overhead else 0.0, drafting=drafting)

    def run(self, controller: GammaController, costs: Costs, steps: int) -> Iterator[Step]:
        for _ in range(steps):
            step = self.step(controller.plan())
            self.show(step, costs)
            tail = self.world.tail(step.plan.gamma) if step.plan.gamma else None
            controller.observe(
                proposed=step.proposed,
                accepted=step.accepted,
                bet_won=step.bet_won,
                gamma=step.plan.gamma,
                best_tail=tail,
            )
            yield step


def earned(steps: list[Step]) -> float:
    """Committed tokens per second."""
    return sum(step.committed for step in steps) / sum(step.seconds for step in steps)


class Crowd:
    """Several requests in rounds: one pass over all their blocks, one draft for all of them.

    Requests of one `World` are alike but for `token`, which may be given one by one.
    """

    def __init__(self, world: World, count: int, seed: int, tokens: list[float] | None = None) -> None:
        self.world = world
        self.costs = Costs()
        for n in (1, 8, 32):
            self.costs.observe_target(n, world.target(n))
            if world.spread > 1.0:
                self.costs.observe_target(n, world.target_pass(n, alone=True), alone=True)
        for width in (1, 4):
            self.costs.observe_draft(width, world.draft(width))
        self.budget = SharedBudget(Policy(), self.costs)
        self.pooled = Acceptance()
        self._elapsed: float | None = None
        self._reading = 0.0
        """Seconds the draft goes on with what nobody waits for."""
        self._random = np.random.default_rng(seed)
        self.requests: list[_Member] = []
        self.resize(count, tokens)

    def resize(self, count: int, tokens: list[float] | None = None) -> None:
        """Requests come (wise by what others learned) or go."""
        self._elapsed = None
        del self.requests[count:]
        while len(self.requests) < count:
            token = self.world.token if tokens is None else tokens[len(self.requests)]
            self.requests.append(_Member(token, GammaController(Policy(), self.costs, self.pooled)))

    def round(self) -> Round:
        world, members, busy = self.world, self.requests, self._reading > 0.0
        seats = [Seat(member.controller, member.hand, member.behind, busy=busy) for member in members]
        plans = self.budget.plan(seats, rows=len(members), elapsed=self._elapsed, busy=busy)
        leads = [plan.lead if member.hand == 0 else 0 for member, plan in zip(members, plans, strict=True)]
        leading = sum(lead > 0 for lead in leads)
        lead_seconds = max(leads) * world.draft(leading) if leading else 0.0
        blocks = [plan.gamma if plan.overlap else 0 for plan in plans]
        waited = all(plan.reason != PROBE for plan in plans)
        # Decode k advances every request whose block is longer than k; the first reads what is new to it besides.
        widths = [sum(block > k for block in blocks) for k in range(1, max(blocks))]
        reading = sum(plan.read for plan in plans)
        if writing := [max(1, member.behind) for member, block in zip(members, blocks, strict=True) if block]:
            widths.append(sum(writing) + reading)
        elif reading:
            widths.append(reading)
            waited = False
        rows = sum(1 + member.hand + lead for member, lead in zip(members, leads, strict=True))
        drafting = sum(world.draft(width) for width in widths)
        slower = world.contention if drafting or busy else 1.0
        alone = not (drafting or busy)
        target = world.target_pass(rows, alone=alone)
        at_work = drafting > 0.0 or leading > 0
        overhead = world.overhead + (world.extra if at_work else 0.0)
        seconds = lead_seconds + slower * max(target, drafting if waited else 0.0) + overhead
        self._elapsed = seconds
        self._reading = max(0.0, max(self._reading, drafting) - seconds / slower)
        for member, plan in zip(members, plans, strict=True):
            member.behind -= plan.read
        self.costs.observe_overhead(overhead, drafting=at_work)
        committed = [m.step(lead, block, self._random) for m, lead, block in zip(members, leads, blocks, strict=True)]
        self.costs.observe_target(rows, self._measured(target), alone=alone and world.spread > 1.0)
        for width in widths:
            self.costs.observe_draft(width, self._measured(world.draft(width)))
        return Round(sum(committed), seconds, sum(blocks) + sum(leads), [block > 0 for block in blocks])

    def _measured(self, seconds: float) -> float:
        return float(seconds * np.exp(self.world.noise * self._random.standard_normal()))

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain batched decoding."""
        return len(self.requests) / (self.world.target_pass(len(self.requests), alone=True) + self.world.overhead)


@dataclass(frozen=True, slots=True)
class Round:
    committed: float
    """Expected, given what was verified: without the luck of the draw."""
    seconds: float
    drafted: int
    who: list[bool]


@dataclass(slots=True)
class _Member:
    token: float
    controller: GammaController
    hand: int = 0
    behind: int = 1
    """Ids the draft has not read."""

    def step(self, lead: int, gamma: int, random: np.random.Generator) -> float:
        proposed = self.hand or lead
        accepted = 0
        while accepted < proposed and random.random() < self.token:
            accepted += 1
        won = bool(random.random() < self.token) if gamma and accepted == proposed else None
        self.hand = max(0, gamma - 1) if won else 0
        tail = gamma - 1 if gamma else None
        self.behind = 1 if lead or gamma else self.behind + 1 + accepted
        self.controller.observe(proposed=proposed, accepted=accepted, bet_won=won, gamma=gamma, best_tail=tail)
        return float(sum(self.token**i for i in range(proposed + 1)))


def crowd_rate(rounds: list[Round]) -> float:
    """Committed tokens per second of all requests together."""
    return sum(r.committed for r in rounds) / sum(r.seconds for r in rounds)
