"""Actors killed in mid-generation: nothing lost, nothing doubled, said in the stats, and they come back."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError

from duo_ray.config import load_config
from duo_ray.session import Duo, collect
from tests.actors.conftest import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.models]

ASK = {"temperature": 0.0, "max_tokens": 160, "ignore_eos": True}
DASHBOARD = Path(__file__).parents[2] / "deployments/grafana.json"
PROMPT = "Write a long story about a lighthouse."


@pytest.fixture(scope="module")
def duo():
    with Duo(load_config(None, SMALL)) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(duo):
    return duo.generate(PROMPT, draft=False, **ASK)


def pid_of(handle):
    """The actor's process, once it (again) answers."""
    for _ in range(240):
        try:
            return ray.get(handle.__ray_call__.remote(lambda _actor: os.getpid()), timeout=120)
        except RayActorError:
            time.sleep(0.5)
    raise TimeoutError("the actor did not come back")


def generate_and_kill(duo, handle, number, *, after=20, **ask):
    """Send a signal to the actor's process when `after` tokens have come."""
    pid = pid_of(handle)

    def watched():
        for count, item in enumerate(duo.stream(PROMPT, **{**ASK, **ask}), 1):
            yield item
            if count == after:
                os.kill(pid, number)

    return pid, collect(watched())


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_draft_killed_in_mid_generation_changes_nothing_and_comes_back(duo, undisturbed, number):
    pid, got = generate_and_kill(duo, duo.pipeline.drafts[0], number)
    assert got.token_ids == undisturbed.token_ids
    assert got.text == undisturbed.text
    assert got.stats["draft_losses"] == 1
    assert "draft not available" in got.stats["plain_steps"]
    assert pid_of(duo.pipeline.drafts[0]) != pid
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        again = duo.generate(PROMPT, **ASK | {"max_tokens": 20})
        if again.stats["draft_tokens"]:
            break
    assert again.stats["draft_tokens"] > 0
    assert duo.pipeline.describe().draft_restarts >= 1


def test_a_target_killed_in_mid_stream_restarts_and_no_token_is_lost_or_doubled(duo, undisturbed):
    pid, got = generate_and_kill(duo, duo.pipeline.target, signal.SIGKILL)
    assert got.token_ids == undisturbed.token_ids
    assert got.text == undisturbed.text
    assert got.stats["target_losses"] >= 1
    assert pid_of(duo.pipeline.target) != pid
    assert duo.pipeline.describe().target_restarts >= 1


def test_a_draft_that_hangs_does_not_stop_the_stream(duo, undisturbed):
    handle = duo.pipeline.drafts[0]
    pid = pid_of(handle)
    try:
        pid, got = generate_and_kill(duo, handle, signal.SIGSTOP)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert got.token_ids == undisturbed.token_ids
    assert got.stats["plain_steps"]["draft is late"] > 10


def test_a_sampled_text_with_a_seed_survives_the_loss_of_the_target(duo):
    whole = duo.generate(PROMPT, **ASK | {"temperature": 1.0}, seed=3)
    _, got = generate_and_kill(duo, duo.pipeline.target, signal.SIGKILL, temperature=1.0, seed=3)
    assert got.token_ids == whole.token_ids


def exported():
    """Names of what Ray's agent exports."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=60).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_every_figure_of_the_dashboard_is_exported(duo):
    """After the restarts of the tests above, which are among them."""
    asked = set(re.findall(r"\bray_(?:duo_ray|vllm)_\w+", DASHBOARD.read_text(encoding="utf-8")))
    deadline = time.monotonic() + 180
    while missing := asked - exported():
        assert time.monotonic() < deadline, missing
        # Again and again: gauges are of the last seconds.
        for draft in (True, False):
            duo.generate(PROMPT, draft=draft, **ASK | {"max_tokens": 30})


def test_closing_frees_every_process_and_ray(duo):
    """Last in this file: it closes the pipeline all the others use."""
    info = duo.pipeline.describe()
    pids = [info.coordinator_pid, pid_of(duo.pipeline.target), *map(pid_of, duo.pipeline.drafts)]
    duo.close()
    assert not ray.is_initialized()
    deadline = time.monotonic() + 60
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(_alive, pids))


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
