"""Which engine runs a .gguf target faster on this CPU: measured, without converting it for transformers first.

llama.cpp loads the file as it is, and its passes are timed. Transformers would need minutes to convert it, so random
models of its shape with few layers are timed, and the rest of the layers added.

Run as a program (`python -m duo_ray.models.engine FILE THREADS DTYPE...`) it prints one JSON object, {"transformers":
seconds, "llama_cpp": seconds}, with null for an engine that cannot run the model.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from duo_ray.models.catalog import check_convertible
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.precision import run_pinned, shallow_seconds
from duo_ray.types import DuoRayError

logger = logging.getLogger(__name__)

_FEW = 3
"""The deeper of two random models has at least so many layers; the other one has one."""
_ENOUGH = 400_000_000
"""So many weights of layers take longer than the noise of a timing."""


def engine_seconds(path: Path, cores: Sequence[int], threads: int, dtypes: Sequence[str]) -> dict[str, float]:
    """T(1) + T(8) of a .gguf file in each engine that can run it, in seconds, measured on `cores` in another process.

    Args:
        dtypes: precisions that transformers may run it in; the fastest counts.

    Raises:
        DuoRayError: neither engine runs it.
    """
    measured: dict[str, float | None] = run_pinned(__name__, (str(path), str(threads), *dtypes), cores)
    seconds = {engine: value for engine, value in measured.items() if value is not None}
    if not seconds:
        raise DuoRayError(f"{path} runs neither in llama.cpp nor, converted, in transformers: use another target")
    return seconds


def _measure(path: Path, threads: int, dtypes: Sequence[str]) -> dict[str, float | None]:
    return {
        "llama_cpp": _or_none(lambda: _llama_cpp(path, threads)),
        "transformers": _or_none(lambda: _transformers(path, threads, dtypes)),
    }


def _or_none(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except Exception as error:  # whatever the libraries raise for a model they do not know
        logger.warning("%s", error)
        return None


def _llama_cpp(path: Path, threads: int) -> float:
    from duo_ray.models.llama_cpp_target import LlamaCppTarget  # noqa: PLC0415 - only in the measuring process

    target = LlamaCppTarget.load(path, threads=threads, max_context=256, slots=1)
    timings = dict(target.warm_up(5))
    target.close()
    return timings[1] + timings[8]


def _transformers(path: Path, threads: int, dtypes: Sequence[str]) -> float:
    import torch  # noqa: PLC0415 - only in the measuring process
    from transformers import AutoConfig  # noqa: PLC0415

    header = read_gguf(path)
    check_convertible(header)
    torch.set_num_threads(threads)
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    deep = min(layers, max(_FEW, _ENOUGH * layers // header.parameters))
    fastest = math.inf
    for dtype in dtypes:
        seconds = shallow_seconds(config, deep, dtype)
        if deep < layers:
            seconds += (layers - deep) * max(seconds - shallow_seconds(config, 1, dtype), 0.0) / (deep - 1)
        fastest = min(fastest, seconds)
    return fastest


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
