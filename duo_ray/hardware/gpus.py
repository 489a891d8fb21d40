"""The NVIDIA GPUs that this process sees, asked of their driver. Without one there are none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, in the order CUDA numbers them for this process."""

    name: str
    memory: int
    """Bytes in total; 0 where the driver does not say."""
    driver: str
    used: int = 0
    """Bytes that anybody had of it when the driver was asked."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    name: str
    utilisation: float
    """Share of the time a kernel ran, 0 to 1."""
    memory_used: int
    memory_total: int


def list_gpus() -> tuple[Gpu, ...]:
    with _nvml() as handles:
        driver = _ask("", pynvml.nvmlSystemGetDriverVersion) if handles else ""
        found = []
        for handle in handles:
            used, total = _memory(handle)
            found.append(Gpu(_ask("NVIDIA GPU", pynvml.nvmlDeviceGetName, handle), total, driver, used))
        return tuple(found)


def gpu_loads() -> tuple[GpuLoad, ...]:
    with _nvml() as handles:
        loads = []
        for handle in handles:
            rates = _ask(None, pynvml.nvmlDeviceGetUtilizationRates, handle)
            used, total = _memory(handle)
            name = _ask("NVIDIA GPU", pynvml.nvmlDeviceGetName, handle)
            loads.append(GpuLoad(name, rates.gpu / 100 if rates else 0.0, used, total))
        return tuple(loads)


@contextmanager
def _nvml() -> Iterator[list[Any]]:
    """Handles of the GPUs this process sees; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield _visible()
    finally:
        _ask(None, pynvml.nvmlShutdown)


def _visible() -> list[Any]:
    """Device handles as CUDA_VISIBLE_DEVICES chooses and orders them; the first bad entry ends the list, as in CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = _ask(0, pynvml.nvmlDeviceGetCount)
    names = [str(index) for index in range(count)] if chosen is None else [name.strip() for name in chosen.split(",")]
    handles = []
    for name in names:
        if name.isdigit():
            handle = _ask(None, pynvml.nvmlDeviceGetHandleByIndex, int(name))
        else:
            handle = _ask(None, pynvml.nvmlDeviceGetHandleByUUID, name)
        if handle is None:
            break
        handles.append(handle)
    return handles


def _memory(handle: Any) -> tuple[int, int]:
    """(used, total) bytes; zeros where the GPU has no memory of its own."""
    info = _ask(None, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return (int(info.used), int(info.total)) if info else (0, 0)


def _ask(otherwise: Any, question: Callable[..., Any], *args: Any) -> Any:
    """The driver's answer, or `otherwise` where it has none."""
    try:
        answer = question(*args)
    except pynvml.NVMLError:
        return otherwise
    return answer.decode() if isinstance(answer, bytes) else answer
