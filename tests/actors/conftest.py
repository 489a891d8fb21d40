"""One running pipeline for all tests that only read from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from duo_ray.config import load_config
from duo_ray.session import Duo

SMALL = {
    "models.target.precision": "fp32",
    "models.target.max_seq_len": 640,
    "models.target.slots": 4,
    "optimization.warmup_steps": 6,
    "optimization.fallback": False,
}
"""Settings of every pipeline here: float32, where greedy output has no ties to excuse; no fallback, so that drafting
does not depend on how busy the machine is."""


@pytest.fixture(scope="session")
def duo() -> Iterator[Duo]:
    with Duo(load_config(None, SMALL)) as running:
        yield running


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
