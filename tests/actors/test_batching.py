"""Jobs wait together, fail alone, and may be given up."""

import asyncio

import pytest

from duo_ray.actors.batching import Batcher


def batcher(run, *, isolate=lambda _: True, limit=10):
    return Batcher(run, isolate=isolate, limit=limit)


def test_jobs_that_come_during_a_call_go_out_together_with_the_next():
    batches = []

    async def run(jobs):
        batches.append(list(jobs))
        await asyncio.sleep(0.01)
        return [job * 10 for job in jobs]

    async def scenario():
        b = batcher(run)
        first = asyncio.create_task(b.submit(1))
        await asyncio.sleep(0.001)
        return await asyncio.gather(first, b.submit(2), b.submit(3))

    assert asyncio.run(scenario()) == [10, 20, 30]
    assert batches == [[1], [2, 3]]


def test_no_call_takes_more_than_the_limit():
    sizes = []

    async def run(jobs):
        sizes.append(len(jobs))
        await asyncio.sleep(0)
        return jobs

    async def scenario():
        b = batcher(run, limit=2)
        await asyncio.gather(*(b.submit(i) for i in range(7)))

    asyncio.run(scenario())
    assert max(sizes) == 2
    assert sum(sizes) == 7


def test_one_jobs_fault_stays_its_own():
    async def run(jobs):
        await asyncio.sleep(0.001)
        if "bad" in jobs:
            raise ValueError("bad")
        return jobs

    async def scenario():
        b = batcher(run)
        first = asyncio.create_task(b.submit("first"))
        await asyncio.sleep(0)
        return await asyncio.gather(first, b.submit("good"), b.submit("bad"), b.submit("fine"), return_exceptions=True)

    first, good, bad, fine = asyncio.run(scenario())
    assert (first, good, fine) == ("first", "good", "fine")
    assert isinstance(bad, ValueError)


def test_the_loss_of_the_callee_is_everybodys():
    calls = []

    async def run(jobs):
        calls.append(list(jobs))
        raise ConnectionError("gone")

    async def scenario():
        b = batcher(run, isolate=lambda error: not isinstance(error, ConnectionError))
        return await asyncio.gather(b.submit(1), b.submit(2), return_exceptions=True)

    results = asyncio.run(scenario())
    assert all(isinstance(result, ConnectionError) for result in results)
    assert calls == [[1, 2]]


def test_a_cancelled_job_is_not_sent_and_disturbs_no_other():
    sent = []

    async def run(jobs):
        sent.extend(jobs)
        await asyncio.sleep(0.01)
        return jobs

    async def scenario():
        b = batcher(run)
        first = asyncio.create_task(b.submit(1))
        await asyncio.sleep(0.001)
        given_up, last = asyncio.create_task(b.submit(2)), asyncio.create_task(b.submit(3))
        await asyncio.sleep(0.001)
        given_up.cancel()
        assert await last == 3
        assert await first == 1
        with pytest.raises(asyncio.CancelledError):
            await given_up

    asyncio.run(scenario())
    assert sent == [1, 3]


def test_jobs_of_different_groups_share_no_call_and_one_without_a_group_goes_alone():
    batches = []

    async def run(jobs):
        batches.append(list(jobs))
        await asyncio.sleep(0)
        return jobs

    async def scenario():
        b = Batcher(run, isolate=lambda _: True, limit=2, group=lambda job: None if job < 0 else job % 2)
        await asyncio.gather(*(b.submit(job) for job in (1, 2, -3, 5, 4, 7)))

    asyncio.run(scenario())
    assert batches == [[1, 5], [2, 4], [-3], [7]]
