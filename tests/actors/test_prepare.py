"""What will be taken is known, and refused where it is not there, before any model is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duo_ray.actors.prepare import check_room, prepare
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
