"""Fixtures shared by all tests, and which tests this machine can run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are deselected where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _cuda():
        return
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file: SmolLM2-135M-Instruct, Q4_1."""
    from duo_ray.models.catalog import resolve_draft

    return resolve_draft("demo")


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The demo model as a directory for transformers (converted once, then cached)."""
    from duo_ray.models.catalog import resolve_target

    return resolve_target("demo").path
