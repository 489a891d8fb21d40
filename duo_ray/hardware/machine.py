"""What this process may use. Linux tells it through /proc and /sys."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from duo_ray.config import parse_cores
from duo_ray.hardware.gpus import Gpu, list_gpus

_ROOT = Path("/")

_ISA: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2"}),
    "avx512": frozenset({"avx512f"}),
    "vnni": frozenset({"avx512_vnni", "avx_vnni"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "amx": frozenset({"amx_tile"}),
    "neon": frozenset({"asimd"}),
}
"""What matters to the engines -> the flags of /proc/cpuinfo that say so."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use."""

    cores: tuple[int, ...]
    """Cores this process may run on."""
    present: tuple[int, ...]
    """All cores the machine has online."""
    numa_nodes: tuple[tuple[int, ...], ...]
    """Cores of each NUMA node, those of `cores` only; one node where the machine has none."""
    memory_total: int
    """Bytes, of the machine or of what a container may take."""
    memory_available: int
    cpu: str
    isa: frozenset[str]
    """Which of avx2, avx512, vnni, bf16, amx, neon the CPU has."""
    gpus: tuple[Gpu, ...] = ()
    cpu_limit: float | None = None
    """Cores' worth of time a container may use (cgroup quota); None: no limit."""
    claimed: frozenset[int] = frozenset()
    """Cores that other pipelines on this machine run on; see `CoreClaims`."""

    @property
    def effective_cores(self) -> float:
        return len(self.cores) if self.cpu_limit is None else min(len(self.cores), self.cpu_limit)


def detect_machine(root: Path = _ROOT) -> Machine:
    """What this process may use. Never raises for something missing. `root` is where /proc and /sys hang."""
    present = _core_list(root / "sys/devices/system/cpu/online") or tuple(range(os.cpu_count() or 1))
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else present
    memory_total, memory_available = _memory(root)
    cpu, isa = _cpu(root)
    return Machine(
        cores=cores,
        present=present,
        numa_nodes=_numa_nodes(root, cores),
        memory_total=memory_total,
        memory_available=memory_available,
        cpu=cpu,
        isa=isa,
        gpus=list_gpus(),
        cpu_limit=_cpu_limit(root),
    )


def _read(path: Path) -> str:
    """The file's text; empty where it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _core_list(path: Path) -> tuple[int, ...]:
    text = _read(path)
    return parse_cores(text) if text else ()


def _numa_nodes(root: Path, cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    directories = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = [_core_list(node / "cpulist") for node in sorted(directories, key=lambda path: int(path.name[4:]))]
    nodes = [tuple(core for core in node if core in cores) for node in lists]
    elsewhere = tuple(core for core in cores if not any(core in node for node in nodes))
    return tuple(node for node in (*nodes, elsewhere) if node)


def _cpu(root: Path) -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "model name":
                name = value.strip()
            case "flags" | "Features":
                flags.update(value.split())
    return name, frozenset(feature for feature, any_of in _ISA.items() if any_of & flags)


def _memory(root: Path) -> tuple[int, int]:
    """Bytes in all and free: what the machine has, or less where the cgroup allows less, at the tightest level."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for level, version in _cgroup(root, "memory"):
        names = _MEMORY_FILES[version]
        limit, used = (_number(_read(level / name)) for name in (names.limit, names.used))
        if limit is None or used is None:  # "max": no limit
            continue
        cached = next((line for line in _read(level / "memory.stat").splitlines() if line.startswith(names.cached)), "")
        total = min(total, limit)
        available = min(available, max(0, limit - used + (_number(cached.rpartition(" ")[2]) or 0)))
    return total, available


class _MemoryFiles(NamedTuple):
    limit: str
    used: str
    cached: str
    """The line of memory.stat that counts pages which are given up when memory runs short."""


_MEMORY_FILES = {
    1: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    2: _MemoryFiles("memory.max", "memory.current", "inactive_file "),
}


def _cpu_limit(root: Path) -> float | None:
    """Cores' worth of time the cgroup allows: cpu.max (v2) or the CFS quota (v1), the least over all levels."""
    read = {1: _quota_v1, 2: _quota_v2}
    limits = [read[version](level) for level, version in _cgroup(root, "cpu")]
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroup(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Directories of this process's control group and of those around it, and the version (1 or 2) of their files."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        # Inside a container the path is often the host's, and only the mount's root exists.
        if number == "0" and not controllers:
            yield from ((level, 2) for level in _levels(root / "sys/fs/cgroup", group))
        elif controller in controllers.split(","):
            yield from ((level, 1) for level in _levels(root / "sys/fs/cgroup" / controller, group))


def _levels(base: Path, group: str) -> Iterator[Path]:
    path = base
    yield path
    for name in group.split("/"):
        if name and name != "..":  # a namespace may show the group as /../..
            path /= name
            yield path


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
