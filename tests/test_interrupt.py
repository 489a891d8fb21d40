"""Ctrl-C and SIGTERM at any moment: the command ends, and no process or temporary file of ours stays.

(Where temporary files go, the locks of the cores stay, duo_ray-cores-*; so do folders of torch, torchinductor_*,
and of Ray's dashboard, pymp-*.)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import typer

from duo_ray.terminal import user_errors
from tests.models.tiny_gguf import write_tiny_llama

DUO_RAY = str(Path(sys.executable).with_name("duo-ray"))
SMALL = ("--set", "models.target.precision=fp32", "--set", "models.target.max_seq_len=512",
         "--set", "optimization.warmup_steps=6")  # fmt: skip
GENERATE = ("generate", *SMALL, "--max-tokens", "400", "--ignore-eos", "Tell me everything.")
LIMIT_S = 240.0
EXIT_CODES = {signal.SIGINT: {130}, signal.SIGTERM: {143, signal.SIGTERM}}
"""The second one of SIGTERM is that of Ray's own handler, which stands until Ray has started."""

Moment = Callable[[list[str]], bool]
"""Whether the moment has come, told by the command lines of the processes that run."""


class Command:
    """`duo-ray` in a process of its own, with temporary files in `folder`, found again by a mark."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        self.process = subprocess.Popen(
            [DUO_RAY, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder), "RAY_TMPDIR": "/tmp", "DUO_RAY_TEST": self._mark, **environment},
        )

    def running(self) -> list[psutil.Process]:
        """Every living process that inherited the mark."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get("DUO_RAY_TEST") == self._mark
        except psutil.Error:  # it ended meanwhile
            return False

    def wait_for(self, moment: Moment) -> None:
        children = psutil.Process(self.process.pid).children
        self._until(lambda: moment([_command_line(process) for process in children(recursive=True)]))

    def end(self, number: int) -> None:
        """Send the signal and wait until nothing is left."""
        self.process.send_signal(number)
        assert self.process.wait(LIMIT_S) in EXIT_CODES[signal.Signals(number)]
        self._until(lambda: not self.running())
        assert [path for path in self.folder.glob("duo_ray*") if "-cores-" not in path.name] == []

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < deadline, [_command_line(process) for process in self.running()]
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.running():
            process.kill()
        self.process.communicate()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a path short enough for sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="d"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def command(folder: Path) -> Iterator[Command]:
    command = Command(folder, *GENERATE)
    yield command
    command.close()


def any_with(word: str) -> Moment:
    return lambda lines: any(word in line for line in lines)


def no_longer_with(word: str) -> Moment:
    """There was one, and it has ended."""
    seen = False

    def moment(lines: list[str]) -> bool:
        nonlocal seen
        there = any_with(word)(lines)
        seen |= there
        return seen and not there

    return moment


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("word", ["gcs_server", "ray::TargetActor"], ids=["while Ray starts", "while models load"])
def test_interrupted_start_up_leaves_nothing(command: Command, word: str, number: int) -> None:
    command.wait_for(any_with(word))
    command.end(number)


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_generation_leaves_nothing(command: Command, number: int) -> None:
    assert command.process.stdout is not None
    assert command.process.stdout.read(1)
    command.end(number)


NEVER_DONE = """
import pathlib, sys, time
if "duo_ray.models.convert" in sys.orig_argv:
    pathlib.Path(sys.orig_argv[-1], "half").touch()
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(folder: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEVER_DONE)
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    command = Command(
        folder, *GENERATE, "--target", str(model), "--no-draft", XDG_CACHE_HOME=str(tmp_path / "cache"),
        PYTHONPATH=os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    )  # fmt: skip
    targets = tmp_path / "cache/duo_ray/targets"
    try:
        command.wait_for(lambda _: any(targets.glob("*.part/half")))
        command.end(number)
        assert [path.name for path in targets.iterdir() if path.suffix != ".lock"] == []
    finally:
        command.close()


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.parametrize(
    ("moment", "number"),
    [(any_with("ray::Coordinator"), signal.SIGTERM), (no_longer_with("ray::TargetActor"), signal.SIGINT)],
    ids=["while the pipeline runs", "while distributions are compared"],
)
def test_an_interrupted_diagnosis_leaves_nothing(folder: Path, tmp_path: Path, moment: Moment, number: int) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.html"
    prompts.write_text('{"prompt": "Why does ice float?"}\n')
    command = Command(
        folder, "diagnose", *SMALL, "--prompts", str(prompts), "--max-tokens", "16", "--html", str(report)
    )
    try:
        command.wait_for(moment)
        command.end(number)
        assert not report.exists()
    finally:
        command.close()


def test_what_a_library_makes_of_an_interrupt_is_one(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def save():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")  # as torch.save, whose file is not whole

    with pytest.raises(typer.Exit) as ended, user_errors():
        save()
    assert ended.value.exit_code == 130
    broken = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"), user_errors():
        raise broken from broken
