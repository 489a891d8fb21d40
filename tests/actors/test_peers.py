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
from duo_ray.types import DuoRayError, SamplingParams, VerifyJob


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
