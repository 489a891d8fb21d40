"""Heterogeneous speculative decoding: a draft on the CPU and the target on the GPU at the same time, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duo_ray.config import Config, load_config
from duo_ray.types import DuoRayError, Finished, FinishReason, Origin, Request, SamplingParams, Token

if TYPE_CHECKING:
    from duo_ray.client import DuoClient
    from duo_ray.session import Answer, Duo

__all__ = [
    "Answer",
    "Config",
    "Duo",
    "DuoClient",
    "DuoRayError",
    "FinishReason",
    "Finished",
    "Origin",
    "Request",
    "SamplingParams",
    "Token",
    "load_config",
]


def __getattr__(name: str) -> Any:
    """Ray is imported only when it is needed: `duo_ray.core` and the models do without."""
    if name in ("Answer", "Duo"):
        from duo_ray import session  # noqa: PLC0415

        return getattr(session, name)
    if name == "DuoClient":
        from duo_ray.client import DuoClient  # noqa: PLC0415

        return DuoClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
