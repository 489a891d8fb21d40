"""What a machine tells of itself."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from duo_ray.hardware.load import sample_load
from duo_ray.hardware.machine import detect_machine


def test_this_machine_is_described() -> None:
    here = detect_machine()
    assert set(here.cores) == os.sched_getaffinity(0)
    assert sorted(core for node in here.numa_nodes for core in node) == list(here.cores)
    assert here.memory_total == psutil.virtual_memory().total
    assert 0 < here.effective_cores <= len(here.cores)


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    here = detect_machine(tmp_path)
    assert here.numa_nodes == (here.cores,)
    assert here.isa == frozenset()
    assert here.cpu_limit is None


def test_cpu_flags_are_summed_up(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name\t: A CPU\nflags\t\t: sse2 avx2 avx512f avx512_vnni amx_tile\n")
    here = detect_machine(tmp_path)
    assert here.cpu == "A CPU"
    assert here.isa == {"avx2", "avx512", "vnni", "amx"}


def test_numa_nodes_come_in_numeric_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in {"node0": "0-1", "node10": "4-5", "node2": "2-3"}.items():
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "sys/devices/system/node" / node / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert detect_machine(tmp_path).numa_nodes == ((0, 1), (2, 3), (4,))


def pretend(root: Path, group: str, files: dict[str, str]) -> None:
    """Write what /proc and /sys say in a control group."""
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ("0::/../..", {"sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
        (
            "0::/a/b",
            {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "400000 100000"},
            4.0,
        ),
        (
            "4:cpu,cpuacct:/docker/x\n0::/",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            1.5,
        ),
        (
            "4:cpu,cpuacct:/",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_a_container_limit_is_found(tmp_path: Path, group: str, files: dict[str, str], limit: float | None) -> None:
    pretend(tmp_path, group, files)
    assert detect_machine(tmp_path).cpu_limit == limit


GIB = 2**30


@pytest.mark.parametrize(
    ("group", "files", "total", "available"),
    [
        (
            "0::/",
            {
                "sys/fs/cgroup/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/memory.current": f"{GIB}",
                "sys/fs/cgroup/memory.stat": f"anon 5\nfile {GIB}\nactive_file 7\ninactive_file {GIB // 2}",
            },
            2 * GIB,
            3 * GIB // 2,
        ),
        (
            "0::/pod/box",  # what is around it is tighter
            {
                "sys/fs/cgroup/pod/box/memory.max": "max",
                "sys/fs/cgroup/pod/box/memory.current": "5",
                "sys/fs/cgroup/pod/memory.max": f"{GIB}",
                "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}",
            },
            GIB,
            0,
        ),
        (
            "4:memory:/docker/x\n0::/",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB // 4}",
            },
            2 * GIB,
            5 * GIB // 4,
        ),
    ],
)
def test_a_containers_memory_is_what_there_is(
    tmp_path: Path, group: str, files: dict[str, str], total: int, available: int
) -> None:
    pretend(tmp_path, group, files)
    machine = detect_machine(tmp_path)
    assert (machine.memory_total, machine.memory_available) == (total, available)


def test_a_limit_beyond_the_machine_is_none(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "5"}
    pretend(tmp_path, "4:memory:/", {f"sys/fs/cgroup/memory/{name}": text for name, text in files.items()})
    assert detect_machine(tmp_path).memory_total == psutil.virtual_memory().total


def test_load_has_one_share_for_each_core() -> None:
    load = sample_load(0.01)
    assert len(load.cores) == psutil.cpu_count()
    assert all(0.0 <= share <= 1.0 for share in load.cores)
    assert 0 < load.memory_used < load.memory_total
