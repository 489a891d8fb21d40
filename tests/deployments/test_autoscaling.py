"""More load than one replica is for: Serve asks for a second, the autoscaler starts nodes for it, and all goes back.

Ray's own autoscaler and its fake provider, whose nodes are processes of this machine. The node types are those of
cluster.yaml, one of everything each.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import yaml
from ray import serve
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

import deployments
from duo_ray.metrics import snapshot
from tests.deployments.conftest import free_ports, ray_directory, running
from tests.deployments.tiny_pair import PROMPT, tiny_pair

pytestmark = [
    pytest.mark.ray,
    # `serve.status` reads the application's autoscaling settings, in which the interval is deprecated.
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]

ASK = {"raw": True, "temperature": 0.0, "ignore_eos": True, "max_tokens": 300}
PATIENCE_S = 240.0
"""Far more than any of it takes on a machine with something else to do."""


def node_types():
    types = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())["available_node_types"]
    for name, each in types.items():
        each["node_config"] = {}
        each["resources"] = {resource: min(1, amount) for resource, amount in each["resources"].items()}
        each["min_workers"], each["max_workers"] = 0, 0 if name == "head" else 2
        each.pop("idle_timeout_s", None)
    types[FAKE_HEAD_NODE_TYPE] = types.pop("head")
    return types


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and an autoscaler beside it."""
    (port,) = free_ports(1)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    config = {
        "cluster_name": "fake",
        "max_workers": 4,
        "idle_timeout_minutes": 0.1,
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": node_types(),
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "initialization_commands": [],
        **{f"{role}_{step}": [] for role in ("head", "worker") for step in ("setup_commands", "start_ray_commands")},
        "setup_commands": [],
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
    }
    variables = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(ray_directory())
        settings = directory / "autoscaling.json"
        settings.write_text(json.dumps(config))
        start = ["ray", "start", "--head", "--block", "--num-cpus=0", "--include-dashboard=false"]
        start += [f"--port={port}", f"--autoscaling-config={settings}"]
        head = stack.enter_context(running(start, directory, **variables))
        head.wait_until(lambda: "Ray runtime started" in head.log.read_text())
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        stack.callback(ray.shutdown)
        stack.callback(serve.shutdown)
        yield


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def handle(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    settings = tiny_pair(folder) | {
        "serving.replicas.min": 1,
        "serving.replicas.max": 2,
        "serving.replicas.upscale_delay_s": 1.0,
        "serving.replicas.downscale_delay_s": 3.0,
    }
    planned = deployments.plan_footprint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployments, "plan_footprint", lambda *given: replace(planned(*given), target_gpus=1))
        app = deployments.app(deployments.Arguments(**settings))
    serve.start(proxy_location="Disabled")
    return serve.run(app, route_prefix=None)


class Load:
    """Clients that ask again as soon as they are answered, until told to stop."""

    def __init__(self, handle, clients):
        self.answers, self.errors = [], []
        self._handle, self._stop = handle, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def _ask(self):
        while not self._stop.is_set():
            try:
                self.answers.append(self._handle.generate.remote(PROMPT, **ASK).result(timeout_s=PATIENCE_S))
            except Exception as error:  # shown by the test
                self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def leave_streams(handle, count):
    """Begin answers and leave them after their first tokens."""
    streams = [handle.options(stream=True).stream.remote(PROMPT, **ASK) for _ in range(count)]
    for stream in streams:
        next(iter(stream))
        stream.cancel()


def replicas():
    return serve.status().applications["default"].deployments["pipeline"].replica_states.get("RUNNING", 0)


def nodes(role):
    return {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"].get("duo-ray/role") == role}


def tokens_by_replica(handle, count):
    """Tokens each of `count` replicas has generated, as any one of them tells it."""

    def told():
        figures = handle.figures.remote().result(timeout_s=60)
        return figures if len(figures) == count else None

    figures = until(told, f"figures of {count} replicas")
    return {each["replica"]: each["generated_tokens"] for each in snapshot(figures)["replicas"]}


def test_load_brings_a_second_replica_on_nodes_of_its_own_and_its_end_takes_it_away(handle):
    expected = handle.generate.remote(PROMPT, draft=False, **ASK).result(timeout_s=PATIENCE_S)
    assert (replicas(), len(nodes("target")), len(nodes("draft"))) == (1, 1, 1)

    with Load(handle, clients=8) as load:
        until(lambda: replicas() == 2, "a second replica")
        assert (len(nodes("target")), len(nodes("draft"))) == (2, 2)
        until(lambda: min(tokens_by_replica(handle, 2).values()) > 0, "an answer of the second replica")

    with Load(handle, clients=1) as trickle:
        leave_streams(handle, 12)  # whose requests must not seem to go on (case 19)
        until(lambda: replicas() == 1, "one replica again")
        until(lambda: len(nodes("target")) == len(nodes("draft")) == 1, "the end of the nodes that nobody needs")

    assert load.errors + trickle.errors == []
    assert {tuple(answer["token_ids"]) for answer in load.answers + trickle.answers} == {tuple(expected["token_ids"])}
