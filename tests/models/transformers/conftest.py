"""Tiny models, and targets over copies of them."""

from __future__ import annotations

from typing import Any

import pytest

from duo_ray.models.transformers import TransformersTarget
from tests.models.tiny_transformers import CONFIGS, tiny_model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, TransformersTarget]:
    """A model, and a target over another copy of it."""
    return tiny_model(request.param), TransformersTarget(tiny_model(request.param), slots=3, max_context=200, chunk=16)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def target() -> TransformersTarget:
    return TransformersTarget(tiny_model("llama"), slots=3, max_context=120)
