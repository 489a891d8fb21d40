"""The coordinator under many requests, over scripted actors: full passes, order, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest
import ray

from duo_ray.actors.coordinator import Coordinator, Load
from duo_ray.core.gamma import Policy
from duo_ray.types import Delta, Finished, Request, SamplingParams
from tests.actors.scripted_actors import ScriptedDraftActor, ScriptedTargetActor, coordinator_settings

pytestmark = pytest.mark.ray

SLOTS = 4
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def models(cluster):
    target = ray.remote(ScriptedTargetActor).options(num_cpus=0).remote(SLOTS, 0.02)
    drafts = [ray.remote(ScriptedDraftActor).options(num_cpus=0).remote(0.002) for _ in range(2)]
    return target, drafts


@pytest.fixture
def settings(demo_target):
    return coordinator_settings(demo_target)


def request(name, *, tokens=20, prompt=(3, 4, 5), sampling=GREEDY, **options):
    return Request(str(name), tuple(prompt), sampling, tokens, ignore_eos=True, **options)


async def read(coordinator, wanted):
    """(id, logprobs) of every token and the end of one answer; the end is None when it was cancelled."""
    tokens, end = [], None
    async for message in coordinator.generate(wanted):
        if isinstance(message, Finished):
            end = message
        else:
            tokens += [(token.id, token.logprobs) for token in message.tokens]
    return tokens, end


def run(scenario, settings, models):
    """`scenario(coordinator)` in a fresh event loop; then nothing may be held anywhere."""
    target, drafts = models

    async def whole():
        coordinator = Coordinator(settings, target, drafts)
        await coordinator.start()
        ray.get([actor.calls.remote() for actor in (target, *drafts)])
        try:
            result = await scenario(coordinator)
            assert coordinator.load() == Load(running=0, queued=0)
            # A release travels behind the calls it follows: ask over the same connections.
            await read(coordinator, request("last", tokens=1))
        finally:
            await coordinator.close()
        return result

    result = asyncio.run(asyncio.wait_for(whole(), 240))
    # A release of the draft that "last" did not go to may still wait behind a job of a request that has ended.
    deadline = time.monotonic() + 60
    while not set.union(*(held := [ray.get(actor.held.remote()) for actor in (target, *drafts)])) <= {"last"}:
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
    for actor in (target, *drafts):
        ray.get(actor.release.remote("last"))
    return result


def passes(models):
    return [[name for name, _ in call] for call in ray.get(models[0].calls.remote())]


@pytest.mark.parametrize("draft", [False, True])
def test_passes_hold_the_blocks_of_all_requests(draft, settings, models):
    async def scenario(coordinator):
        wanted = [request(i, prompt=(3, 4, i), draft=draft) for i in range(SLOTS)]
        return await asyncio.gather(*(read(coordinator, each) for each in wanted))

    answers = run(scenario, settings, models)
    calls = [call for call in passes(models) if call != ["last"]]
    steps = max(end.stats["target_steps"] for _, end in answers)
    assert len(calls) <= steps + 3  # the first ones may come in one after the other
    assert sum(len(call) == SLOTS for call in calls) >= min(end.stats["target_steps"] for _, end in answers) - 3


def test_equal_streams_get_equal_numbers_of_steps(settings, models):
    async def scenario(coordinator):
        wanted = [request(i, prompt=(3, 4, i), draft=False) for i in range(3 * SLOTS)]
        return await asyncio.gather(*(read(coordinator, each) for each in wanted))

    answers = run(scenario, settings, models)
    assert {end.stats["target_steps"] for _, end in answers} == {20}


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=1.0, seed=5, logprobs=2)],
    ids=["greedy", "sampled"],
)
def test_a_text_under_load_is_the_text_alone(sampling, settings, models):
    """Cases 12 and 21: scripted models round nothing, so that not one token or logprob may differ."""

    async def scenario(coordinator):
        wanted = [
            request(i, prompt=[*range(3), i], sampling=sampling, tokens=25, reproducible=not sampling.greedy)
            for i in range(2 * SLOTS)
        ]
        alone = [await read(coordinator, each) for each in wanted[:3]]
        at_once = await asyncio.gather(*(read(coordinator, each) for each in wanted))
        return alone, at_once

    alone, at_once = run(scenario, settings, models)
    assert [tokens for tokens, _ in at_once[:3]] == [tokens for tokens, _ in alone]
    assert any(end.stats["accepted_tokens"] for _, end in at_once)
    assert all(len(logprobs.top) == 2 for tokens, _ in at_once for _, logprobs in tokens)


def test_requests_get_their_slots_in_the_order_they_came(settings, models):
    async def scenario(coordinator):
        order = []

        async def first_token(i):
            async for message in coordinator.generate(request(i, tokens=3 + 5 * (i % 2), draft=False)):
                if isinstance(message, Delta) and i not in order:
                    order.append(i)

        readers = []
        for i in range(3 * SLOTS):
            readers.append(asyncio.create_task(first_token(i)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert coordinator.load() == Load(running=SLOTS, queued=2 * SLOTS)
        await asyncio.gather(*readers)
        return order

    assert run(scenario, settings, models) == list(range(3 * SLOTS))


def test_a_long_prompt_is_prefilled_between_the_steps_of_a_stream(settings, models):
    async def scenario(coordinator):
        stream = asyncio.create_task(read(coordinator, request("stream", tokens=60, draft=False)))
        await asyncio.sleep(0.1)
        long = request("long", prompt=[i % 15 for i in range(300)], tokens=2, draft=False)
        await asyncio.gather(stream, read(coordinator, long))

    run(scenario, settings, models)
    together = [call for call in passes(models) if "long" in call]
    assert len(together) >= 300 / settings.chunk
    assert all("stream" in call for call in together)


async def _abandon(coordinator, wanted, after, how):
    """Read a stream for `after` seconds, then go."""
    stream = coordinator.generate(wanted)

    async def reading():
        async for _ in stream:
            pass

    reader = asyncio.create_task(reading())
    await asyncio.sleep(after)
    if how == "cancel":
        await coordinator.cancel(wanted.request_id)
    else:
        reader.cancel()
    await asyncio.wait([reader])
    await stream.aclose()
    if how == "cancel":
        assert reader.exception() is None


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_300_quick_cancels_leave_nothing_behind(how, settings, models):
    """Case 18: queued, in their prefill, between steps, in a pass, with and without a draft."""

    async def scenario(coordinator):
        rng = random.Random(how)
        for batch in range(15):
            await asyncio.gather(
                *(
                    _abandon(
                        coordinator,
                        request(f"{batch}.{i}", tokens=100, prompt=[1] * rng.choice((3, 90)), draft=i % 2 == 0),
                        rng.uniform(0, 0.15),
                        how,
                    )
                    for i in range(20)
                )
            )
        return await asyncio.gather(*(read(coordinator, request(i)) for i in range(SLOTS)))

    assert len({tuple(tokens) for tokens, _ in run(scenario, settings, models)}) == 1


def test_a_queued_request_whose_stream_is_closed_gives_up_its_place(settings, models):
    async def scenario(coordinator):
        busy = [asyncio.create_task(read(coordinator, request(i, tokens=40))) for i in range(SLOTS)]
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(_abandon(coordinator, request("gone"), 0.02, "close"))
        await asyncio.sleep(0.01)
        assert coordinator.load() == Load(running=SLOTS, queued=1)
        await waiting
        assert coordinator.load() == Load(running=SLOTS, queued=0)
        await asyncio.gather(*busy)

    run(scenario, settings, models)
    assert not any("gone" in call for call in passes(models))


def test_a_draft_at_work_for_a_cancelled_request_is_told_at_once_and_not_for_one_that_ends(settings, models):
    draft = ray.remote(ScriptedDraftActor).options(num_cpus=0).remote(0.2)

    async def scenario(coordinator):
        await read(coordinator, request("ends", tokens=12))
        reader = asyncio.create_task(read(coordinator, request("cancelled", tokens=300, draft_budget=8)))
        while not any("cancelled" in str(call) for call in ray.get(draft.calls.remote())):
            await asyncio.sleep(0.01)
        await coordinator.cancel("cancelled")
        await reader
        told = ray.get(draft.abandoned.remote())
        while ray.get(draft.held.remote()):  # a scripted one works to the end
            await asyncio.sleep(0.1)
        return told

    always = replace(settings, policy=Policy(fallback=False))
    assert run(scenario, always, (models[0], [draft])) == ["cancelled"]


def test_cancelling_while_the_target_restarts_does_not_wait_for_it(settings, cluster, tmp_path):
    once = str(tmp_path / "once")
    target = ray.remote(ScriptedTargetActor).options(num_cpus=0, max_restarts=-1).remote(SLOTS, 0.02, once)

    async def scenario():
        coordinator = Coordinator(settings, target, [])
        await coordinator.start()
        readers = [asyncio.create_task(read(coordinator, request(i, tokens=300))) for i in range(2)]
        await asyncio.sleep(0.2)
        target.die.remote()
        await asyncio.sleep(1.0)
        assert coordinator.load().running == 2
        await coordinator.cancel("0")
        tokens, end = await asyncio.wait_for(readers[0], 5)
        assert tokens
        assert end is None
        assert coordinator.load() == Load(running=1, queued=0)
        tokens, end = await readers[1]  # the other one goes on when the target is back
        assert len(tokens) == 300
        assert end.stats["target_losses"] == 1
        await coordinator.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 240))
    finally:
        ray.kill(target)


def test_a_target_that_gains_by_it_is_told_when_no_draft_works_and_its_times_are_kept_apart(models, settings):
    target = ray.remote(ScriptedTargetActor).options(num_cpus=0).remote(SLOTS, 0.02, None, 0.008)

    async def one_after_the_other(coordinator):
        await read(coordinator, request("alone", tokens=12, draft=False))
        alone = ray.get(target.alone.remote())
        await read(coordinator, request("led", tokens=40, draft_budget=4))
        return alone, ray.get(target.alone.remote()), coordinator.describe().measured

    alone, beside, measured = run(
        one_after_the_other, replace(settings, policy=Policy(fallback=False, lead=0)), (target, models[1])
    )
    assert alone == [True] * 12
    assert beside.count(False) > len(beside) / 2
    assert measured["alone"]["1"] < 0.75 * measured["target"]["1"]


def test_a_target_that_gains_nothing_by_it_is_never_told_to_use_the_drafts_cores(models, settings):
    target, _ = models

    async def without_draft(coordinator):
        ray.get(target.alone.remote())
        await read(coordinator, request("alone", tokens=5, draft=False))
        return ray.get(target.alone.remote()), coordinator.describe().measured

    alone, measured = run(without_draft, settings, models)
    assert alone == [False] * 5
    assert measured["alone"] == {}


def test_of_several_requests_one_that_drafts_is_enough_to_leave_the_drafts_their_cores(models, settings):
    target = ray.remote(ScriptedTargetActor).options(num_cpus=0).remote(SLOTS, 0.02, None, 0.008)

    async def together(coordinator):
        wanted = [request("b", tokens=60, draft=False), request("a", tokens=60, draft_budget=4)]
        wanted.append(request("c", tokens=60, draft=False))
        ray.get([actor.calls.remote() for actor in (target, *models[1])])
        ray.get(target.alone.remote())
        await asyncio.gather(*(read(coordinator, each) for each in wanted))
        return ray.get(target.alone.remote()), ray.get(target.calls.remote())

    alone, calls = run(together, replace(settings, policy=Policy(fallback=False, lead=0)), (target, models[1]))
    drafting = [flag for flag, call in zip(alone, calls, strict=True) if any(name == "a" for name, _ in call)]
    assert drafting.count(False) > 0.6 * len(drafting)
