"""Machines to share out."""

from __future__ import annotations

from duo_ray.hardware.gpus import Gpu
from duo_ray.hardware.machine import Machine

A800 = Gpu("NVIDIA A800-SXM4-80GB", 80 << 30, "570.1")


def machine(
    *nodes: range, gpus: tuple[Gpu, ...] = (), present: int | None = None, cpu_limit: float | None = None
) -> Machine:
    cores = tuple(core for node in nodes for core in node)
    return Machine(
        cores=cores,
        present=tuple(range(present or len(cores))),
        numa_nodes=tuple(tuple(node) for node in nodes),
        memory_total=64 << 30,
        memory_available=32 << 30,
        cpu="test",
        isa=frozenset({"avx2"}),
        gpus=gpus,
        cpu_limit=cpu_limit,
    )
