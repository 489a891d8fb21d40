"""Fixtures shared by all tests, and which tests this machine can run."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

# Every cluster of the tests wants a token, and none reads or leaves one in the user's home.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Before torch is imported: on tiny models threads only wait for each other, on a busy machine ten times as long as they
# compute. Whoever means more threads asks for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `set_ray_environment` does, for the clusters that tests start themselves.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are deselected where torch sees no CUDA device, or a package the marker names is missing."""
    unfit = [item for item in items if (marker := item.get_closest_marker("gpu")) and not _gpu_with(*marker.args)]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


def _gpu_with(*packages: str) -> bool:
    import torch

    return torch.cuda.is_available() and all(find_spec(package) for package in packages)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray that commands of this module join: not each of them has to start one."""
    import ray

    from duo_ray.actors.launch import start_local

    start_local([{"CPU": 16.0, "draft_cpu": 8.0}])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
            yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file: SmolLM2-135M-Instruct, Q4_1."""
    from duo_ray.models.catalog import resolve_draft

    return resolve_draft("demo")


@pytest.fixture(scope="session")
def demo_q4_0() -> Path:
    """The demo model in weights that llama.cpp can repack (quantised once, then cached)."""
    from duo_ray.models.catalog import resolve_draft

    return resolve_draft("demo", "Q4_0", threads=2)


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The demo model as a directory for transformers (converted once, then cached)."""
    from duo_ray.models.catalog import resolve_target

    return resolve_target("demo").path


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """A model with another tokenizer than the demo model: Gemma 3 270M, base, Q4_K_M."""
    from benchmarks.drafts import gemma

    return gemma()


@pytest.fixture(scope="session")
def gemma_target(gemma_gguf: Path) -> Path:
    """Gemma 3 270M as a directory for transformers (converted once, then cached)."""
    from duo_ray.models.catalog import resolve_target

    return resolve_target(str(gemma_gguf)).path


@pytest.fixture(scope="session")
def gemma_chat_gguf() -> Path:
    """Gemma 3 270M with a chat template."""
    from benchmarks.drafts import gemma_chat

    return gemma_chat()


_REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
path, count = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
for line in sys.stdin:
    ids = torch.tensor([json.loads(line)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    print(json.dumps(out[0, ids.shape[1]:].tolist()), flush=True)
"""


@pytest.fixture(scope="session")
def reference(demo_target: Path) -> Callable[[Sequence[Sequence[int]], int], list[list[int]]]:
    """The target's own `model.generate(do_sample=False)` in float32, in a process without any of our code."""

    def run(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        done = subprocess.run(
            [sys.executable, "-c", _REFERENCE, str(demo_target), str(count)],
            input="".join(f"{list(ids)}\n" for ids in prompts),
            capture_output=True,
            text=True,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
