"""The application on a cluster of several nodes: a GPU node for the target, others for the drafts."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

import deployments
from duo_ray.models.catalog import resolve_target
from duo_ray.types import Finished
from tests.deployments.tiny_pair import PROMPT, tiny_pair

pytestmark = pytest.mark.ray

ASK = {"raw": True, "temperature": 0.0, "ignore_eos": True}
LONG = ASK | {"max_tokens": 2000}
"""Several seconds of work: long enough to lose a node in the middle of it."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield tiny_pair(folder) | {"optimization.draft_actors": 2}


@pytest.fixture(scope="module")
def cluster(settings):
    with ExitStack() as stack:
        running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        stack.callback(running.shutdown)
        running.add_node(num_cpus=1, num_gpus=1, resources={"target_gpu": 1})
        running.drafts = [running.add_node(num_cpus=1, resources={"draft_cpu": 1}) for _ in range(2)]
        ray.init(running.address, logging_level="ERROR")
        stack.callback(ray.shutdown)
        stack.callback(serve.shutdown)
        yield running


@pytest.fixture(scope="module")
def handle(cluster, settings):
    """The application. Its target asks for a GPU, as one on a GPU would, and computes on the CPU."""
    planned = deployments.plan_footprint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployments, "plan_footprint", lambda *given: replace(planned(*given), target_gpus=1))
        app = deployments.app(deployments.Arguments(**settings))
    serve.start(proxy_location="Disabled")
    return serve.run(app, route_prefix=None)


@pytest.fixture(scope="module")
def undisturbed(handle):
    """What the target alone says."""
    return handle.generate.remote(PROMPT, draft=False, **LONG).result(timeout_s=300)


def nodes_with(resource):
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)}


def pipeline(handle):
    return handle.describe.remote().result(timeout_s=60)["pipeline"]


def test_the_target_is_on_the_gpu_node_and_every_draft_on_a_node_of_its_own(handle):
    running = pipeline(handle)
    assert {running["target"]["node"]} == nodes_with("target_gpu")
    drafts = {draft["node"] for draft in running["drafts"]}
    assert len(drafts) == 2
    assert drafts == nodes_with("draft_cpu")
    assert ray.available_resources().get("GPU", 0) == 0
    assert running["target"]["device"] == "cpu"


def test_the_answer_is_the_targets_own(handle, settings):
    from transformers import AutoModelForCausalLM

    from duo_ray.models.tokenizer import Tokenizer
    from tests.models.tiny_transformers import own_greedy

    path = resolve_target(settings["models.target.model"]).path
    prompt = list(Tokenizer.load(path).encode(PROMPT))
    answer = handle.generate.remote(PROMPT, max_tokens=100, **ASK | {"ignore_eos": False}).result(timeout_s=120)
    assert answer["token_ids"] == own_greedy(AutoModelForCausalLM.from_pretrained(path), prompt, 100)
    assert answer["stats"]["accepted_tokens"] > 0


def test_a_sampled_request_brings_its_probabilities_over_to_the_target(handle):
    ask = {"raw": True, "temperature": 0.8, "seed": 4, "max_tokens": 60, "ignore_eos": True}
    first, second = (handle.generate.remote(PROMPT, **ask).result(timeout_s=120) for _ in range(2))
    assert first["stats"]["accepted_tokens"] > 0
    assert first["token_ids"] == second["token_ids"]


def test_a_draft_node_lost_in_mid_stream_changes_nothing_and_its_draft_comes_back_on_another(
    handle, cluster, undisturbed
):
    """Last in this file: it takes a node away."""
    lost = pipeline(handle)["drafts"][0]["node"]
    (node,) = (each for each in cluster.drafts if each.node_id == lost)
    ids = []
    for item in handle.options(stream=True).stream.remote(PROMPT, **LONG):
        if isinstance(item, Finished):
            end = item
        else:
            before = len(ids)
            ids += [token.id for token in item.tokens]
            if before < 50 <= len(ids):
                cluster.remove_node(node, allow_graceful=False)
    assert ids == undisturbed["token_ids"]
    assert end.stats["draft_losses"] == 1

    cluster.add_node(num_cpus=1, resources={"draft_cpu": 1})
    deadline = time.monotonic() + 240
    while pipeline(handle)["draft_restarts"] == 0 and time.monotonic() < deadline:
        time.sleep(1)
    assert pipeline(handle)["draft_restarts"] == 1
