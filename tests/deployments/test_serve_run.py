"""The command that starts everything on a machine where no Ray runs, and what is left after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.actors.conftest import SMALL
from tests.deployments.conftest import descendants, healthy, listening, ray_directory, running
from tests.deployments.test_app import alive

URL = "http://127.0.0.1:8000"
CONFIG = Path(__file__).parents[2] / "examples/config.yaml"
ARGUMENTS = [f"{name}={value}" for name, value in SMALL.items()]


@pytest.mark.ray
@pytest.mark.models
def test_serve_run_answers_a_client_finds_it_and_after_ctrl_c_nothing_is_left():
    arguments = [f"config={CONFIG}", *ARGUMENTS]
    with ray_directory() as directory, running(["serve", "run", "deployments:app", *arguments], directory) as command:
        command.wait_until(lambda: healthy(URL))
        body = {"model": "mine", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["usage"]["completion_tokens"] == 4
        found = subprocess.run(
            [sys.executable, "-c", "from duo_ray import DuoClient\nprint(DuoClient().generate('Hi').text)"],
            env={**os.environ, "RAY_TMPDIR": str(directory)}, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert found.stdout.strip(), found.stderr

        started = [child.pid for child in descendants(command.process.pid)]
        assert len(started) > 4

        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
        command.process.wait(120)
        deadline = time.monotonic() + 60
        while any(map(alive, started)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(map(alive, started)), command.log.read_text()
        assert not listening(8000)


def test_a_wrong_argument_ends_the_command_with_its_name():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("serve")), "run", "deployments:app", "serving.que=3"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.strip().endswith("serving.que is not a setting; did you mean queue?")


@pytest.mark.models
def test_serve_build_writes_a_file_that_serve_deploys(tmp_path):
    path = tmp_path / "built.yaml"
    done = subprocess.run(
        [str(Path(sys.executable).with_name("serve")), "build", "deployments:default_app", "--output-path", str(path)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (application,) = ServeDeploySchema(**yaml.safe_load(path.read_text())).applications
    assert application.import_path == "deployments:default_app"
    assert [each.name for each in application.deployments] == ["pipeline"]
