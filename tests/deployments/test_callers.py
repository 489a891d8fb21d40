"""Answers to processes that died, without Ray."""

from __future__ import annotations

import asyncio

import ray

from deployments import callers
from deployments.callers import Callers


def test_only_what_the_dead_have_asked_for_is_ended(monkeypatch):
    monkeypatch.setattr(callers, "PERIOD_S", 0.01)
    gone, alive, going = ("01", "node"), ("02", "node"), ("03", "node")
    dead, ended = {gone}, []

    async def end(request_id):
        ended.append(request_id)

    async def watch():
        waiting = Callers(end, dead=lambda asked: dead & asked)
        with waiting.waiting("first", gone), waiting.waiting("second", alive), waiting.waiting("third", going):
            while "first" not in ended:
                await asyncio.sleep(0.01)
            dead.add(going)
            while "third" not in ended:
                await asyncio.sleep(0.01)
        with waiting.waiting("fourth", going):  # after a while in which nobody waited
            while "fourth" not in ended:
                await asyncio.sleep(0.01)

    asyncio.run(watch())
    assert set(ended) == {"first", "third", "fourth"}


def test_a_caller_is_gone_with_its_process_or_its_node(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "up", "Alive": True}, {"NodeID": "down", "Alive": False}])
    monkeypatch.setattr(callers, "_alive", lambda worker: worker != "killed")
    asked = {("well", "up"), ("killed", "up"), ("well", "down"), ("well", "not told yet")}
    assert callers._dead(asked) == {("killed", "up"), ("well", "down")}
