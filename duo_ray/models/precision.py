"""Which precision a CPU runs faster: measured, on two random layers of the model's shape, without loading its weights.

Run as a program (`python -m duo_ray.models.precision DIRECTORY THREADS`) it prints one JSON object, {"bfloat16":
seconds, ...}: a process of its own keeps torch out of the caller and can be pinned to the target's cores.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duo_ray.types import DuoRayError

CPU_DTYPES = ("bfloat16", "float32")


def fastest_dtype(path: Path, cores: Sequence[int], threads: int) -> tuple[str, dict[str, float]]:
    """The dtype with the smallest T(1) + T(8), and both sums in seconds; measured on `cores` in another process."""
    try:
        seconds: dict[str, float] = run_pinned(__name__, (str(path), str(threads)), cores)
    except DuoRayError as error:
        raise DuoRayError(
            f"{path}: measuring the target's precision failed: {error}; set models.target.precision"
        ) from None
    return min(seconds, key=lambda dtype: seconds[dtype]), seconds


def run_pinned(module: str, arguments: Sequence[str], cores: Sequence[int]) -> Any:
    """What a module, run as a program on `cores`, prints as its last line of JSON.

    Raises:
        DuoRayError: it failed; the text is its own last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if hasattr(os, "sched_setaffinity") and cores else None,
    )
    if done.returncode != 0:
        raise DuoRayError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def shallow_seconds(config: Any, layers: int, dtype: str) -> float:
    """T(1) + T(8) of a random model of that shape with so many layers; `config` is transformers' and left as it is."""
    import torch  # noqa: PLC0415 - only in the measuring process
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from duo_ray.models.transformers import TransformersTarget  # noqa: PLC0415

    shape = copy.deepcopy(config)  # a model keeps and changes the object it is given
    text = shape.get_text_config(decoder=True)
    text.num_hidden_layers = min(layers, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    build: Any = AutoModelForCausalLM.from_config
    target = TransformersTarget(build(shape, dtype=getattr(torch, dtype)), slots=1, max_context=256)
    timings = dict(target.warm_up(5))
    return timings[1] + timings[8]


def _measure(path: str, threads: int) -> dict[str, float]:
    import torch  # noqa: PLC0415 - only in the measuring process
    from transformers import AutoConfig  # noqa: PLC0415

    torch.set_num_threads(threads)
    config = AutoConfig.from_pretrained(path)
    return {dtype: shallow_seconds(config, 2, dtype) for dtype in CPU_DTYPES}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
