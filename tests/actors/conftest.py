"""One running pipeline for all tests of a module that only read from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duo_ray.config import load_config
from duo_ray.session import Duo

SMALL = {
    "models.target.precision": "fp32",
    "models.target.max_seq_len": 640,
    "models.target.slots": 4,
    "optimization.warmup_steps": 6,
    "optimization.fallback": False,
}
"""Settings of every pipeline here: float32, where greedy output has no ties to excuse; no fallback, so that drafting
does not depend on how busy the machine is."""


@pytest.fixture(scope="module")
def duo() -> Iterator[Duo]:
    with Duo(load_config(None, SMALL)) as running:
        yield running
