"""A target in llama.cpp computes on the drafts' cores, too, while none of them works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.models

_ACTOR = """
import json, os, sys

from duo_ray.actors import target
from duo_ray.core.context import IdLog
from duo_ray.types import SamplingParams, VerifyJob
target.node_id = lambda: "here"
seconds = json.loads(sys.argv[2])  # of a pass beside a draft and of one alone: which is faster is not for this test
from duo_ray.models.llama_cpp_target import LlamaCppTarget
threads = [1]
def use_threads(self, count, real=LlamaCppTarget.use_threads):
    threads.append(count)
    real(self, count)
LlamaCppTarget.use_threads = use_threads
warm_up = LlamaCppTarget.warm_up
LlamaCppTarget.warm_up = lambda self, steps: [(n, seconds[threads[-1] > 1]) for n, _ in warm_up(self, steps)]
before = {int(task) for task in os.listdir("/proc/self/task")}
actor = target.TargetActor(target.TargetSettings(
    sys.argv[1], "llama_cpp", "demo", "cpu", "Q4_1", slots=2, max_context=256, vocab_size=49152, threads=1, cores=(0,),
    attn_implementation="sdpa", chunk=128, device_map=None, cuda_graphs=False, quantization="none", gpu_layers=0,
    warmup_steps=1, opening=tuple(range(40, 60)), spare_cores=(1,), node="here",
))
def allowed():
    engines = {int(task) for task in os.listdir("/proc/self/task")} - before | {os.getpid()}
    return sorted({tuple(sorted(os.sched_getaffinity(task))) for task in engines})
found = {"measured": [n for n, _ in actor.measure_alone()[1]]}
log, agreed = IdLog([*range(40, 60), 70, 71]), 0
for name, alone in (("first", True), ("beside", False), ("again", True)):
    job = VerifyJob(log.context("a", agreed=agreed, prompt_length=22), (), SamplingParams(temperature=0.0))
    reply = actor.verify([job], [None], alone)
    agreed = len(log)
    log.extend([reply.verdicts[0].token])
    found[name] = [reply.alone, threads[-1], allowed(), reply.verdicts[0].cached]
print(json.dumps(found))
"""


def run(path: Path, seconds: tuple[float, float]) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _ACTOR, str(path), json.dumps(seconds)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="needs cores 0 and 1")
def test_it_has_all_cores_in_passes_alone_and_its_own_in_others(demo_gguf: Path) -> None:
    found = run(demo_gguf, (0.2, 0.1))
    assert found["measured"] == [1, 2, 4, 8, 16, 32]
    # The words that chats begin with are still in the cache.
    assert found["first"] == [True, 2, [[0, 1]], 20]
    assert found["beside"] == [False, 1, [[0]], 0]
    assert found["again"] == [True, 2, [[0, 1]], 0]
