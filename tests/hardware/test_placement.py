"""Who gets which core, and what is refused on which machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duo_ray.config import ConfigError, load_config
from duo_ray.hardware.machine import Machine
from duo_ray.hardware.placement import (
    CoreSplit,
    Plan,
    Share,
    check_machine,
    make_plan,
    plan_cores,
    split_cores,
    target_cores,
    target_device,
    usable_cores,
)
from tests.hardware.machines import A800, machine

CLUSTER = {"hardware.machine": "cluster", "models.target.device": "cuda"}


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


class TestTargetCores:
    """Own cores of a target, and more for passes that they make faster."""

    DRAFTS = (Share(2, 2, (4, 5)), Share(2, 2, (6, 7)))

    @staticmethod
    def asked(drafts: tuple[Share, ...], engine: str = "llama_cpp", device: str = "cpu", **settings: object):
        return target_cores(load_config(None, settings), Plan(device, 0, Share(4, 4, (0, 1, 2, 3)), drafts), engine)

    def test_in_llama_cpp_it_may_have_those_of_the_drafts(self) -> None:
        assert self.asked(self.DRAFTS) == ((0, 1, 2, 3), (4, 5, 6, 7))

    def test_without_a_draft_it_leaves_one_to_the_rest_of_the_pipeline_in_passes_of_few_tokens(self) -> None:
        assert self.asked(()) == ((0, 1, 2), (3,))

    @pytest.mark.parametrize(
        "change",
        [{"engine": "transformers"}, {"device": "cuda:0"}, {"models.target.threads": 2}],
    )
    @pytest.mark.parametrize("drafts", [DRAFTS, ()])
    def test_others_have_their_own(self, change: dict[str, object], drafts: tuple[Share, ...]) -> None:
        assert self.asked(drafts, **change) == ((0, 1, 2, 3), ())
