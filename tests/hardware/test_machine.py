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
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert detect_machine(tmp_path).cpu_limit == limit


def test_load_has_one_share_for_each_core() -> None:
    load = sample_load(0.01)
    assert len(load.cores) == psutil.cpu_count()
    assert all(0.0 <= share <= 1.0 for share in load.cores)
    assert 0 < load.memory_used < load.memory_total
