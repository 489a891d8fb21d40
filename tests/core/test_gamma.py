"""The controller against a simulated loop whose best fixed choice is known exactly."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from duo_ray.core.acceptance import Acceptance
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import PROBE, GammaController, Plan, Policy, tokens_per_second
from tests.core.loop_simulation import Loop, Step, World, best_plan, calibrated, earned, known, plain_rate, rate

RATIOS = (2.0, 3.5, 7.0, 12.0, 24.0, 40.0)
ACCEPTANCES = (0.05, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97, 1.0)


def start(world: World, seed: int, policy: Policy | None = None) -> tuple[Loop, GammaController, Costs]:
    costs = calibrated(world)
    return Loop(world, seed), GammaController(policy or Policy(), costs, Acceptance()), costs


@cache
def best_rate(ratio: float, token: float) -> float:
    world = World(ratio=ratio, token=token)
    return rate(world, best_plan(world))


def share_of_best(steps: list[Step], world: World, best: float) -> float:
    rates = {plan: rate(world, plan) for plan in {step.plan for step in steps}}
    return float(np.mean([rates[step.plan] for step in steps])) / best


def slower_target(factor: float) -> World:
    return World(target=lambda n: factor * (1.0 + 0.015 * (n - 1)))


# --- the model of the loop


@pytest.mark.parametrize(
    ("ratio", "token", "published", "sequential", "lead"),
    [
        (3.5, 0.65, 1.49, 1.30, 1.51),
        (7, 0.8, 2.37, 2.06, 2.48),
        (12, 0.65, 1.65, 1.82, 1.92),
        (12, 0.9, 4.05, 3.44, 4.29),
        (24, 0.8, 2.50, 2.96, 3.12),
    ],
)
def test_the_published_loop_loses_to_a_lead_as_designed(
    ratio: float, token: float, published: float, sequential: float, lead: float
) -> None:
    world = World(ratio=ratio, token=token)
    assert max(rate(world, Plan(0, g, True, "")) for g in range(1, 33)) == pytest.approx(published, rel=0.02)
    assert max(rate(world, Plan(n, 0, False, "")) for n in range(1, 33)) == pytest.approx(sequential, rel=0.02)
    assert rate(world, best_plan(world)) == pytest.approx(lead, rel=0.02)


@pytest.mark.parametrize(
    "plan", [Plan(0, 7, True, ""), Plan(2, 7, True, ""), Plan(5, 0, False, ""), Plan(3, 2, True, "")]
)
def test_the_simulated_loop_earns_what_the_formula_says(plan: Plan) -> None:
    world = World(ratio=7, token=0.8, head=0.6, overhead=0.05)
    loop = Loop(world, seed=1)
    assert earned([loop.step(plan) for _ in range(5000)]) == pytest.approx(rate(world, plan), rel=0.03)


@pytest.mark.parametrize(("token", "head"), [(0.0, 0.5), (0.3, 0.9), (0.8, 0.6), (1.0, 0.7), (1.0, 1.0)])
def test_tokens_per_second_is_the_exact_rate_of_the_chain(token: float, head: float) -> None:
    world = World(ratio=7, token=token, head=head, overhead=0.05)
    costs = Costs()
    for tokens in (1, 2, 3, 6, 8):
        for _ in range(20):
            costs.observe_target(tokens, world.target(tokens))
    costs.observe_draft(1, world.draft(1))
    costs.observe_overhead(world.overhead, drafting=True)
    leads, gammas = np.array([0.0, 2.0, 5.0]), np.array([0.0, 2.0, 8.0])
    table = tokens_per_second(leads, gammas, costs, token=token, head=head)
    exact = [[rate(world, Plan(int(n), int(g), g > 0, "")) for g in gammas] for n in leads]
    np.testing.assert_allclose(table, exact, rtol=0.01)


# --- what the controller earns


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("token", ACCEPTANCES)
def test_after_20_steps_the_choices_are_within_5_percent_of_the_best(ratio: float, token: float) -> None:
    world = World(ratio=ratio, token=token, noise=0.05)
    steps: list[Step] = []
    for seed in range(3):
        loop, controller, costs = start(world, seed)
        steps += list(loop.run(controller, costs, 80))[20:]
    assert share_of_best(steps, world, best_rate(ratio, token)) >= 0.95


@pytest.mark.parametrize("ratio", [2.0, 7.0, 24.0])
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations((0.05, 0.3, 0.65, 0.97), 2)])
def test_a_change_of_acceptance_is_followed_within_20_steps(ratio: float, before: float, after: float) -> None:
    world, changed = World(ratio=ratio, token=before, noise=0.05), World(ratio=ratio, token=after, noise=0.05)
    steps: list[Step] = []
    for seed in range(200, 220):
        loop, controller, costs = start(world, seed)
        list(loop.run(controller, costs, 60))
        loop.world = changed
        steps += list(loop.run(controller, costs, 80))[20:]
    assert share_of_best(steps, changed, best_rate(ratio, after)) >= 0.95


@pytest.mark.parametrize("token", [0.3, 0.65, 0.9])
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations((2.0, 7.0, 24.0), 2), (7.0, 0.5)])
@pytest.mark.parametrize("which", ["draft", "target"])
def test_a_change_of_speed_is_followed_within_20_steps(token: float, before: float, after: float, which: str) -> None:
    world = World(ratio=before, token=token, noise=0.05)
    factor = after / before if which == "target" else 1.0
    changed = World(ratio=after, token=token, noise=0.05, target=slower_target(factor).target)
    steps: list[Step] = []
    for seed in range(2):
        loop, controller, costs = start(world, seed)
        list(loop.run(controller, costs, 60))
        loop.world = changed
        steps += list(loop.run(controller, costs, 60))[20:]
    assert share_of_best(steps, changed, best_rate(after, token) / factor) >= 0.95


@pytest.mark.parametrize("ratio", [0.5, *RATIOS])
@pytest.mark.parametrize("token", [0.0, 0.05, 0.15])
def test_a_useless_draft_costs_under_3_percent_of_a_run(ratio: float, token: float) -> None:
    world = World(ratio=ratio, token=token, noise=0.05)
    for seed in range(3):
        loop, controller, costs = start(world, seed)
        assert earned(list(loop.run(controller, costs, 150))) >= 0.97 * plain_rate(world)


@pytest.mark.parametrize("ratio", [1.2, 2.0, 7.0])
@pytest.mark.parametrize("token", [0.15, 0.3, 0.5, 0.65])
def test_what_drafting_adds_to_the_overhead_is_found_out_and_counts(ratio: float, token: float) -> None:
    world = World(ratio=ratio, token=token, noise=0.05, overhead=0.1, extra=0.2)
    runs = []
    for seed in range(3):
        costs = calibrated(world, overheads=False)
        loop, controller = Loop(world, seed), GammaController(Policy(), costs, Acceptance())
        runs.append(list(loop.run(controller, costs, 150)))
    assert earned([*itertools.chain(*runs)]) >= 0.97 * plain_rate(world)
    late = [step for steps in runs for step in steps[40:]]
    assert share_of_best(late, world, rate(world, best_plan(world))) >= 0.95


# --- a target that has the drafts' cores, too, while no draft works


@pytest.mark.parametrize("plan", [Plan(0, 7, True, ""), Plan(5, 0, False, ""), Plan(3, 2, True, "")])
def test_the_rates_of_a_target_that_spreads_are_those_of_the_chain(plan: Plan) -> None:
    world = World(ratio=7, token=0.8, head=0.6, overhead=0.05, spread=1.9)
    costs = calibrated(world)
    table = tokens_per_second(np.array([plan.lead]), np.array([plan.gamma]), costs, token=0.8, head=0.6)
    assert float(table[0, 0]) == pytest.approx(rate(world, plan), rel=0.02)


@pytest.mark.parametrize("spread", [1.2, 1.9])
@pytest.mark.parametrize("ratio", [2.0, 7.0, 24.0])
@pytest.mark.parametrize("token", [0.05, 0.3, 0.65, 0.9])
def test_of_a_target_that_spreads_nothing_is_lost_and_nearly_all_is_got(
    spread: float, ratio: float, token: float
) -> None:
    world = World(ratio=ratio, token=token, noise=0.05, spread=spread)
    runs = []
    for seed in range(3):
        loop, controller, costs = start(world, seed)
        runs.append(list(loop.run(controller, costs, 150)))
    assert earned([*itertools.chain(*runs)]) >= 0.97 * plain_rate(world)
    late = [step for steps in runs for step in steps[30:]]
    assert share_of_best(late, world, rate(world, best_plan(world))) >= 0.95


def test_a_target_that_spreads_is_probed_by_the_best_plan_at_the_price_of_one_percent() -> None:
    world = World(ratio=7, token=0.02, spread=1.9)
    loop, controller, costs = start(world, 0)
    steps = list(loop.run(controller, costs, 600))[100:]
    probes = [step.plan for step in steps if step.plan.reason == PROBE]
    assert len(probes) >= 2
    assert {(plan.lead, plan.gamma) for plan in probes} == {(1, 0)}
    assert earned(steps) >= 0.985 * plain_rate(world)


@pytest.mark.parametrize("spread", [1.0, 1.9])
def test_a_probe_costs_what_the_draft_has_to_read_before_it(spread: float) -> None:
    costs = calibrated(World(ratio=7, token=0.02, spread=spread))
    for _ in range(5):
        costs.observe_draft(64, 8.0)
    plain = costs.target_seconds(1, alone=True)
    paid = 0
    for behind in (1, 64):
        controller = GammaController(Policy(), costs, known(0.02, 0.02))
        plans = [controller.plan(behind=behind) for _ in range(2000)]
        led = sum(plan.reason == PROBE and plan.lead > 0 for plan in plans)
        assert any(plan.reason == PROBE for plan in plans)
        if behind == 64:
            assert led * 7.0 <= 0.02 * 2000 * plain
            assert led < paid / 5
        paid = led


def test_what_was_saved_up_for_probes_is_there_for_the_next_request() -> None:
    """In answers of 20 tokens none could save up enough for itself."""
    loop, _, costs = start(World(ratio=2, token=0.02, spread=1.5), 0)
    for pool, some in ((known(0.02, 0.02, 60), True), (None, False)):
        plans = []
        for _ in range(20):
            controller = GammaController(Policy(), costs, pool or known(0.02, 0.02, 60))
            plans += [step.plan for step in loop.run(controller, costs, 20)]
        assert any(plan.reason == PROBE for plan in plans) is some


def test_what_was_saved_up_for_a_dear_probe_is_there_for_the_next_request() -> None:
    """After a long prompt; in an answer of 40 tokens no request could save up enough for itself."""
    costs = calibrated(World(ratio=2, token=0.02, spread=1.5))
    for _ in range(5):
        costs.observe_draft(64, 4.0)
    pool, probes = known(0.02, 0.02, 60), 0
    for _ in range(60):
        controller = GammaController(Policy(), costs, pool)
        plans = [controller.plan(behind=64 + i) for i in range(40)]
        probes += sum(plan.reason == PROBE for plan in plans)
    assert 1 <= probes <= 60 * 40 * 0.02


@pytest.mark.parametrize("ratio", [3.0, 7.0])
def test_a_draft_that_earns_less_than_it_slows_the_target_down_is_given_up(ratio: float) -> None:
    world = World(ratio=ratio, token=0.05, noise=0.05, contention=1.08)
    for seed in range(3):
        shares = []
        for policy in (Policy(contention=0.08), Policy()):
            loop, controller, costs = start(world, seed, policy)
            shares.append(earned(list(loop.run(controller, costs, 150))) / plain_rate(world))
        knowing, unknowing = shares
        assert unknowing < 0.97
        assert knowing >= 0.97


def test_a_concave_target_curve_with_overhead_and_pauses_is_no_obstacle() -> None:
    world = World(
        ratio=7,
        token=0.8,
        overhead=0.1,
        noise=0.1,
        pauses=0.02,
        target=lambda n: float(np.interp(n, [1, 8, 32, 65], [0.081, 0.168, 0.2, 0.25])) / 0.081,
    )
    steps: list[Step] = []
    for seed in range(4):
        loop, controller, costs = start(world, seed)
        steps += list(loop.run(controller, costs, 100))[20:]
    assert share_of_best(steps, world, rate(world, best_plan(world))) >= 0.95


def test_acceptance_that_falls_along_a_block_is_no_obstacle() -> None:
    world = World(ratio=12, token=0.0, head=0.7, noise=0.05, by_position=lambda i: 0.95 * 0.93**i)
    steps: list[Step] = []
    for seed in range(4):
        loop, controller, costs = start(world, seed)
        steps += list(loop.run(controller, costs, 100))[20:]
    assert earned(steps) >= 0.95 * rate(world, best_plan(world))


def test_blocks_of_two_sequences_are_planned_by_the_tail_they_yield() -> None:
    world = World(ratio=12, token=0.8, head=0.9, noise=0.05, share=0.5)
    loop, controller, costs = start(world, 0)
    steps = list(loop.run(controller, costs, 120))[20:]
    assert share_of_best(steps, world, rate(world, best_plan(world))) >= 0.95


# --- plain decoding and back


def test_a_draft_slower_than_the_target_ends_plain() -> None:
    loop, controller, costs = start(World(ratio=0.5, token=0.9), 0)
    steps = list(loop.run(controller, costs, 100))
    assert sum(step.plan.gamma + step.plan.lead for step in steps) <= 3
    assert (steps[-2].plan.lead, steps[-2].plan.gamma, steps[-2].plan.overlap) == (0, 0, False)
    assert "x of plain decoding" in steps[-2].plan.reason


def test_a_draft_that_recovers_is_found_out_by_the_next_paid_probe() -> None:
    """Its first token tells, and takes a draft of half the target's speed one pass longer than the target.

    2% of the time pays for that once in 50 steps. At the 3% that plain decoding may lose it could not be found out in
    fewer than 33 steps.
    """
    loop, controller, costs = start(World(ratio=0.5, token=0.9), 0)
    list(loop.run(controller, costs, 100))
    loop.world = World(ratio=12, token=0.9)
    steps = list(loop.run(controller, costs, 100))
    first = next(i for i, step in enumerate(steps) if step.plan.reason == "auto")
    assert first <= 50
    assert all(step.plan.reason == "auto" for step in steps[first:])


def test_drafting_resumes_when_acceptance_recovers() -> None:
    loop, controller, costs = start(World(ratio=7, token=0.02), 0)
    assert next(reversed(list(loop.run(controller, costs, 120)))).plan.reason.startswith(("plain", "probe"))
    loop.world = World(ratio=7, token=0.9)
    assert [step.plan.reason for step in loop.run(controller, costs, 40)][20:] == ["auto"] * 20


def test_probes_back_off_and_fit_beside_the_target() -> None:
    loop, controller, costs = start(World(ratio=7, token=0.0), 0)
    steps = list(loop.run(controller, costs, 200))[100:]
    probes = [i for i, step in enumerate(steps) if step.plan.reason == "probe"]
    assert set(np.diff(probes)) == {6}
    assert all(loop.world.block_seconds(steps[i].plan.gamma) < loop.world.target(1) for i in probes)


def test_probes_that_cost_time_are_paid_from_two_percent() -> None:
    world = World(ratio=0.8, token=0.5)
    loop, controller, costs = start(world, 0)
    steps = list(loop.run(controller, costs, 1000))
    assert sum(step.plan.reason == "probe" for step in steps) >= 2
    assert sum(step.seconds - world.target(1) for step in steps) <= 0.021 * 1000 * world.target(1)


def test_without_overlap_a_probe_is_a_short_lead() -> None:
    loop, controller, costs = start(World(ratio=7, token=0.0), 0, Policy(overlap=False))
    probes = [step.plan for step in loop.run(controller, costs, 200) if step.plan.reason == "probe"]
    assert probes
    assert all(plan.lead in range(1, 5) and plan.gamma == 0 and not plan.overlap for plan in probes)


def test_a_probe_respects_a_fixed_budget() -> None:
    loop, controller, costs = start(World(ratio=7, token=0.0), 0, Policy(draft_budget=6))
    assert {step.plan.gamma for step in loop.run(controller, costs, 200)} == {0, 6}


def test_a_fast_draft_is_probed_with_a_lead_too() -> None:
    loop, controller, costs = start(World(ratio=24, token=0.0), 0)
    assert any(s.plan.reason == "probe" and s.plan.lead == 1 for s in loop.run(controller, costs, 200))


def test_a_probe_respects_a_fixed_lead_without_overlap() -> None:
    loop, controller, costs = start(World(ratio=7, token=0.0), 0, Policy(overlap=False, lead=3))
    assert {step.plan.lead for step in loop.run(controller, costs, 300)} == {0, 3}


def test_without_fallback_it_never_goes_plain() -> None:
    loop, controller, costs = start(World(ratio=0.5, token=0.05), 0, Policy(fallback=False))
    assert all(step.plan.gamma + step.plan.lead > 0 for step in loop.run(controller, costs, 60))


# --- plans


@pytest.mark.parametrize(("contention", "tried"), [(0.5, True), (0.7, False)])  # expected: 0.99 and 0.87 of plain
def test_a_fast_draft_is_not_given_up_by_a_guess_alone(contention: float, tried: bool) -> None:
    costs = calibrated(World(ratio=2.0))
    assert (GammaController(Policy(contention=contention), costs, Acceptance()).plan().reason == "auto") is tried
    experienced = GammaController(Policy(contention=contention), costs, known(0.8, 0.7))
    assert experienced.plan().reason != "auto"


def test_it_starts_from_the_published_ratio() -> None:
    world = World(ratio=9)
    assert GammaController(Policy(), calibrated(world), Acceptance()).plan().gamma == 9
    assert GammaController(Policy(gamma_scale=1.1), calibrated(world), Acceptance()).plan().gamma == 10
    assert GammaController(Policy(gamma_max=4), calibrated(world), Acceptance()).plan().gamma == 4


def test_before_any_measurement_the_target_is_taken_for_5_times_as_slow() -> None:
    costs = Costs()
    assert GammaController(Policy(), costs, Acceptance()).plan().gamma == 5
    costs.observe_draft(1, 0.002)
    assert costs.target_seconds(1) == pytest.approx(0.01)
    costs = Costs()
    costs.observe_target(1, 0.02)
    assert costs.draft_seconds(1) == pytest.approx(0.004)


def test_gamma_scale_moves_the_budget_in_its_direction() -> None:
    costs, acceptance = calibrated(World(ratio=12)), known(0.9, 0.9)
    low, middle, high = (
        GammaController(Policy(gamma_scale=scale, lead=0), costs, acceptance).plan().gamma for scale in (0.9, 1.0, 1.1)
    )
    assert low < middle < high


@pytest.mark.parametrize(
    ("policy", "lead", "gamma", "overlap"),
    [
        (Policy(draft_budget=6, lead=2), 2, 6, True),
        (Policy(draft_budget=6, lead=0, overlap=True), 0, 6, True),
        (Policy(draft_budget=6, overlap=False), 6, 0, False),
        (Policy(draft_budget=6, lead=4, overlap=False), 4, 0, False),
        (Policy(draft_budget=40, lead=0, gamma_max=8), 0, 40, True),
    ],
)
def test_fixed_settings_leave_one_plan(policy: Policy, lead: int, gamma: int, overlap: bool) -> None:
    controller = GammaController(policy, calibrated(World(ratio=40)), known(0.95, 0.95))
    assert controller.plan() == Plan(lead, gamma, overlap, "fixed")


def test_overlap_alone_excludes_the_sequential_loop() -> None:
    loop, controller, costs = start(World(ratio=40, token=0.5, head=0.0), 0, Policy(overlap=True, fallback=False))
    assert all(step.plan.overlap and step.plan.gamma >= 1 for step in loop.run(controller, costs, 60))


def test_sequential_leads_stay_within_the_bounds_of_gamma() -> None:
    loop, controller, costs = start(World(ratio=12, token=0.9), 0, Policy(overlap=False, gamma_min=3, gamma_max=5))
    assert {step.plan.lead for step in loop.run(controller, costs, 40)} <= {3, 4, 5}


@pytest.mark.parametrize(
    "policy", [Policy(draft_budget=0), Policy(draft_budget=0, lead=3), Policy(lead=0, overlap=False)]
)
def test_nothing_to_draft_is_plain_decoding(policy: Policy) -> None:
    plan = GammaController(policy, calibrated(World()), Acceptance()).plan()
    assert (plan.lead, plan.gamma, plan.overlap) == (0, 0, False)
    assert "configuration" in plan.reason


def test_the_same_observations_give_the_same_plans() -> None:
    runs = []
    for _ in range(2):
        loop, controller, costs = start(World(ratio=7, token=0.7, noise=0.1, pauses=0.05), 3)
        runs.append([step.plan for step in loop.run(controller, costs, 100)])
    assert runs[0] == runs[1]


def test_equal_choices_do_not_flap() -> None:
    loop, controller, costs = start(World(ratio=7, token=0.8, noise=0.02), 0)
    plans = [step.plan for step in loop.run(controller, costs, 200)][50:]
    assert sum(a != b for a, b in itertools.pairwise(plans)) <= 30


def test_what_a_request_learns_is_shared_with_the_next() -> None:
    pooled = Acceptance()
    controller = GammaController(Policy(), calibrated(World()), pooled)
    for _ in range(30):
        controller.observe(proposed=4, accepted=0, bet_won=None, gamma=0, best_tail=None)
    assert pooled.token < 0.1
    assert GammaController(Policy(), calibrated(World()), pooled).acceptance.token == pooled.token


def test_a_request_does_not_see_what_others_learn_meanwhile() -> None:
    pooled = Acceptance()
    controller = GammaController(Policy(), calibrated(World()), pooled)
    pooled.observe(10, 0, None)
    assert controller.acceptance.token == Acceptance().token


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("draft_budget", -1),
        ("draft_budget", 65),
        ("gamma_scale", 1.2),
        ("gamma_min", 0),
        ("gamma_min", 33),
        ("gamma_max", 65),
        ("lead", -1),
        ("contention", -0.1),
    ],
)
def test_a_policy_out_of_range_is_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting}={value}"):
        Policy(**{setting: value})  # type: ignore[arg-type]


def test_a_draft_that_reads_several_ids_for_each_token_is_given_up_when_nothing_is_accepted() -> None:
    """Writing alone would fit beside the target's pass and cost nothing; reading and writing do not."""
    world = World(ratio=3.5)
    costs = calibrated(world)
    for width in (2, 4, 8):
        costs.observe_draft(width, world.draft(1) * width * 0.6)
    controllers = [GammaController(Policy(lead=0), costs, Acceptance()) for _ in range(2)]
    for controller, ids in zip(controllers, (1, 5), strict=True):
        for _ in range(10):
            controller.observe_reading(ids, 1)
            controller.observe(proposed=0, accepted=0, bet_won=False, gamma=3, best_tail=2)
    cheap, dear = (controller.plan() for controller in controllers)
    assert cheap.reason == "auto"
    assert dear.reason.startswith("plain") or dear.reason == "probe"


def test_what_a_draft_reads_after_plain_steps_counts_for_each_of_them() -> None:
    costs = calibrated(World(ratio=3.5))
    controllers = [GammaController(Policy(), costs, Acceptance()) for _ in range(2)]
    for controller, read, behind in zip(controllers, (1, 20), (1, 20), strict=True):
        for _ in range(6):
            controller.observe_reading(read, behind)
            controller.observe(proposed=2, accepted=2, bet_won=True, gamma=3, best_tail=2)
    assert controllers[0].plan() == controllers[1].plan()


def test_a_text_of_which_the_draft_needs_more_tokens_is_drafted_less_and_teaches_later_ones_little() -> None:
    costs, pooled = calibrated(World(ratio=8)), known(0.9, 0.9)
    usual, slow = (GammaController(Policy(), costs, pooled) for _ in range(2))
    for _ in range(10):
        usual.observe_pace(1.0)
        slow.observe_pace(3.0)
    assert 1 <= slow.plan().gamma < usual.plan().gamma
    assert slow.usual_tokens(4) == pytest.approx(12, abs=1)
    assert usual.usual_tokens(4) == 4
    next_one = GammaController(Policy(), costs, pooled)
    assert next_one.acceptance.pace < 1.7
    assert next_one.plan().gamma > slow.plan().gamma
