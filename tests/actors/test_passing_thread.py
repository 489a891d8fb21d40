"""What loads and warms up a model leaves no team of OpenMP threads behind, beside that of the thread that serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from duo_ray.actors.passing_thread import in_passing_thread

_ACTOR = """
import json, os, sys, time
from duo_ray.actors import draft, target
for module in (draft, target):
    module.node_id = lambda: "here"
def threads():
    return len(os.listdir("/proc/self/task"))
path = sys.argv[1]
import llama_cpp
before = threads()
if sys.argv[2] == "target":
    actor = target.TargetActor(target.TargetSettings(
        path, "llama_cpp", "demo", "cpu", "Q4_1", slots=1, max_context=64, vocab_size=49152, threads=2, cores=(),
        attn_implementation="sdpa", chunk=128, device_map=None, cuda_graphs=False, quantization="none", gpu_layers=0,
        warmup_steps=1, node="here",
    ))
else:
    from duo_ray.models.catalog import resolve_target
    from duo_ray.models.tokenizer import Tokenizer
    actor = draft.DraftActor(draft.DraftSettings(
        files=(("Q4_1", path),), model="demo", quant=None, threads=2, cores=(), max_context=64, slots=1,
        max_sequences=1, vocabulary="auto", warmup_steps=1, node="here",
    ))
    actor.adapt(Tokenizer.load(resolve_target("demo").tokenizer_path))
deadline = time.monotonic() + 10
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)  # they end a little after their thread
print(json.dumps(threads() - before))
"""


@pytest.mark.models
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")
@pytest.mark.parametrize("actor", ["target", "draft"])
def test_an_actor_that_is_ready_has_no_more_threads_than_before(demo_gguf: Path, demo_target: Path, actor: str) -> None:
    assert demo_target.is_dir()  # converted beforehand: that takes threads, too
    done = subprocess.run(
        [sys.executable, "-c", _ACTOR, str(demo_gguf), actor], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == 0


def test_what_goes_wrong_is_raised_here() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        in_passing_thread(fail)
