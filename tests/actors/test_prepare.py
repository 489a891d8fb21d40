"""What will be taken is known, and refused where it is not there, before any model is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duo_ray.actors.prepare import as_many_as_fit, check_room, prepare
from duo_ray.config import ConfigError, load_config

pytestmark = pytest.mark.models


def test_memory_is_said_for_each_model_and_what_does_not_fit_is_refused() -> None:
    prepared = prepare(
        load_config(None, {"models.target.precision": "fp32", "hardware.gpu_type": "none", "models.target.slots": 2})
    )
    prepared.claims.release()
    assert list(prepared.memory) == ["target", "draft 0"]
    sizes = {name: size.total for name, size in prepared.memory.items()}
    assert sizes["target"] > 4 * 134e6 > sizes["draft 0"] > 90e6
    assert "target in transformers, float32" in prepared.settings.summary
    small = replace(prepared.machine, memory_available=sum(sizes.values()) - 2**20)
    with pytest.raises(ConfigError, match=r"models\.target\.max_seq_len: 2048 or models\.target\.slots: 1 would fit"):
        check_room(prepared.memory, prepared.settings, small)


def test_quantisations_of_the_draft_are_loaded_as_far_as_memory_allows() -> None:
    config = load_config(
        None,
        {
            "models.draft.quant": "auto",
            "models.target.precision": "fp32",
            "hardware.gpu_type": "none",
            "models.target.slots": 2,
            "models.target.max_seq_len": 512,
        },
    )
    prepared = prepare(config)
    prepared.claims.release()
    assert [quant for quant, _ in prepared.settings.drafts[0].files] == ["Q4_1", "Q4_0", "Q2_K"]
    assert prepared.draft_path is not None
    assert prepared.draft_path.samefile(prepared.settings.drafts[0].files[0][1])
    together = prepared.memory["draft 0"].total
    needed = sum(size.total for size in prepared.memory.values())
    notes: list[str] = []
    for spare, loaded in ((together, "Q4_1 Q4_0 Q2_K"), (together // 4, "Q4_1 Q4_0"), (-(2**30), "Q2_K")):
        small = replace(prepared.machine, memory_available=needed + spare)
        fitting = as_many_as_fit(prepared.settings, small, notes)
        assert [[quant for quant, _ in draft.files] for draft in fitting.drafts] == [loaded.split()], spare
    assert notes[0] == "quantisations of the draft: Q4_1, Q4_0, Q2_K"
    assert notes[2].startswith("quantisations of the draft: Q2_K; Q4_1, Q4_0 would leave less than half of the memory")


@pytest.mark.parametrize(("machine", "on_one_cpu"), [("this", True), ("cluster", False)])
def test_drafting_has_to_earn_more_where_both_models_run_on_one_cpu(machine: str, on_one_cpu: bool) -> None:
    wanted = {"models.target.precision": "fp32", "models.target.device": "cpu", "hardware.machine": machine}
    prepared = prepare(load_config(None, wanted))
    prepared.claims.release()
    assert (prepared.settings.coordinator.policy.contention > 0.0) == on_one_cpu
