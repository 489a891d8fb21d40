"""Target and draft on different nodes: actor calls and the object store in place of the socket, and the same output."""

from __future__ import annotations

import os

import pytest
import ray
from ray.cluster_utils import Cluster

from duo_ray.config import load_config
from duo_ray.session import Duo
from duo_ray.types import DuoRayError
from tests.actors.conftest import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.models]


@pytest.fixture(scope="module")
def cluster():
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", running.address)
        try:
            yield running
        finally:
            ray.shutdown()
            running.shutdown()


def test_a_cluster_without_draft_nodes_is_an_error_that_names_what_is_missing(cluster, monkeypatch):
    monkeypatch.setattr("duo_ray.actors.launch.PLACEMENT_LIMIT_S", 3.0)
    with pytest.raises(DuoRayError, match="draft_cpu"):
        Duo(load_config(None, SMALL))
    assert not ray.is_initialized()


def test_a_draft_on_another_node_is_exact_too(cluster, reference):
    cluster.add_node(num_cpus=1, resources={"draft_cpu": 1})
    with Duo(load_config(None, SMALL)) as duo:
        info = duo.pipeline.info
        assert info.drafts[0].node != info.target.node
        prompt = "Explain gravity to a child."
        (own,) = reference([duo.request(prompt).prompt], 32)
        answer = duo.generate(prompt, temperature=0.0, max_tokens=32, draft_budget=4)
        assert list(answer.token_ids) == own
        assert answer.stats["accepted_tokens"] > 0
        # Sampled: the draft's probabilities reach the target by reference.
        sampled = duo.generate(prompt, temperature=0.8, seed=4, max_tokens=32, draft_budget=4)
        assert sampled.stats["accepted_tokens"] > 0
        assert duo.generate(prompt, temperature=0.8, seed=4, max_tokens=32, draft_budget=4).text == sampled.text


def test_an_address_where_nobody_answers_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1"
    with pytest.raises(DuoRayError, match=r"127.0.0.1:1"):
        Duo(load_config(None, SMALL))
