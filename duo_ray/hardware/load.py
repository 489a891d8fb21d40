"""How busy this machine is."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from duo_ray.hardware.gpus import GpuLoad, gpu_loads


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the machine is."""

    cores: tuple[float, ...]
    """Busy share of each core, 0 to 1."""
    memory_used: int
    memory_total: int
    gpus: tuple[GpuLoad, ...]


def sample_load(seconds: float = 0.1) -> Load:
    """Load of the machine, measured over `seconds`; the call takes that long."""
    busy = psutil.cpu_percent(interval=seconds, percpu=True)
    memory = psutil.virtual_memory()
    return Load(
        cores=tuple(share / 100 for share in busy),
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        gpus=gpu_loads(),
    )
