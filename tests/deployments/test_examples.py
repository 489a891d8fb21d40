"""What the README and examples/ say about a running service, typed at one that runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

import deployments

ROOT = Path(__file__).parents[2]
SERVE = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Serve\n")[2].partition("\n## ")[0]
CODE = re.findall(r"```python\n(.*?)```", SERVE, re.DOTALL)
LINES = [line.strip().partition("  #")[0].strip() for line in SERVE.splitlines() if line.startswith("    ")]
HERE = "http://127.0.0.1:8000"


def commands(program):
    found = [line for line in LINES if line.startswith(program)]
    assert found, f"the README has no {program} command any more"
    return found


def run(command, service):
    """Run it as somebody on the machine of the service would."""
    environment = os.environ | {
        "RAY_ADDRESS": service.ray_address,
        "OPENAI_BASE_URL": f"{service.url}/v1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize("command", commands("curl"))
def test_a_curl_command_gets_an_answer(command, service):
    program, *arguments = shlex.split(command.replace(HERE, service.url))
    said = run([program, "--silent", "--show-error", "--fail-with-body", *arguments], service)
    assert '"demo"' in said


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize("code", CODE)
def test_a_python_example_of_the_readme_works(code, service):
    assert run([sys.executable, "-c", code.replace(HERE, service.url)], service).strip()


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize("command", commands("python examples/"))
def test_an_example_works(command, service):
    assert run([sys.executable, *shlex.split(command)[1:]], service).strip()


def test_every_example_is_in_the_readme():
    assert {shlex.split(each)[1] for each in commands("python examples/")} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py")
    }


@pytest.mark.parametrize("command", commands("serve run"))
def test_the_arguments_of_serve_run_are_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, _, application, *arguments = shlex.split(command)
    assert application == "deployments:app"
    config = deployments.Arguments(**dict(each.split("=", 1) for each in arguments)).load()
    assert config.model_name in ("demo", "mine")


@pytest.mark.parametrize("command", [*commands("ray "), *commands("serve deploy")])
def test_a_command_of_ray_has_the_options_it_is_given(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, name, *arguments = shlex.split(command)
    {"ray": ray_cli, "serve": serve_cli}[program].commands[name].make_context(name, arguments)


def test_the_settings_for_a_cluster_are_understood(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", SERVE, re.DOTALL)
    (tmp_path / "config.yaml").write_text(text)
    assert deployments.Arguments(config=tmp_path / "config.yaml").load().hardware.machine == "cluster"


def test_every_file_that_is_named_exists():
    named = re.findall(r"\b(?:examples|deployments)/[\w.]+\w|\b(?:cluster|serve)[\w.]*\.yaml", SERVE)
    assert len(named) > 8
    assert all((ROOT / name).exists() for name in named)


@pytest.mark.ray
@pytest.mark.models
def test_the_page_of_the_readme_is_there(service):
    assert "text/html" in httpx.get(service.url, timeout=60).headers["content-type"]
