"""Fixtures shared by all tests, and which tests this machine can run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are deselected where torch sees no CUDA device, or a package the marker names is missing."""
    unfit = [item for item in items if (marker := item.get_closest_marker("gpu")) and not _gpu_with(*marker.args)]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


def _gpu_with(*packages: str) -> bool:
    import torch

    return torch.cuda.is_available() and all(find_spec(package) for package in packages)


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


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """A model with another tokenizer than the demo model: Gemma 3 270M, base, Q4_K_M."""
    from benchmarks.drafts import gemma

    return gemma()


@pytest.fixture(scope="session")
def gemma_target(gemma_gguf: Path) -> Path:
    """Gemma 3 270M as a directory for transformers (converted once, then cached)."""
    from duo_ray.models.catalog import resolve_target

    return resolve_target(str(gemma_gguf)).path
