"""Several quantisations of one draft over scripted actors, whose tables set the acceptance: which of them is used."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest
import ray

from duo_ray.actors.coordinator import Coordinator
from duo_ray.metrics import prometheus
from duo_ray.types import Finished, InvalidRequest, Request, SamplingParams
from tests.actors.scripted_actors import ScriptedDraftActor, ScriptedTargetActor, coordinator_settings

pytestmark = [pytest.mark.ray, pytest.mark.models]


@pytest.fixture(scope="module")
def start(demo_target):
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    settings = coordinator_settings(demo_target)

    def start(scenario, quants):
        """`scenario(coordinator)` with these quantisations; see `ScriptedDraftActor`."""

        async def whole():
            target = ray.remote(ScriptedTargetActor).options(num_cpus=0).remote(4, 0.02)
            draft = ray.remote(ScriptedDraftActor).options(num_cpus=0).remote(0.002, quants)
            coordinator = Coordinator(settings, target, [draft])
            await coordinator.start()
            try:
                return await scenario(coordinator)
            finally:
                await coordinator.close()
                ray.kill(target)
                ray.kill(draft)

        return asyncio.run(asyncio.wait_for(whole(), 240))

    yield start
    ray.shutdown()


async def ask(coordinator, number, **options):
    request = Request(str(number), (3, 4, number), SamplingParams(temperature=0.0), 24, ignore_eos=True, **options)
    *_, end = [item async for item in coordinator.generate(request)]
    assert isinstance(end, Finished)
    return end.stats


def test_the_better_one_is_found_at_the_start_and_kept(start):
    async def scenario(coordinator):
        return coordinator.describe(), [(await ask(coordinator, i))["draft_quant"] for i in range(12)]

    info, used = start(scenario, {"Q2_K": (1.0, 0.95), "Q8_0": (1.0, 0.0)})
    coarse, fine = info.precision
    assert (coarse.quant, coarse.in_use, fine.quant, fine.in_use) == ("Q2_K", False, "Q8_0", True)
    assert fine.token > coarse.token
    assert info.calibration["quant"] == "Q8_0"
    assert used.count("Q8_0") >= 11


def test_what_requests_show_moves_the_estimates_and_is_counted(start):
    async def scenario(coordinator):
        before = coordinator.describe().precision
        stats = [await ask(coordinator, i, draft_quant="Q4_0") for i in range(3)]
        return before, stats, coordinator.describe().precision, coordinator._meter

    before, stats, after, meter = start(scenario, {"Q8_0": (1.0, 0.1), "Q4_0": (1.0, 0.3)})
    assert {each["draft_quant"] for each in stats} == {"Q4_0"}
    assert before != after
    assert b'duo_ray_draft_quant_requests_total{model_name="",quant="Q4_0",replica=""} 3.0' in prometheus(
        [meter.figures()]
    )


def test_requests_with_different_ones_share_rounds(start):
    async def scenario(coordinator):
        wanted = [ask(coordinator, i, draft_quant=("Q8_0", "Q2_K")[i % 2]) for i in range(4)]
        return await asyncio.gather(*wanted)

    stats = start(scenario, {"Q8_0": (1.0, 0.0), "Q2_K": (1.0, 0.9)})
    assert [each["draft_quant"] for each in stats] == ["Q8_0", "Q2_K", "Q8_0", "Q2_K"]
    fine, coarse = ([each["accepted_tokens"] for each in stats[i::2]] for i in (0, 1))
    assert min(fine) > max(coarse)


def test_one_that_is_not_loaded_is_refused_by_name(start):
    async def scenario(coordinator):
        with pytest.raises(InvalidRequest, match="draft_quant='Q3_K_M' is not loaded; there are: Q8_0"):
            await ask(coordinator, 0, draft_quant="Q3_K_M")
        return coordinator.load()

    assert start(scenario, None).running == 0


def test_a_draft_that_fails_leaves_its_traceback_in_the_log(start, caplog):
    async def scenario(coordinator):
        return await ask(coordinator, 0)

    with caplog.at_level(logging.WARNING, "duo_ray.actors.run"):
        stats = start(scenario, {"Q8_0": (1.0, math.nan)})
    assert any(reason.startswith("draft failed") for reason in stats["plain_steps"])
    (record,) = (each for each in caplog.records if "goes on without a draft" in each.getMessage())
    assert record.exc_info is not None
