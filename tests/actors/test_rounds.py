"""Members begin a round together; who is away, leads or goes does not stop the others for ever."""

from __future__ import annotations

import asyncio

import pytest

from duo_ray.actors.rounds import Rounds


class Log:
    """Rounds whose members are names; the leaders of every round are chosen in advance."""

    def __init__(self, leaders=()):
        self.begun = []
        self.leaders = set(leaders)
        self.rounds = Rounds(self._begin)

    def _begin(self, members):
        self.begun.append(sorted(members))
        return [member for member in members if member in self.leaders]


def test_a_round_begins_when_all_members_are_ready():
    async def scenario():
        log = Log()
        for name in "abc":
            log.rounds.enter(name)

        async def member(name, pauses):
            for pause in pauses:
                await asyncio.sleep(pause)
                await log.rounds.join(name)
            log.rounds.leave(name)

        await asyncio.gather(member("a", [0, 0.01]), member("b", [0.02, 0]), member("c", [0.01, 0]))
        return log.begun

    assert asyncio.run(scenario()) == [["a", "b", "c"], ["a", "b", "c"]]


def test_a_member_alone_never_waits():
    async def scenario():
        log = Log()
        log.rounds.enter("a")
        join = log.rounds.join("a")
        with pytest.raises(StopIteration):
            join.send(None)  # ended without handing control to the event loop

    asyncio.run(scenario())


def test_a_newcomer_joins_with_the_next_round():
    async def scenario():
        log = Log()
        log.rounds.enter("a")
        await log.rounds.join("a")  # its pass runs now
        log.rounds.enter("b")
        waiting = asyncio.create_task(log.rounds.join("b"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await asyncio.gather(log.rounds.join("a"), waiting)
        return log.begun

    assert asyncio.run(scenario()) == [["a"], ["a", "b"]]


def test_a_member_that_leaves_or_is_away_is_not_waited_for():
    async def scenario():
        log = Log()
        for name in "abc":
            log.rounds.enter(name)
        waiting = asyncio.create_task(log.rounds.join("a"))
        await asyncio.sleep(0)
        log.rounds.leave("b")
        await asyncio.sleep(0)
        assert not waiting.done()
        with log.rounds.away("c"):
            await waiting
        assert len(log.rounds) == 2
        return log.begun

    assert asyncio.run(scenario()) == [["a"]]


def test_a_cancelled_member_that_waited_is_gone_after_it_leaves():
    async def scenario():
        log = Log()
        for name in "ab":
            log.rounds.enter(name)
        waiting = asyncio.create_task(log.rounds.join("a"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        log.rounds.leave("a")
        await log.rounds.join("b")
        return log.begun

    assert asyncio.run(scenario()) == [["b"]]


@pytest.mark.parametrize("end", ["led", "leave", "away"])
def test_all_wait_for_a_lead_until_it_is_there_or_will_not_come(end):
    async def scenario():
        log = Log(leaders="b")
        for name in "ab":
            log.rounds.enter(name)
        await asyncio.gather(log.rounds.join("a"), log.rounds.join("b"))
        waiting = asyncio.create_task(log.rounds.all_led())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        if end == "away":
            with log.rounds.away("b"):
                await waiting
        else:
            getattr(log.rounds, end)("b")
            await waiting

    asyncio.run(asyncio.wait_for(scenario(), 10))
