"""The cluster files against what reads them: Ray's own checks, its command line, a shell, KubeRay's shape."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
from ray.serve.schema import ServeDeploySchema

import deployments
from duo_ray.actors.launch import TAGS
from duo_ray.actors.prepare import plan_footprint
from duo_ray.hardware.machine import detect_machine
from tests import kuberay

ROOT = Path(__file__).parents[1]
FILES = ("cluster.yaml", "cluster.local.yaml")
MANIFEST = ROOT / "deployments/kuberay.yaml"


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def manifest():
    return yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name):
    validate_config(prepare_config(read(name)))


@pytest.mark.parametrize("name", FILES)
def test_a_key_that_ray_does_not_know_would_be_noticed(name):
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout"):
        validate_config(prepare_config(read(name) | {"idle_timeout": 3}))


def bundles(application):
    """What a pipeline with these arguments asks of a cluster: replica, target, drafts."""
    assert application["import_path"] == "deployments:app"
    config = deployments.Arguments(**application["args"]).load()
    return plan_footprint(config, detect_machine()).bundles(TAGS)


def fits(bundle, resources):
    return all(float(resources.get(name, 0)) >= amount for name, amount in bundle.items() if name != "memory")


def check_that_models_fit(application, head, target, draft):
    """Targets only on GPU nodes; drafts beside them and on nodes of their own; neither on the head."""
    _, target_bundle, *draft_bundles = bundles(application)
    assert draft_bundles
    assert [fits(target_bundle, node) for node in (head, target, draft)] == [False, True, False]
    for bundle in draft_bundles:
        assert [fits(bundle, node) for node in (head, target, draft)] == [False, True, True]
    whole = {name: sum(each.get(name, 0) for each in (target_bundle, *draft_bundles)) for name in target}
    assert fits(whole, target)


def test_target_and_draft_fit_on_a_gpu_node_further_drafts_beside_it_and_nothing_on_the_head():
    types = read("cluster.yaml")["available_node_types"]
    (application,) = read("serve.cluster.yaml")["applications"]
    check_that_models_fit(application, *(types[name]["resources"] for name in ("head", "target", "draft")))


def test_the_pods_of_the_manifest_fit_the_models_it_serves():
    spec = kuberay.read(manifest()).spec
    (application,) = yaml.safe_load(spec.serve_config_v2)["applications"]
    groups = {group.group_name: group.resources for group in spec.ray_cluster_config.worker_group_specs}
    head = spec.ray_cluster_config.head_group_spec.resources
    check_that_models_fit(application, head, groups["target"], groups["draft"])


@pytest.mark.parametrize("name", FILES)
def test_every_mounted_file_exists_and_a_node_can_install_from_them(name, tmp_path):
    home = tmp_path / "home"
    for remote, local in read(name)["file_mounts"].items():
        if not local.startswith("~"):
            there = Path(remote.replace("~", str(home)))
            there.parent.mkdir(parents=True, exist_ok=True)
            source = ROOT / local
            if source.is_dir():
                shutil.copytree(source, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, there)
    shown = subprocess.run(
        ["make", "--dry-run", "setup", "EXTRAS=", "CONSTRAINTS="], cwd=home / "duo_ray",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert '--editable "."' in shown.stdout
    code = "from setuptools.build_meta import prepare_metadata_for_build_editable as p; print(p('..'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=home / "duo_ray", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "duo_ray-" in done.stdout


@pytest.mark.parametrize("name", FILES)
def test_the_token_and_its_mode_reach_every_node(name, tmp_path):
    config = read(name)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    (command,) = (each for each in config["initialization_commands"] if "RAY_AUTH_MODE" in each)
    for _ in range(2):  # ray up runs it again on every call
        shell(command, tmp_path)
    assert (tmp_path / ".bashrc").read_text() == "export RAY_AUTH_MODE=token\n"


def shell(command, home, **variables):
    """Run a command of a cluster file as Ray does: in bash, with OMP_NUM_THREADS=1."""
    environment = {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def started_with(name, role, home, *, cores=16, gpus=0):
    """The arguments of `ray start` on a machine with so many cores and GPUs, as Ray's command line reads them."""
    script(home / "duo_ray/.venv/bin/ray", f'printf "%s\\n" "$@" > {home}/arguments; env > {home}/environment')
    script(home / "bin/getconf", f"echo {cores}")
    script(home / "bin/nvidia-smi", f"for i in $(seq {gpus}); do echo GPU $i; done" if gpus else "exit 9")
    for command in read(name)[f"{role}_start_ray_commands"]:
        shell(command, home, RAY_HEAD_IP="10.0.0.1")
    first, *arguments = (home / "arguments").read_text().splitlines()
    assert first == "start"
    environment = (home / "environment").read_text().splitlines()
    assert {"RAY_worker_niceness=0", "GRPC_ENABLE_FORK_SUPPORT=0"} <= set(environment)
    return start.make_context("start", arguments).params


@pytest.mark.parametrize("name", FILES)
def test_the_head_starts_with_the_autoscaler_and_workers_join_it(name, tmp_path):
    head = started_with(name, "head", tmp_path)
    assert head["head"]
    assert head["autoscaling_config"] == "~/ray_bootstrap_config.yaml"
    worker = started_with(name, "worker", tmp_path)
    assert worker["address"] == f"10.0.0.1:{head['port']}"


def test_models_stay_off_the_head_of_a_local_cluster(tmp_path):
    head = started_with("cluster.local.yaml", "head", tmp_path)
    assert (head["num_cpus"], head["labels"]) == (0, "duo-ray/role=head")


@pytest.mark.parametrize(
    ("cores", "gpus", "resources", "role"),
    [
        (4, 0, {"draft_cpu": 1, "target_gpu": 0}, "draft"),
        (64, 0, {"draft_cpu": 8, "target_gpu": 0}, "draft"),
        (32, 2, {"draft_cpu": 4, "target_gpu": 2}, "target"),
    ],
)
def test_a_machine_of_ones_own_offers_what_it_has(tmp_path, cores, gpus, resources, role):
    worker = started_with("cluster.local.yaml", "worker", tmp_path, cores=cores, gpus=gpus)
    assert json.loads(worker["resources"]) == resources
    assert worker["labels"] == f"duo-ray/role={role}"


def test_the_manifest_has_kuberays_shape():
    kuberay.read(manifest())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cluster: cluster.update(replicas=1), "replicas"),
        (lambda cluster: cluster.update(rayVersion="2.50.0"), "2.52.0"),
        (lambda cluster: cluster["headGroupSpec"]["rayStartParams"].update({"num-cpus": "0"}), "num-cpus"),
        (lambda cluster: cluster["workerGroupSpecs"][0].update(minReplicas=9), "minReplicas"),
    ],
)
def test_a_manifest_that_kuberay_would_refuse_would_be_noticed(change, message):
    document = manifest()
    change(document["spec"]["rayClusterConfig"])
    with pytest.raises(ValidationError, match=message):
        kuberay.read(document)


def test_the_groups_of_the_manifest_offer_what_their_pods_have():
    cluster = kuberay.read(manifest()).spec.ray_cluster_config
    assert cluster.head_group_spec.resources == {"CPU": "0"}
    for group in cluster.worker_group_specs:
        limits = group.container.resources.limits
        assert limits == group.container.resources.requests
        assert group.resources["CPU"] == limits["cpu"]
        assert group.resources.get("GPU") == group.resources.get("target_gpu") == limits.get("nvidia.com/gpu")
        taken = 2 if "GPU" in group.resources else 0
        assert int(group.resources["CPU"]) >= taken + 8 * int(group.resources["draft_cpu"])


def test_every_pod_gets_the_api_key_and_the_same_image():
    cluster = kuberay.read(manifest()).spec.ray_cluster_config
    containers = [group.container for group in (cluster.head_group_spec, *cluster.worker_group_specs)]
    assert len({container.image for container in containers}) == 1
    assert all("DUO_RAY_API_KEY" in {variable.name for variable in each.env} for each in containers)


def test_the_versions_of_ray_agree():
    (image,) = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-", (ROOT / "deployments/Dockerfile").read_text(), re.MULTILINE
    )
    assert image == kuberay.read(manifest()).spec.ray_cluster_config.ray_version
    assert image.rpartition(".")[0] == version("ray").rpartition(".")[0]


def test_serve_accepts_the_applications():
    ServeDeploySchema.model_validate(yaml.safe_load(manifest()["spec"]["serveConfigV2"]))
    ServeDeploySchema.model_validate(read("serve.cluster.yaml"))


def test_the_cluster_and_the_manifest_serve_the_same():
    (there,) = yaml.safe_load(manifest()["spec"]["serveConfigV2"])["applications"]
    (here,) = read("serve.cluster.yaml")["applications"]
    assert there["args"]["serving"].pop("api_key") == "env:DUO_RAY_API_KEY"
    assert there == here
