"""How fast each engine runs a .gguf target on this CPU: measured, without converting it for transformers first.

llama.cpp loads the file, and its passes are timed, with weights as in the file and repacked for the CPU's vector units:
that makes passes of several tokens faster and, on some CPUs, passes of one token slower. Transformers would need
minutes to convert it, so random models of its shape with few layers are timed, and the rest of the layers added.

Each is timed in a process of its own: kernels for a CPU they were not made for take that down. Run as a program
(`python -m duo_ray.models.engine FILE THREADS WAY`; WAY: plain, repacked or a dtype) it prints T(1) + T(8) in seconds.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duo_ray.models.catalog import check_convertible
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.memory import NEVER_REPACKED
from duo_ray.models.precision import run_pinned, shallow_seconds
from duo_ray.types import DuoRayError

logger = logging.getLogger(__name__)

_FEW = 3
"""The deeper of two random models has at least so many layers; the other one has one."""
_ENOUGH = 400_000_000
"""So many weights of layers take longer than the noise of a timing."""


def layout_seconds(path: Path, cores: Sequence[int], threads: int, *, repacked: bool = True) -> dict[str, float]:
    """T(1) + T(8) of a .gguf file in llama.cpp, seconds, by the layout of its weights: plain and, if any, repacked.

    Measured on `cores`; what cannot run is left out.
    """
    ways = ("plain", "repacked") if repacked and read_gguf(path).quant not in NEVER_REPACKED else ("plain",)
    return {way: seconds for way in ways if (seconds := _measured(path, cores, threads, way)) is not None}


def transformers_seconds(path: Path, cores: Sequence[int], threads: int, dtypes: Sequence[str]) -> float | None:
    """T(1) + T(8) of a .gguf file in transformers in the fastest of these precisions, seconds; None: it cannot run.

    Measured on `cores`.
    """
    seconds = [_measured(path, cores, threads, dtype) for dtype in dtypes]
    return min((each for each in seconds if each is not None), default=None)


def _measured(path: Path, cores: Sequence[int], threads: int, way: str) -> float | None:
    try:
        return float(run_pinned(__name__, (str(path), str(threads), way), cores))
    except DuoRayError as error:
        logger.warning("%s, %s: %s", path, way, error)
        return None


def _measure(path: Path, threads: int, way: str) -> float:
    if way in ("plain", "repacked"):
        return _llama_cpp(path, threads, repack=way == "repacked")
    return _shallow(path, threads, way)


def _llama_cpp(path: Path, threads: int, *, repack: bool) -> float:
    from duo_ray.models.llama_cpp_target import LlamaCppTarget  # noqa: PLC0415 - only in the measuring process

    target = LlamaCppTarget.load(path, threads=threads, max_context=256, slots=1, repack=repack)
    timings = dict(target.warm_up(5))
    target.close()
    return timings[1] + timings[8]


def _shallow(path: Path, threads: int, dtype: str) -> float:
    import torch  # noqa: PLC0415 - only in the measuring process
    from transformers import AutoConfig  # noqa: PLC0415

    header = read_gguf(path)
    check_convertible(header)
    torch.set_num_threads(threads)
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    deep = min(layers, max(_FEW, _ENOUGH * layers // header.parameters))
    seconds = shallow_seconds(config, deep, dtype)
    if deep < layers:
        seconds += (layers - deep) * max(seconds - shallow_seconds(config, 1, dtype), 0.0) / (deep - 1)
    return seconds


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
