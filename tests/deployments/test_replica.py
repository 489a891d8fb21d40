"""What a replica makes of the others' answers, without Ray."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deployments.replica import Replica
from duo_ray.config import load_config
from duo_ray.metrics import Meter


class Others:
    """A handle whose replicas answer a broadcast like this."""

    def __init__(self, outcome):
        self.outcome = outcome

    def broadcast(self, method):
        assert method == "own_figures"
        return self

    async def results_async(self, *, timeout_s, return_exceptions):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def shown(outcome, replicas=3):
    """Names of the replicas whose figures `replica-0` shows."""
    replica = Replica.__new__(Replica)
    replica.config = load_config(None, {"serving.replicas.max": replicas})
    replica._meter = Meter(replica="replica-0")
    replica._replicas = Others(outcome)
    return [each.replica for each in asyncio.run(replica.figures())]


def figures(name):
    return Meter(replica=name).figures()


def test_the_figures_are_those_of_all_replicas_each_once():
    assert shown([figures("replica-1"), figures("replica-0")]) == ["replica-0", "replica-1"]


def test_a_replica_that_dies_is_left_out():
    assert shown([RayActorError(), figures("replica-2")]) == ["replica-0", "replica-2"]


@pytest.mark.parametrize("failure", [TimeoutError(), RayServeException("no replica is known yet")])
def test_a_replica_alone_shows_its_own(failure):
    assert shown(failure) == ["replica-0"]


def test_where_there_is_one_replica_nobody_is_asked():
    assert shown(AssertionError("asked"), replicas=1) == ["replica-0"]
