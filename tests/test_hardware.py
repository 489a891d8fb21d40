"""Who gets which core, and what is refused on which machine."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duo_ray import hardware
from duo_ray.config import ConfigError, load_config
from duo_ray.hardware import (
    CoreClaims,
    CoreSplit,
    Gpu,
    Machine,
    Plan,
    Share,
    check_machine,
    detect_machine,
    make_plan,
    pin,
    plan_cores,
    sample_load,
    show_cores,
    split_cores,
    target_device,
    usable_cores,
)

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


class TestSplit:
    def test_without_a_gpu_the_target_gets_half(self) -> None:
        assert split_cores(machine(range(8)), None, None, None, False) == CoreSplit((0, 1, 2, 3), ((4, 5, 6, 7),))

    def test_with_a_gpu_one_core_drives_it(self) -> None:
        assert split_cores(machine(range(8)), None, None, None, True) == CoreSplit((0,), (tuple(range(1, 8)),))

    def test_two_cores_are_one_each(self) -> None:
        assert split_cores(machine(range(2)), None, None, None, False) == CoreSplit((0,), ((1,),))

    def test_one_core_is_shared_and_says_so(self) -> None:
        split = split_cores(machine(range(1)), None, None, None, False)
        assert split == CoreSplit((0,), ((0,),))
        assert split.shared

    def test_the_affinity_is_all_that_is_shared_out(self) -> None:
        split = split_cores(machine(range(16)), (3, 5, 7, 9), None, None, False)
        assert split == CoreSplit((3, 5), ((7, 9),))

    @pytest.mark.parametrize(("cores", "actors"), [(2, 1), (9, 1), (16, 1), (17, 2), (25, 3)])
    def test_one_draft_actor_up_to_8_cores_then_one_for_every_8(self, cores: int, actors: int) -> None:
        assert len(split_cores(machine(range(cores)), None, None, None, True).drafts) == actors

    def test_more_threads_make_fewer_actors(self) -> None:
        split = split_cores(machine(range(33)), None, None, 16, True)
        assert [len(draft) for draft in split.drafts] == [16, 16]

    def test_each_draft_stays_inside_one_numa_node(self) -> None:
        split = split_cores(machine(range(12), range(12, 24)), None, 3, None, True)
        nodes = (set(range(12)), set(range(12, 24)))
        assert len(split.drafts) == 3
        assert all(any(set(draft) <= node for node in nodes) for draft in split.drafts)

    def test_more_actors_than_cores_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"draft_actors is 9, but only 7 cores"):
            split_cores(machine(range(8)), None, 9, None, True)

    def test_more_draft_threads_than_draft_cores_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"draft\.threads is 8, but a draft actor has 2 of the 4 cores \(2-3\)"):
            split_cores(machine(range(4)), None, None, 8, False)

    def test_cores_of_another_process_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="this process may use only 0-3"):
            split_cores(machine(range(4), present=8), (2, 5), None, None, False)

    @given(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
        actors=st.none() | st.integers(1, 12),
        on_gpu=st.booleans(),
    )
    @settings(deadline=None)
    def test_shares_are_disjoint_and_never_empty(self, sizes: list[int], actors: int | None, on_gpu: bool) -> None:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        nodes = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        total = sum(sizes)
        free = total - (1 if on_gpu else total // 2)
        if total == 1 or (actors or 1) > free:
            return
        split = split_cores(machine(*nodes), None, actors, None, on_gpu)
        everything = [*split.target, *(core for draft in split.drafts for core in draft)]
        assert len(everything) == len(set(everything))
        assert split.target
        assert all(split.drafts)
        assert actors is None or len(split.drafts) == actors
        assert all(any(set(draft) <= set(node) for node in nodes) for draft in split.drafts)


class TestCheck:
    def test_the_documented_example_fits_its_machine(self) -> None:
        config = load_config(
            overrides={
                "hardware.cpu_cores": 16,
                "hardware.gpu_type": "A800",
                "hardware.cpu_affinity": "0-15",
                "models.target.device": "cuda:0",
                "models.target.precision": "fp16",
                "models.draft.quant": "Q5_K_M",
                "models.draft.threads": 8,
            }
        )
        server = machine(range(32), gpus=(A800,))
        assert check_machine(config, server) == []
        assert plan_cores(config, server) == CoreSplit((0,), (tuple(range(1, 16)),))

    @pytest.mark.parametrize(
        ("overrides", "here", "message"),
        [
            (
                {"models.target.precision": "fp16"},
                machine(range(4)),
                r"precision is fp16, which is for GPUs; on a CPU use bf16, fp32 or auto",
            ),
            (
                {"models.target.precision": "fp16", "hardware.gpu_type": "none"},
                machine(range(4), gpus=(A800,)),
                r"precision is fp16",
            ),
            (
                {"models.target.attn_implementation": "flash_attention_2"},
                machine(range(4)),
                r"attn_implementation is flash_attention_2, which is for GPUs; on a CPU use sdpa",
            ),
            (
                {"models.target.attn_implementation": "flash_attention_2", "models.target.precision": "fp32"},
                machine(range(4), gpus=(A800,)),
                r"flash_attention_2, which is for half precision: set models\.target\.precision",
            ),
            ({"hardware.cpu_affinity": "2-9"}, machine(range(4)), r"names core 4-9, but this machine has 0-3"),
            (
                {"hardware.cpu_affinity": "2-9"},
                machine(range(4), present=16),
                r"names core 4-9, but this process may use only 0-3",
            ),
            ({"hardware.cpu_cores": 9}, machine(range(8)), r"cpu_cores is 9, but this process may use 8 cores: 0-7"),
            (
                {"hardware.cpu_cores": 4, "hardware.cpu_affinity": "0-2"},
                machine(range(8)),
                r"cpu_cores is 4, but hardware.cpu_affinity names 3 cores",
            ),
            ({"models.draft.threads": 3}, machine(range(4)), r"draft\.threads is 3, but a draft actor has 2"),
            ({"models.target.threads": 3}, machine(range(4)), r"target\.threads is 3, but the target has 2 cores"),
            ({"models.target.device": "cuda"}, machine(range(4)), r"device is cuda, but no NVIDIA GPU"),
            (
                {"models.target.device": "cuda:1"},
                machine(range(4), gpus=(A800,)),
                r"device is cuda:1, but there are 1 GPUs",
            ),
            (
                {"models.target.device": "cuda", "hardware.gpu_type": "none"},
                machine(range(4), gpus=(A800,)),
                r"device is cuda, but hardware.gpu_type is none",
            ),
            (
                {"hardware.gpu_type": "H100"},
                machine(range(4), gpus=(A800,)),
                r"gpu_type is H100, but cuda:0 is NVIDIA A800-SXM4-80GB",
            ),
        ],
    )
    def test_what_cannot_work_is_refused(self, overrides: dict[str, object], here: Machine, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_machine(load_config(overrides=overrides), here)

    def test_flash_attention_needs_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config, here = (
            load_config(overrides={"models.target.attn_implementation": "flash_attention_2"}),
            machine(range(4), gpus=(A800,)),
        )
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ConfigError, match="its package is not installed: pip install flash-attn, or use sdpa"):
            check_machine(config, here)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: "here")
        assert check_machine(config, here) == []

    @pytest.mark.parametrize(
        ("overrides", "here", "note"),
        [
            ({}, machine(range(1)), "share core 0"),
            ({"models.target.precision": "bf16"}, machine(range(4)), "only emulates"),
            ({"hardware.gpu_type": "A800"}, machine(range(4)), "the target runs on the CPU"),
            ({"hardware.cpu_cores": 8}, machine(range(8), cpu_limit=2.0), "CPU limit is 2"),
        ],
    )
    def test_what_works_badly_is_noted(self, overrides: dict[str, object], here: Machine, note: str) -> None:
        notes = check_machine(load_config(overrides=overrides), here)
        assert len(notes) == 1
        assert note in notes[0]

    def test_auto_takes_the_first_gpu(self) -> None:
        assert target_device(load_config(), machine(range(4), gpus=(A800, A800))) == "cuda:0"

    def test_auto_without_a_gpu_is_the_cpu(self) -> None:
        assert target_device(load_config(), machine(range(4))) == "cpu"

    def test_a_container_limit_bounds_the_cores_taken_by_default(self) -> None:
        assert usable_cores(load_config(), machine(range(8), cpu_limit=3.5)) == (0, 1, 2)

    def test_without_a_draft_all_cores_are_the_targets(self) -> None:
        config = load_config(overrides={"models.draft.model": None})
        assert plan_cores(config, machine(range(4))) == CoreSplit((0, 1, 2, 3), ())


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
from duo_ray.hardware import CoreClaims
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


class TestDetection:
    def test_this_machine_is_described(self) -> None:
        here = detect_machine()
        assert set(here.cores) == os.sched_getaffinity(0)
        assert sorted(core for node in here.numa_nodes for core in node) == list(here.cores)
        assert here.memory_total == psutil.virtual_memory().total
        assert 0 < here.effective_cores <= len(here.cores)

    def test_a_machine_that_tells_nothing_is_no_error(self, tmp_path: Path) -> None:
        here = detect_machine(tmp_path)
        assert here.numa_nodes == (here.cores,)
        assert here.isa == frozenset()
        assert here.cpu_limit is None

    def test_cpu_flags_are_summed_up(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(
            "model name\t: A CPU\nflags\t\t: sse2 avx2 avx512f avx512_vnni amx_tile\n"
        )
        here = detect_machine(tmp_path)
        assert here.cpu == "A CPU"
        assert here.isa == {"avx2", "avx512", "vnni", "amx"}

    def test_numa_nodes_come_in_numeric_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_a_container_limit_is_found(
        self, tmp_path: Path, group: str, files: dict[str, str], limit: float | None
    ) -> None:
        for name, text in {"proc/self/cgroup": group, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        assert detect_machine(tmp_path).cpu_limit == limit

    def test_load_has_one_share_for_each_core(self) -> None:
        load = sample_load(0.01)
        assert len(load.cores) == psutil.cpu_count()
        assert all(0.0 <= share <= 1.0 for share in load.cores)
        assert 0 < load.memory_used < load.memory_total

    def test_pinning_to_a_core_that_is_not_there_names_it(self) -> None:
        with pytest.raises(ConfigError, match="cannot pin to cores 4000"):
            pin([4000])

    def test_pinning_holds(self) -> None:
        before = os.sched_getaffinity(0)
        try:
            assert pin([min(before)]) is None
            assert os.sched_getaffinity(0) == {min(before)}
        finally:
            os.sched_setaffinity(0, before)

    def test_a_platform_without_affinity_gets_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "sched_setaffinity")
        assert "not pinned" in (pin([0]) or "")

    def test_cores_are_shown_as_ranges(self) -> None:
        assert show_cores((5, 0, 1, 2, 8, 9)) == "0-2,5,8-9"


class FakeNvml:
    """A driver with three GPUs, the second of which answers nothing but its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = hardware.pynvml
        for name in (
            "nvmlInit",
            "nvmlShutdown",
            "nvmlSystemGetDriverVersion",
            "nvmlDeviceGetCount",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetHandleByUUID",
            "nvmlDeviceGetName",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetUtilizationRates",
        ):
            monkeypatch.setattr(nvml, name, getattr(self, name))
        self.not_found = nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 2:
            raise self.not_found
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if not uuid.startswith("GPU-"):
            raise self.not_found
        return int(uuid[4:])

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:  # noqa: N802
        if handle == 1:
            raise self.not_found

        class Info:
            used, total = 10, 100

        return Info()

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:  # noqa: N802
        if handle == 1:
            raise self.not_found

        class Rates:
            gpu = 50

        return Rates()


class TestGpus:
    def test_no_driver_means_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent() -> None:
            raise hardware.pynvml.NVMLError(hardware.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(hardware.pynvml, "nvmlInit", absent)
        assert detect_machine().gpus == ()

    @pytest.mark.parametrize(
        ("visible", "names"),
        [
            (None, ["GPU 0", "GPU 1", "GPU 2"]),
            ("2,0", ["GPU 2", "GPU 0"]),
            ("GPU-1", ["GPU 1"]),
            ("0,7,1", ["GPU 0"]),
            ("", []),
        ],
    )
    def test_visible_gpus_come_in_cudas_order(
        self, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
    ) -> None:
        FakeNvml(monkeypatch)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.name for gpu in detect_machine().gpus] == names

    def test_a_gpu_that_answers_nothing_is_listed_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeNvml(monkeypatch)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        loads = sample_load(0.01).gpus
        assert [(load.utilisation, load.memory_total) for load in loads] == [(0.5, 100), (0.0, 0), (0.5, 100)]


CLUSTER = {"hardware.machine": "cluster", "models.target.device": "cuda"}


class TestPlan:
    def test_a_machine_is_shared_out_to_the_last_core(self) -> None:
        plan = make_plan(load_config(), machine(range(18), gpus=(A800,)))
        drafts = (Share(8, 8, tuple(range(1, 9))), Share(9, 9, tuple(range(9, 18))))
        assert plan == Plan("cuda:0", 1, Share(1, None, (0,)), drafts)

    def test_without_a_gpu_the_target_computes_on_all_its_cores(self) -> None:
        plan = make_plan(load_config(), machine(range(4)))
        assert plan == Plan("cpu", 0, Share(2, 2, (0, 1)), (Share(2, 2, (2, 3)),))

    def test_on_a_cluster_the_settings_say_it_all_and_no_core_has_a_number(self) -> None:
        settings = CLUSTER | {"optimization.draft_actors": 2, "models.draft.threads": 6}
        plan = make_plan(load_config(overrides=settings), machine(range(1)))
        assert plan == Plan("cuda:0", 1, Share(1, None), (Share(6, 6), Share(6, 6)))

    def test_on_a_cluster_a_draft_takes_8_cores_unless_told_otherwise(self) -> None:
        assert make_plan(load_config(overrides=CLUSTER), machine(range(1))).drafts == (Share(8, 8),)

    def test_on_a_cluster_a_target_may_run_on_cpus(self) -> None:
        settings = CLUSTER | {"models.target.device": "cpu", "models.target.threads": 3, "models.draft.model": None}
        assert make_plan(load_config(overrides=settings), machine(range(1))) == Plan("cpu", 0, Share(3, 3), ())

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"hardware.cpu_cores": 4}, "hardware.cpu_cores is 4, which is about this machine"),
            ({"hardware.cpu_affinity": "0-3"}, "hardware.cpu_affinity is 0-3, which is about this machine"),
            ({"hardware.gpu_type": "A800"}, "hardware.gpu_type is A800, which is about this machine"),
            ({"models.target.device": "auto"}, "models.target.device is auto, but .* set it to cuda .* or cpu"),
            ({"models.target.device": "cuda:1"}, "models.target.device is cuda:1, but .*which GPU is Ray's choice"),
            ({"models.target.device_map": "auto"}, "give the mapping"),
            ({"models.target.device": "cpu", "models.target.precision": "fp16"}, "use bf16 or fp32"),
        ],
    )
    def test_what_a_cluster_cannot_be_told_is_refused(self, setting: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make_plan(load_config(overrides=CLUSTER | setting), machine(range(8)))
