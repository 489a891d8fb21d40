"""Models fetched from a hub: the real client, in a process of its own, against a hub on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models.hub_stub import COMMIT, Hub
from tests.models.tiny_gguf import write_tiny_llama

RESOLVE = """
import sys
from duo_ray.models.catalog import draft_quants, resolve_draft, resolve_target
from duo_ray.types import DuoRayError
kind, *arguments = sys.argv[1:]
try:
    if kind == "auto":
        print(*[resolve_draft(*arguments, quant) for quant in draft_quants(*arguments)])
    else:
        print(resolve_target(*arguments).path if kind == "target" else resolve_draft(*arguments))
except DuoRayError as error:
    sys.exit(f"refused: {error}")
"""
WEIGHTS = bytes(range(256)) * (12 * 2**20 // 256)
"""More than the client writes at once (10 MiB): only what is written can be resumed."""
TARGET = {
    "config.json": json.dumps({"max_position_embeddings": 512, "vocab_size": 100}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"never wanted",
    "README.md": b"never wanted",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    gguf = write_tiny_llama(tmp_path / "tiny.gguf").read_bytes()
    drafts = {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf, "README.md": b"never wanted"}
    with Hub({"org/target": TARGET, "org/draft-GGUF": drafts}) as hub:
        yield hub


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Iterator[Start]:
    """Starts `resolve_target` or `resolve_draft` in a process whose hub is the one here, and whose cache is empty."""
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    processes = []

    def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RESOLVE, *arguments]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**environment, **changes}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def path_of(process: subprocess.Popen[str]) -> Path:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return Path(out.strip())


def refusal_of(process: subprocess.Popen[str]) -> str:
    """The one line that a user reads."""
    _, err = process.communicate(timeout=300)
    (line,) = [line for line in err.splitlines() if line.startswith("refused: ")]
    assert "Traceback" not in err
    return line


def test_a_target_is_fetched_once_and_only_the_files_it_needs(hub: Hub, start: Start) -> None:
    folder = path_of(start("target", "org/target"))
    assert folder.name == COMMIT
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(hub.transfers()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert path_of(start("target", "org/target")) == folder
    assert len(hub.transfers()) == 3


def test_what_was_fetched_is_found_without_the_hub(start: Start) -> None:
    folder = path_of(start("target", "org/target"))
    assert path_of(start("target", "org/target", HF_ENDPOINT="http://127.0.0.1:1")) == folder


def test_a_draft_is_the_file_of_its_quantisation(hub: Hub, start: Start) -> None:
    assert path_of(start("draft", "org/draft-GGUF", "Q4_K_M")).name == "tiny-Q4_K_M.gguf"
    assert hub.transfers() == ["tiny-Q4_K_M.gguf"]


def test_auto_fetches_one_file_and_makes_the_others_of_it(hub: Hub, start: Start) -> None:
    paths, error = start("auto", "org/draft-GGUF").communicate()
    fetched, *made = map(Path, paths.split())
    assert fetched.name == "tiny-Q8_0.gguf", error
    assert [path.suffixes[-2] for path in made] == [".Q4_0", ".Q2_K"]
    assert hub.transfers() == ["tiny-Q8_0.gguf"]


def test_a_quantisation_that_is_not_there_is_named(start: Start) -> None:
    assert "org/draft-GGUF has no .gguf file of Q2_K" in refusal_of(start("draft", "org/draft-GGUF", "Q2_K"))


def test_a_name_the_hub_does_not_know_is_said_to_be_unknown(start: Start) -> None:
    line = refusal_of(start("target", "org/tarteg"))
    assert "org/tarteg" in line
    assert "the hub has no such model" in line


def test_no_network_is_said_to_be_the_reason(start: Start) -> None:
    line = refusal_of(start("target", "org/target", HF_ENDPOINT="http://127.0.0.1:1"))
    assert "org/target" in line
    assert "ConnectError" in line


def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub: Hub, start: Start) -> None:
    hub.cut["model.safetensors"] = 11 * 2**20
    folder = path_of(start("target", "org/target"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    starts = [asked.first_byte for asked in hub.asked if asked[:2] == ("GET", "model.safetensors")]
    assert starts == [0, 10 * 2**20]


def test_after_an_interrupted_download_only_the_missing_files_are_fetched(
    hub: Hub, start: Start, tmp_path: Path
) -> None:
    hub.stall.add("model.safetensors")
    interrupted = start("target", "org/target")
    assert hub.stalled.wait(300)
    snapshot = tmp_path / "hf" / "hub" / "models--org--target" / "snapshots" / COMMIT
    while not all((snapshot / name).exists() for name in ("config.json", "tokenizer.json")):
        assert interrupted.poll() is None
    interrupted.send_signal(signal.SIGKILL)
    interrupted.communicate()
    hub.stall.clear()
    hub.asked.clear()
    folder = path_of(start("target", "org/target"))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.transfers() == ["model.safetensors"]
