"""The coordinator's side of an actor, without Ray: what it knows of an actor that is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from duo_ray.actors.models import TargetLost
from duo_ray.actors.peers import TargetPeer
from duo_ray.core.context import IdLog
from duo_ray.metrics import Meter
from duo_ray.types import Context, DuoRayError, SamplingParams, Span, TargetReply, Verdict, VerifyJob


class DeadActor:
    """Every call finds that it will not come back."""

    def __getattr__(self, _name):
        async def remote(*_arguments):
            raise ActorDiedError

        return SimpleNamespace(remote=remote)


def test_a_target_that_will_not_come_back_is_unhealthy_with_the_reason():
    async def lose():
        peer = TargetPeer(DeadActor(), Meter(), limit=1, alone=lambda _: False, observe=lambda _: None)
        peer.check()
        with pytest.raises(TargetLost):
            await peer.verify(
                VerifyJob(IdLog((1,)).context("r", agreed=0, prompt_length=1), (), SamplingParams()), None
            )
        with pytest.raises(DuoRayError, match=r"gone for good: .*died"):
            await peer.returned()
        with pytest.raises(DuoRayError, match="gone for good"):
            peer.check()

    asyncio.run(lose())


class AnsweringTarget:
    """Tells how many tokens it ran, and whether it had the spare cores."""

    def __init__(self, tokens):
        self._tokens = tokens
        self.lent = []

    @property
    def verify(self):
        async def remote(jobs, _picks, alone, *_probs):
            self.lent.append(alone)
            verdicts = tuple(Verdict(job.context.request_id, 0, 5) for job in jobs)
            return TargetReply(verdicts, Span(0.0, 0.1), self._tokens)

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize(
    ("agreed", "ids", "block", "tokens", "width", "observed"),
    [
        (40, (7,), (), 1, 1, True),
        (40, (7, 8, 9), (), 1, 1, True),  # 7 and 8 were a block that it accepted
        (40, (7, 8, 9), (1, 2), 3, 3, True),
        (40, (7, 8, 9), (1, 2), 5, 3, False),  # it had lost something
        (0, tuple(range(40)), (), 16, 16, False),
        (0, tuple(range(9)), (), 9, 9, False),
        (40, (), (), 16, 16, False),  # the prompt goes on
    ],
)
def test_a_pass_is_as_wide_as_what_the_target_does_not_hold(agreed, ids, block, tokens, width, observed):
    asked, seen = [], []
    target = AnsweringTarget(tokens)

    async def verify():
        peer = TargetPeer(target, Meter(), limit=1, alone=lambda n: bool(asked.append(n)), observe=seen.append)
        context = Context("r", agreed, 0, ids, 40)
        await peer.verify(VerifyJob(context, block, SamplingParams(), chunk=16), None)

    asyncio.run(verify())
    assert asked == [width]
    assert bool(seen) is observed
