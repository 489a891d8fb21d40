"""Answers to processes that died, without Ray."""

from __future__ import annotations

import asyncio

import pytest
import ray

from deployments import callers
from deployments.callers import Callers
from duo_ray.types import InvalidRequest


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


def test_ray_that_cannot_tell_for_a_moment_is_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(callers, "PERIOD_S", 0.01)
    asked, ended = [], []

    def dead(_):
        asked.append(True)
        if len(asked) < 3:
            raise ConnectionError("the head restarts")
        return {("01", "node")}

    async def end(request_id):
        ended.append(request_id)

    async def watch():
        with Callers(end, dead=dead).waiting("first", ("01", "node")):
            while not ended:
                await asyncio.sleep(0.01)

    asyncio.run(watch())
    assert set(ended) == {"first"}
    assert "cannot be told now" in caplog.text


def test_an_id_in_use_is_refused_and_its_owner_is_watched_still():
    async def watch():
        waiting = Callers(lambda _: asyncio.sleep(0), dead=lambda _: ())
        with waiting.waiting("same", ("01", "node")):
            with pytest.raises(InvalidRequest, match="same is in use"), waiting.waiting("same", ("02", "node")):
                pass
            assert waiting._callers == {"same": ("01", "node")}
        assert not waiting._callers

    asyncio.run(watch())


def test_a_caller_is_gone_with_its_process_or_its_node(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "up", "Alive": True}, {"NodeID": "down", "Alive": False}])
    monkeypatch.setattr(callers, "_alive", lambda worker: worker != "killed")
    asked = {("well", "up"), ("killed", "up"), ("well", "down"), ("well", "not told yet")}
    assert callers._dead(asked) == {("killed", "up"), ("well", "down")}
