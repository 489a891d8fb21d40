"""What the README says can be typed is typed here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from duo_ray.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
USE = README.partition("## Use")[2].partition("### A real pair")[0]
FIRST, *COMMANDS = [
    line.strip().partition("  #")[0].strip() for line in USE.splitlines() if line.startswith("    duo-ray ")
]


def test_there_is_something_to_test():
    assert len(COMMANDS) >= 6


@pytest.mark.ray
@pytest.mark.models
def test_the_first_command_of_the_readme_works_on_a_machine_without_ray(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    works(FIRST, tmp_path)


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("cluster")
def test_a_command_of_the_readme_works(command, demo_gguf, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "demo.gguf").symlink_to(demo_gguf)
    works(command, tmp_path)


def works(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.ray
@pytest.mark.models
def test_the_python_example_works(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", USE, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_settings_file_of_the_readme_loads(tmp_path):
    (settings,) = re.findall(r"```yaml\n(.*?)```", README.partition("## Serve")[0], re.DOTALL)
    (tmp_path / "config.yaml").write_text(settings)
    config = load_config(tmp_path / "config.yaml")
    assert config.models.draft.quant == "Q5_K_M"


def test_the_two_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert "make demo" in README
    assert "make test" in README


def test_the_ci_script_runs_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_public_names_exist():
    import duo_ray

    assert all(hasattr(duo_ray, name) for name in duo_ray.__all__)
