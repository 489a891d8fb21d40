"""The two models as one request sees them: what it may ask of them, what they answer, how they can be lost.

`actors.peers` reaches real ones in other processes; `planning.simulation` has some that only take their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from duo_ray.types import DraftBlock, DraftJob, DuoRayError, Span, Verdict, VerifyJob

Probs_contra = TypeVar("Probs_contra", contravariant=True)
Probs_co = TypeVar("Probs_co", covariant=True)


class DraftLost(DuoRayError):
    """The draft actor died under a job; the request goes on without it."""


class TargetLost(DuoRayError):
    """The target actor died under a job; the job can be sent again once it is back."""


class ProbsLost(DuoRayError):
    """The object store lost a block's probabilities (its node died): the block cannot be verified."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict and the pass it came from, or passes where further tokens were drawn."""

    verdict: Verdict
    span: Span
    requests: int
    """How many verdicts the pass gave."""
    passes: int = 1


class Target(Protocol[Probs_contra]):
    """The target, shared by all requests."""

    async def verify(self, job: VerifyJob, probs: Probs_contra | None) -> Judgement:
        """Raises `TargetLost`, `ProbsLost`, `UnknownPrefix`, or what the model raised."""
        ...

    async def returned(self) -> None:
        """Wait for a lost target. Raises `DuoRayError` when it will not come back."""
        ...

    def release(self, request_id: str) -> None:
        """Free what it holds of a request."""
        ...


class Drafter(Protocol[Probs_co]):
    """One of the drafts, shared by some of the requests."""

    requests: int
    """How many use it."""

    @property
    def name(self) -> str: ...

    @property
    def available(self) -> bool:
        """Whether it answers."""
        ...

    async def draft(self, quant: str, job: DraftJob) -> tuple[DraftBlock, Probs_co | None]:
        """Ask this quantisation of it. Raises `DraftLost`, `UnknownPrefix`, or what the model raised."""
        ...

    def abandon(self, request_id: str) -> None:
        """Nobody waits any more for what it is reading for a request."""
        ...

    def release(self, request_id: str) -> None:
        """Free what it holds of a request."""
        ...
