"""Cores that are bound to a process, and cores that other pipelines have."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from duo_ray.config import ConfigError, load_config
from duo_ray.hardware.cores import CoreClaims, give_way, pin, show_cores
from duo_ray.hardware.placement import usable_cores
from tests.hardware.machines import machine


def test_cores_are_shown_as_ranges() -> None:
    assert show_cores((5, 0, 1, 2, 8, 9)) == "0-2,5,8-9"


def test_pinning_to_a_core_that_is_not_there_names_it() -> None:
    with pytest.raises(ConfigError, match="cannot pin to cores 4000"):
        pin([4000])


def test_pinning_holds() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert pin([min(before)]) is None
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_threads_that_give_way_and_those_they_start_do_not_interrupt_others() -> None:
    found, before = [], os.sched_getscheduler(0)

    def started() -> None:
        found.append(os.sched_getscheduler(0))

    def giving_way() -> None:
        give_way()
        thread = threading.Thread(target=started)
        thread.start()
        thread.join()

    thread = threading.Thread(target=giving_way)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == before


def test_a_platform_without_affinity_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert "not pinned" in (pin([0]) or "")


class TestClaims:
    def test_a_pipeline_takes_cores_that_no_other_one_has(self, tmp_path: Path) -> None:
        config = load_config(overrides={"hardware.cpu_cores": 3})
        first, second = CoreClaims(tmp_path), CoreClaims(tmp_path)
        with first.choosing() as claimed:
            assert not claimed
            first.take(usable_cores(config, replace(machine(range(8)), claimed=claimed)))
        with second.choosing() as claimed:
            assert claimed == {0, 1, 2}
            assert usable_cores(config, replace(machine(range(8)), claimed=claimed)) == (3, 4, 5)

    def test_cores_are_shared_when_there_are_too_few(self) -> None:
        config = load_config(overrides={"hardware.cpu_cores": 3})
        assert usable_cores(config, replace(machine(range(4)), claimed=frozenset({0, 1}))) == (0, 2, 3)

    def test_released_cores_are_free_again(self, tmp_path: Path) -> None:
        claims = CoreClaims(tmp_path)
        claims.take([4, 5])
        claims.release()
        with CoreClaims(tmp_path).choosing() as claimed:
            assert not claimed

    def test_a_claim_ends_with_its_process_however_that_ends(self, tmp_path: Path) -> None:
        code = """
import sys, time
from pathlib import Path
from duo_ray.hardware.cores import CoreClaims
claims = CoreClaims(Path(sys.argv[1]))
claims.take([4])
print(flush=True)
time.sleep(600)
"""
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with CoreClaims(tmp_path).choosing() as claimed:
                assert claimed == {4}
            other.kill()
            other.wait()
            with CoreClaims(tmp_path).choosing() as claimed:
                assert not claimed
