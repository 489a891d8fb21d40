"""llama.cpp as a library: its start, its log, loading and quantising a model file."""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as ll

from duo_ray.models.llama_kernels import may_repack
from duo_ray.types import DuoRayError

_FILE_TYPES: dict[str, int] = {
    match[1]: value
    for name, value in vars(ll).items()
    if (match := re.fullmatch(r"LLAMA_FTYPE_(?:MOSTLY|ALL)_(\w+)", name))
}
"""llama.cpp's names of weight types: F16, Q8_0, Q4_K_M, ..."""

NO_GPU_BUILD = (
    "llama-cpp-python was built without a GPU: CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-deps "
    f"--no-cache-dir --no-binary :all: llama-cpp-python=={version('llama-cpp-python')}"
)


class LlamaCppError(DuoRayError):
    """llama.cpp could not load, run or quantise a model."""


def quantize(source: Path, target: Path, type_name: str, threads: int) -> None:
    """Write `source` with weights of another type by llama.cpp's quantiser, from any type (requantising included).

    Tensors whose rows do not fit the type's blocks get the nearest type that fits, as llama.cpp chooses it.

    Args:
        type_name: llama.cpp's name of the type: Q2_K, Q4_0, Q4_K_M, Q8_0, F16, ...

    Raises:
        LlamaCppError: unknown type, unreadable source, existing target, or llama.cpp refused.
    """
    if type_name not in _FILE_TYPES:
        raise LlamaCppError(f"unknown weight type {type_name!r}: choose one of {', '.join(_FILE_TYPES)}")
    check_file(source)
    if target.exists():
        raise LlamaCppError(f"{target} exists: delete it or choose another name")
    start_library()
    log.clear()
    params = ll.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[type_name]
    params.allow_requantize = True
    params.nthread = threads
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if ll.llama_model_quantize(os.fsencode(source), os.fsencode(unfinished), ctypes.byref(params)) != 0:
            raise LlamaCppError(f"cannot write {source} as {type_name}: {log.quote()}")
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def check_file(path: Path) -> None:
    if not path.is_file():
        raise LlamaCppError(f"{path} is not a file: give the path of a .gguf file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LlamaCppError(f"{path} is not a GGUF file: its first four bytes differ")


def load_model(path: Path, gpu_layers: int = 0, *, repack: bool = False) -> Any:
    """Load a model; without `gpu_layers` it takes no GPU memory, whatever the build.

    `repack`: into a layout for this CPU's vector units, where that is safe (`llama_kernels`).
    """
    check_file(path)
    if gpu_layers and not ll.llama_supports_gpu_offload():
        raise LlamaCppError(f"{gpu_layers} layers on a GPU: {NO_GPU_BUILD}")
    no_devices = (ctypes.c_void_p * 1)()
    params = ll.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    if not gpu_layers:
        params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    params.use_extra_bufts = repack and may_repack()
    model = ll.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise LlamaCppError(f"cannot load {path}: {log.quote()}")
    return model


def check_model(model: Any, path: Path, use: str) -> None:
    """A draft or target must generate from left to right, and its cache must forget rejected tokens."""
    architecture = metadata(model, "general.architecture")
    refused = (
        (
            ll.llama_model_is_recurrent(model) or ll.llama_model_is_hybrid(model),
            "recurrent: its state cannot be cropped",
        ),
        (ll.llama_model_has_encoder(model), "an encoder-decoder"),
        (not ll.llama_model_has_decoder(model), "an encoder"),
        (ll.llama_model_is_diffusion(model), "a diffusion model"),
        (metadata(model, f"{architecture}.attention.causal") == "false", "an embedding model"),
    )
    for wrong, kind in refused:
        if wrong:
            raise LlamaCppError(
                f"{path} ({architecture}) cannot be a {use}, it is {kind}: use a decoder-only transformer"
            )


def metadata(model: Any, key: str) -> str:
    """A value of the file's header as text; empty when it is not there."""
    buffer = ctypes.create_string_buffer(128)
    ll.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode(errors="replace")


class Log:
    """What is kept of llama.cpp's messages: the last errors, and the sizes of the buffers it allocated."""

    _info, _error, _continued = 2, 4, 5  # ggml.h, enum ggml_log_level

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=6)
        self._level = self._info
        self.buffer_bytes = 0

    def clear(self) -> None:
        self._errors.clear()
        self.buffer_bytes = 0

    def add(self, level: int, text: str) -> None:
        if level != self._continued:
            self._level = level
        if self._level == self._error:
            self._errors.append(text.strip())
        elif size := re.search(r"buffer size = *([\d.]+) MiB", text):
            self.buffer_bytes += int(float(size[1]) * 2**20)

    def quote(self) -> str:
        return "; ".join(self._errors) or "llama.cpp gave no reason"


log = Log()


@ll.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _: object) -> None:
    log.add(level, text.decode(errors="replace"))


@cache
def start_library() -> None:
    ll.llama_log_set(_on_log, ctypes.c_void_p(0))
    ll.llama_backend_init()
