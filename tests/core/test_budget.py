"""The shared budget against simulated rounds: never worse than plain batched decoding, smooth in the load."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from duo_ray.core import budget as budget_module
from duo_ray.core.acceptance import Acceptance
from duo_ray.core.budget import Chances, Seat, SharedBudget, shared_rates
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import GammaController, Policy, tokens_per_second
from tests.core.loop_simulation import Crowd, World, crowd_rate

RATIOS = (2.0, 7.0, 12.0, 40.0)
ACCEPTANCES = (0.05, 0.3, 0.65, 0.9, 1.0)


def crowd(count: int, ratio: float, token: float, **world: float) -> Crowd:
    return Crowd(World(ratio=ratio, token=token, noise=0.05, **world), count, seed=0)


def gain(crowd: Crowd, rounds: int) -> float:
    """What the next rounds earn, as a multiple of plain batched decoding."""
    return crowd_rate([crowd.round() for _ in range(rounds)]) / crowd.plain_rate


def drafted(crowd: Crowd, rounds: int = 30) -> float:
    """Drafted tokens per request and round."""
    return float(np.mean([crowd.round().drafted for _ in range(rounds)])) / len(crowd.requests)


# --- what it earns


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("token", ACCEPTANCES)
def test_all_together_are_never_slower_than_plain_batched_decoding(count: int, ratio: float, token: float) -> None:
    """From the first round on: what it costs to find out is in it."""
    assert gain(crowd(count, ratio, token), 40) >= 0.95


@pytest.mark.parametrize(("count", "least"), [(2, 2.0), (4, 1.8), (8, 1.35), (16, 1.1)])
def test_a_draft_worth_its_time_pays_under_load_too(count: int, least: float) -> None:
    assert gain(crowd(count, ratio=7, token=0.8), 40) >= least


def test_an_overhead_of_every_round_is_no_obstacle() -> None:
    assert gain(crowd(4, ratio=7, token=0.65, overhead=0.1), 40) >= 1.3


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("token", [0.5, 0.65, 0.8])
def test_costs_that_no_curve_shows_are_found_in_the_time_of_rounds(count: int, token: float) -> None:
    """While both models work, all is 1.4 times slower: at most of these loads drafting loses."""
    assert gain(crowd(count, 3.5, token, contention=1.4), 150) >= 0.95


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("spread", [1.2, 1.9])
@pytest.mark.parametrize("token", [0.05, 0.65, 0.9])
def test_nothing_is_lost_of_a_target_that_has_all_cores_while_no_draft_works(
    count: int, spread: float, token: float
) -> None:
    assert gain(crowd(count, 7, token, spread=spread), 80) >= 0.95


def test_the_formula_for_one_request_is_that_of_the_controller() -> None:
    costs = Costs()
    for n in (1, 8, 32):
        costs.observe_target(n, 1.0 + 0.01 * n)
    costs.observe_draft(1, 0.2)
    leads, gammas = np.array([0.0, 2.0, 5.0]), np.array([0.0, 2.0, 4.0])  # the target takes longer than the draft
    [_, rates] = shared_rates(leads, gammas, costs, [Chances(0.6, 0.8)], rows=1)
    alone = tokens_per_second(leads, gammas, costs, token=0.8, head=0.6)
    # A lead is counted for the share of rounds that begin with one, not in each of them: the same time in the long run.
    np.testing.assert_allclose(rates, alone, rtol=0.01)


def test_nobody_drafting_is_plain_batched_decoding_whatever_the_plan() -> None:
    costs = Costs()
    costs.observe_target(8, 2.0)
    rates = shared_rates(np.array([0.0, 3.0]), np.array([0.0, 4.0]), costs, [Chances(0.5, 0.5)] * 4, rows=8)
    np.testing.assert_allclose(rates[0], 8 / 2.0, rtol=1e-6)


# --- load


def test_drafting_shrinks_smoothly_with_the_load_and_grows_back() -> None:
    world = crowd(1, ratio=7, token=0.8)
    up, down = [], []
    for count in (1, 2, 4, 8, 16):
        world.resize(count)
        world.round()
        up.append(drafted(world))
    for count in (16, 8, 4, 2, 1):
        world.resize(count)
        world.round()
        down.append(drafted(world))
    for amounts in (up, down[::-1]):
        assert all(fewer <= more + 0.3 for more, fewer in itertools.pairwise(amounts))
        assert amounts[-1] < 0.5 * amounts[0]
    assert down[-1] == pytest.approx(up[0], rel=0.25)


def test_a_slow_draft_serves_as_many_as_it_can() -> None:
    world = crowd(8, ratio=5, token=0.8)
    [world.round() for _ in range(10)]
    assert 0.1 < drafted(world) < 1.5


def test_a_draft_that_could_not_pay_if_it_were_always_right_is_hardly_ever_asked() -> None:
    world = crowd(8, ratio=2, token=0.95)
    assert 0 < sum(world.round().drafted > 0 for _ in range(1500)) <= 4


# --- who drafts


def test_the_request_whose_tokens_are_accepted_drafts() -> None:
    world = Crowd(World(ratio=3.5, noise=0.05), 4, 0, tokens=[0.1, 0.1, 0.95, 0.1])
    [world.round() for _ in range(40)]
    who = np.mean([world.round().who for _ in range(60)], axis=0)
    assert who[2] > 0.8
    assert max(who[[0, 1, 3]]) < 0.3


def test_equals_take_turns() -> None:
    world = crowd(8, ratio=2, token=0.8, width_cost=0.03)
    [world.round() for _ in range(20)]
    who = np.mean([world.round().who for _ in range(400)], axis=0)
    assert who.min() > 0
    assert who.max() < 2.5 * who.min()


def test_a_useless_draft_is_probed_for_all_requests_together() -> None:
    world = crowd(16, ratio=7, token=0.0)
    [world.round() for _ in range(60)]
    probing = [sum(world.round().who) for _ in range(640)]
    assert max(probing) == 1
    assert 6 <= sum(probing) <= 16


def test_drafting_resumes_when_acceptance_recovers() -> None:
    world = crowd(4, ratio=12, token=0.02)
    [world.round() for _ in range(80)]
    for request in world.requests:
        request.token = 0.95
    [world.round() for _ in range(80)]
    world.world = World(ratio=12, token=0.95)
    assert gain(world, 30) >= 1.5


# --- plans


def seats(count: int, policy: Policy, costs: Costs, behind: int = 0, drafts: int = 1) -> list[Seat]:
    return [Seat(GammaController(policy, costs, Acceptance()), 0, behind, i % drafts) for i in range(count)]


def known_costs(ratio: float) -> Costs:
    costs = Costs()
    costs.observe_target(1, 1.0)
    costs.observe_target(8, 1.1)
    costs.observe_draft(1, 1.0 / ratio)
    costs.observe_draft(4, 1.9 / ratio)
    return costs


def test_no_seat_is_no_plan() -> None:
    assert SharedBudget(Policy(), Costs()).plan([], rows=3) == []


def test_a_request_alone_is_planned_by_its_controller() -> None:
    costs = known_costs(7)
    [plan] = SharedBudget(Policy(), costs).plan(seats(1, Policy(), costs), rows=1)
    assert plan == GammaController(Policy(), costs, Acceptance()).plan()


def test_a_round_goes_by_the_draft_that_most_of_its_requests_use() -> None:
    quick, slow = known_costs(12), known_costs(0.5)
    budget = SharedBudget(Policy(), quick)
    few = budget.plan([*seats(3, Policy(), slow), *seats(1, Policy(), quick)], rows=4)
    assert budget.costs is slow
    many = budget.plan([*seats(1, Policy(), slow), *seats(3, Policy(), quick)], rows=4)
    assert budget.costs is quick
    assert sum(plan.gamma for plan in few) < sum(plan.gamma for plan in many)


def test_texts_that_take_more_of_the_drafts_tokens_are_drafted_less() -> None:
    costs = known_costs(4)
    usual, slow = seats(2, Policy(), costs), seats(2, Policy(), costs)
    for seat in slow:
        for _ in range(20):
            seat.controller.observe_pace(3.0)
    for planned, drafted in ((usual, True), (slow, False)):
        plans = SharedBudget(Policy(), costs).plan(planned, rows=2)
        assert any(plan.gamma > 0 for plan in plans) == drafted


def test_a_round_that_was_not_planned_here_teaches_nothing() -> None:
    policy, costs = Policy(), known_costs(7)
    budgets = [SharedBudget(policy, costs) for _ in range(2)]
    for budget in budgets:
        budget.plan(seats(4, policy, costs), rows=4)
    for _ in range(20):  # rounds of requests that do not draft: however long they take, nothing is learned of drafting
        budgets[1].plan([], rows=4, elapsed=None)
        budgets[1].plan([], rows=4, elapsed=50.0)
    first, second = (budget.plan(seats(4, policy, costs), rows=4, elapsed=None) for budget in budgets)
    assert first == second


@pytest.mark.parametrize("policy", [Policy(draft_budget=0), Policy(lead=0, overlap=False)])
def test_nothing_to_draft_is_plain_decoding(policy: Policy) -> None:
    costs = known_costs(7)
    for plan in SharedBudget(policy, costs).plan(seats(2, policy, costs), rows=2):
        assert (plan.lead, plan.gamma) == (0, 0)
        assert "configuration" in plan.reason


def test_without_fallback_all_draft() -> None:
    policy, costs = Policy(fallback=False), known_costs(0.5)
    plans = SharedBudget(policy, costs).plan(seats(6, policy, costs), rows=6)
    assert all(plan.gamma + plan.lead > 0 for plan in plans)


def test_a_fixed_budget_is_all_or_nothing() -> None:
    policy, costs = Policy(draft_budget=6, lead=0), known_costs(12)
    plans = SharedBudget(policy, costs).plan(seats(4, policy, costs), rows=4)
    assert {plan.gamma for plan in plans} <= {0, 6}


def test_the_reason_of_plain_decoding_names_the_gain_and_the_load() -> None:
    policy, costs = Policy(), known_costs(0.5)
    plans = SharedBudget(policy, costs).plan(seats(4, policy, costs), rows=5)
    assert any("x of plain decoding, 5 requests" in plan.reason for plan in plans)


def test_a_draft_far_behind_reads_one_request_at_a_time_beside_what_it_writes() -> None:
    policy, costs = Policy(draft_budget=4, lead=3), known_costs(40)
    behind = seats(3, policy, costs, behind=100)
    plans = SharedBudget(policy, costs).plan([*behind, *seats(1, policy, costs)], rows=4)
    assert [(plan.lead, plan.gamma) for plan in plans] == [(0, 0), (0, 0), (0, 0), (3, 4)]
    assert [plan.read > 0 for plan in plans] == [True, False, False, False]
    assert costs.draft_seconds(1 + plans[0].read) <= 1.2 * costs.target_seconds(4)


def test_a_draft_with_nothing_else_to_do_reads_more_at_once_but_not_more_than_there_is() -> None:
    policy, costs = Policy(draft_budget=4), known_costs(12)
    for behind, read in ((100, 64), (20, 20)):
        asking = seats(2, policy, costs, behind=behind, drafts=2)
        plans = SharedBudget(policy, costs).plan(asking, rows=2, drafts=2)
        assert [plan.read for plan in plans] == [read, read]


def test_who_has_to_read_much_is_not_waited_for_by_those_who_could_write() -> None:
    """There is no time for both in one pass: then all read what they can, and the target goes on alone."""
    policy, costs = Policy(draft_budget=4), known_costs(4)
    asking = [*seats(1, policy, costs, behind=50), *seats(1, policy, costs, behind=2)]
    plans = SharedBudget(policy, costs).plan(asking, rows=2)
    assert [(plan.gamma, plan.lead, plan.read) for plan in plans] == [(0, 0, 50), (0, 0, 2)]


def test_a_draft_at_work_for_an_earlier_round_is_asked_for_nothing() -> None:
    policy, costs = Policy(draft_budget=4), known_costs(12)
    busy = [replace(seat, busy=True, draft="busy") for seat in seats(2, policy, costs)]
    plans = SharedBudget(policy, costs).plan([*busy, *seats(1, policy, costs)], rows=4, drafts=2, busy=True)
    assert [(plan.gamma > 0, plan.reason) for plan in plans[:2]] == [(False, "draft is busy")] * 2
    assert plans[2].gamma == 4


def test_without_overlap_a_probe_is_a_short_lead() -> None:
    policy, costs = Policy(overlap=False), known_costs(1)
    budget = SharedBudget(policy, costs)
    asking = seats(3, policy, costs)
    for seat in asking:
        for _ in range(50):
            seat.controller.acceptance.observe(1, 0, False)
    plans = [plan for _ in range(400) for plan in budget.plan(asking, rows=3)]
    assert {(plan.lead, plan.gamma) for plan in plans} == {(0, 0), (2, 0)}


def test_where_drafting_could_not_pay_rounds_are_hardly_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    rates = budget_module.shared_rates
    monkeypatch.setattr(budget_module, "shared_rates", lambda *given, **how: planned.append(1) or rates(*given, **how))
    world = crowd(8, ratio=2, token=0.95)
    [world.round() for _ in range(200)]
    assert 0 < len(planned) < 80
    planned.clear()
    world.resize(7)  # another number of requests is looked at anew
    world.round()
    assert planned


def test_the_same_observations_give_the_same_plans() -> None:
    runs = []
    for _ in range(2):
        world = crowd(5, ratio=7, token=0.7)
        runs.append([world.round() for _ in range(40)])
    assert runs[0] == runs[1]
