"""Streams of programs that died, without Ray."""

from __future__ import annotations

import asyncio

from deployments import callers
from deployments.callers import Callers


def test_only_streams_of_dead_jobs_are_ended(monkeypatch):
    monkeypatch.setattr(callers, "PERIOD_S", 0.01)
    dead, ended = {"01"}, []

    async def end(request_id):
        ended.append(request_id)

    async def watch():
        waiting = Callers(end, dead_jobs=lambda: dead)
        with waiting.waiting("first", "01"), waiting.waiting("second", "02"), waiting.waiting("third", "03"):
            while "first" not in ended:
                await asyncio.sleep(0.01)
            dead.add("03")
            while "third" not in ended:
                await asyncio.sleep(0.01)
        with waiting.waiting("fourth", "03"):  # after a while in which nobody waited
            while "fourth" not in ended:
                await asyncio.sleep(0.01)

    asyncio.run(watch())
    assert set(ended) == {"first", "third", "fourth"}
