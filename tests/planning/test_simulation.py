"""The simulated loop against arithmetic that can be done on paper, and against the stationary formula."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from duo_ray.core.gamma import Plan, Policy
from duo_ray.planning import Curve, Hardware, Text, Traffic, simulate, simulation
from duo_ray.planning.scenario import InvalidScenario
from duo_ray.planning.virtual_time import VirtualTime
from tests.core.loop_simulation import World, rate

STEADY = {"overhead": 0.0, "jitter": 0.0, "draft_prompt": 1e-6}


def hardware(ratio=7.0, **others):
    return Hardware(Curve({1: 0.07}, growth=0.015), Curve({1: 0.07 / ratio}, growth=0.3), **(STEADY | others))


@pytest.mark.parametrize(("width", "seconds"), [(1, 1.0), (2, 2.0), (3, 3.0), (6, 3.0), (0, 1.0)])
def test_a_curve_is_linear_between_its_points_and_goes_on_as_it_ended(width, seconds):
    assert Curve({1: 1.0, 3: 3.0, 5: 3.0})(width) == pytest.approx(seconds)


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: float("inf")}])
def test_a_curve_without_usable_points_is_refused(points):
    with pytest.raises(InvalidScenario, match="is no curve"):
        Curve(points)


@pytest.mark.parametrize("field", ["acceptance", "prompt_tokens", "answer_tokens", "decided"])
def test_a_text_out_of_range_is_refused_by_name(field):
    with pytest.raises(InvalidScenario, match=f"{field}=0"):
        Text(**{field: 0})


def test_the_target_alone_takes_one_pass_a_token():
    alone = simulate(hardware(), Text(prompt_tokens=1, answer_tokens=50), draft=False, traffic=Traffic(1))
    assert alone.seconds == pytest.approx(50 * 0.07)


def test_a_target_that_has_all_cores_while_no_draft_works_is_as_fast_as_that_without_a_useful_draft():
    machine = hardware(alone=Curve({1: 0.04}, growth=0.015))
    alone = simulate(machine, Text(prompt_tokens=1, answer_tokens=50), draft=False, traffic=Traffic(1))
    assert alone.seconds == pytest.approx(50 * 0.04)
    useless = simulate(machine, Text(acceptance=0.02, answer_tokens=300), traffic=Traffic(2))
    assert useless.decode_speed >= 0.97 / 0.04


def test_a_target_has_all_cores_only_in_passes_beside_which_no_draft_of_any_request_works(monkeypatch):
    passes, calls = [], []

    class Target(simulation._Target):
        async def _call(self, asked):
            began, alone = simulation.now(), self._world.alone is not None
            answers = await super()._call(asked)
            passes.append((began, simulation.now(), alone))
            return answers

    class Draft(simulation._Draft):
        async def _call(self, asked):
            began = simulation.now()
            answers = await super()._call(asked)
            calls.append((began, simulation.now()))
            return answers

    monkeypatch.setattr(simulation, "_Target", Target)
    monkeypatch.setattr(simulation, "_Draft", Draft)
    machine = hardware(ratio=5.0, alone=Curve({1: 0.065}, growth=0.015))
    simulate(machine, Text(acceptance=0.3, prompt_tokens=16, answer_tokens=60), traffic=Traffic(8, concurrency=4))
    alone = [(began, ended) for began, ended, had_all in passes if had_all]
    assert len(alone) >= 5
    assert not [(one, other) for one in alone for other in calls if other[0] < one[1] and other[1] > one[0]]


def test_a_prompt_is_read_in_chunks():
    machine = hardware(chunk=128)
    alone = simulate(machine, Text(prompt_tokens=300, answer_tokens=1), draft=False, traffic=Traffic(1))
    assert alone.time_to_first_token == pytest.approx(2 * machine.target(128) + machine.target(300 - 256))


@pytest.mark.parametrize(
    ("ratio", "acceptance", "plan"),
    [
        (7.0, 0.8, Plan(0, 7, True, "")),
        (7.0, 0.8, Plan(3, 8, True, "")),
        (3.5, 0.65, Plan(1, 4, True, "")),
        (12.0, 0.9, Plan(4, 12, True, "")),
        (12.0, 0.65, Plan(3, 0, False, "")),
    ],
)
def test_a_fixed_plan_earns_what_the_stationary_formula_says(ratio, acceptance, plan):
    policy = (
        Policy(lead=plan.lead, draft_budget=plan.gamma, overlap=True, fallback=False)
        if plan.overlap
        else Policy(lead=plan.lead, overlap=False, fallback=False)
    )
    text = Text(acceptance, prompt_tokens=1, answer_tokens=1500)
    simulated = simulate(hardware(ratio), text, policy, max_sequences=1, traffic=Traffic(3))
    world = World(ratio=ratio, token=acceptance)
    assert simulated.decode_speed * 0.07 == pytest.approx(rate(world, plan), rel=0.04)


def test_a_draft_that_knows_the_text_is_accepted_entirely():
    simulated = simulate(hardware(), Text(1.0, prompt_tokens=1, answer_tokens=200), traffic=Traffic(1))
    assert set(simulated.served[0].stats.as_dict()["acceptance_per_position"]) == {1.0}


def test_more_sequences_win_more_bets():
    text = Text(0.5, prompt_tokens=1, answer_tokens=500, decided=4.0)
    policy = Policy(draft_budget=12, lead=0, fallback=False)
    one, four = (simulate(hardware(), text, policy, max_sequences=n, traffic=Traffic(2)) for n in (1, 4))
    assert four.mean("mean_accepted") > one.mean("mean_accepted")


def test_the_first_token_does_not_wait_for_the_drafts_prompt_pass():
    machine, text = hardware(draft_prompt=0.05), Text(prompt_tokens=100, answer_tokens=40)
    alone = simulate(machine, text, draft=False, traffic=Traffic(1))
    duo = simulate(machine, text, traffic=Traffic(1))
    assert duo.time_to_first_token == pytest.approx(alone.time_to_first_token)
    assert duo.served[0].stats.reasons["draft is late"] > 0


def test_the_same_seed_gives_the_same_run():
    runs = [simulate(hardware(jitter=0.1), Text(), traffic=Traffic(2), seed=seed).seconds for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_concurrent_requests_share_a_pass():
    machine, text = hardware(), Text(prompt_tokens=1, answer_tokens=20)
    four = simulate(machine, text, draft=False, traffic=Traffic(4, concurrency=4))
    # The first to come begins alone, and ends one pass before the others.
    assert four.seconds == pytest.approx(machine.target(1) + 19 * machine.target(4) + machine.target(3))


def test_a_request_waits_for_a_slot_when_all_are_taken():
    machine, text = hardware(slots=1), Text(prompt_tokens=1, answer_tokens=10)
    two = simulate(machine, text, draft=False, traffic=Traffic(2, concurrency=2))
    assert two.waiting == pytest.approx([0.0, 0.7])


def test_a_second_draft_actor_helps_concurrent_requests():
    text = Text(0.9, prompt_tokens=1, answer_tokens=100)
    one, two = (
        simulate(hardware(4.0, draft_actors=n), text, traffic=Traffic(4, concurrency=4)).tokens_per_second
        for n in (1, 2)
    )
    assert two > one


def test_random_arrivals_come_at_the_rate_asked_for():
    simulated = simulate(
        hardware(slots=50), Text(prompt_tokens=1, answer_tokens=1), draft=False, traffic=Traffic(400, rate=5.0)
    )
    arrivals = [each.arrived for each in simulated.served]
    assert 400 / (max(arrivals) - min(arrivals)) == pytest.approx(5.0, rel=0.15)


def test_planning_needs_neither_ray_nor_a_tensor_library():
    loaded = "import sys, duo_ray.planning; print({'ray', 'torch', 'llama_cpp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_time_is_virtual_and_a_wait_without_end_is_an_error():
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        began = time.monotonic()
        runner.run(asyncio.sleep(1e6))
        assert time.monotonic() - began < 1e3
        with pytest.raises(RuntimeError, match="never happen"):
            runner.run(asyncio.Event().wait())


SLOW_READER = Hardware(
    Curve({1: 0.07, 4: 0.09, 8: 0.093, 16: 0.102, 32: 0.147}),
    Curve({1: 0.0255, 2: 0.036, 3: 0.048, 4: 0.058}),
    overhead=0.003,
    draft_prompt=0.01,
    jitter=0.08,
    slots=16,
)
"""Measured on two cores: the draft takes 40% of a token's time to read one."""


@pytest.mark.parametrize(("streams", "least"), [(2, 1.1), (3, 1.0), (4, 0.97), (6, 0.97), (8, 0.97), (16, 0.97)])
def test_streams_with_a_draft_that_reads_slowly_never_lose(streams, least):
    """Whoever begins to draft has its text read first: that is as much a cost of drafting as the blocks are."""
    text, traffic = Text(0.93, prompt_tokens=45, answer_tokens=64, decided=0.6), Traffic(streams, streams)
    gains = []
    for seed in range(3):
        ways = [simulate(SLOW_READER, text, draft=draft, traffic=traffic, seed=seed) for draft in (True, False)]
        gains.append(ways[0].tokens_per_second / ways[1].tokens_per_second)
    assert sum(gains) / len(gains) >= least
