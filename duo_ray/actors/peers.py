"""The coordinator's side of each model actor: batched calls, loss, return."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError

from duo_ray.actors.batching import Batcher
from duo_ray.actors.target import ProbsPick
from duo_ray.types import DraftBlock, DraftJob, DuoRayError, Span, TargetReply, UnknownPrefix, Verdict, VerifyJob

logger = logging.getLogger(__name__)

RETURN_DEADLINE_S = 600.0
"""How long a request waits for a restarted target (a large model loads for minutes)."""


class DraftLost(DuoRayError):
    """The draft actor died under a job; the request goes on without it."""


class TargetLost(DuoRayError):
    """The target actor died under a job; the job can be sent again once it is back."""


class ProbsLost(DuoRayError):
    """The object store lost a block's probabilities (its node died): the block cannot be verified."""


@dataclass(frozen=True, slots=True)
class ProbsRef:
    """Reference to what a draft actor returned beside its blocks, and which entry belongs to this block."""

    ref: ray.ObjectRef
    entry: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict and the pass it came from."""

    verdict: Verdict
    span: Span
    tokens: int


class _Lifeline:
    """Whether an actor answers; after a loss, asks until it is back."""

    def __init__(self, name: str, handle: ActorHandle) -> None:
        self.name = name
        self.up = asyncio.Event()
        self.up.set()
        self.gone: str | None = None
        self.restarts = 0
        self._handle = handle
        self._recovery: asyncio.Task[None] | None = None

    def lost(self, error: Exception) -> None:
        self.up.clear()
        if self._recovery is None or self._recovery.done():
            logger.warning("%s was lost (%s); waiting for its restart", self.name, _first_line(error))
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        began, pause = time.monotonic(), 0.1
        while time.monotonic() - began < RETURN_DEADLINE_S:
            try:
                await self._handle.describe.remote()
            except ActorDiedError as error:
                self.gone = _first_line(error)
                logger.error("%s will not come back: %s", self.name, self.gone)
                return
            except RayActorError:
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
            else:
                self.restarts += 1
                logger.warning("%s is back after %.1f s", self.name, time.monotonic() - began)
                self.up.set()
                return
        self.gone = f"it did not come back within {RETURN_DEADLINE_S:.0f} s"


class DraftPeer:
    """One draft actor. `requests` counts those that use it, so that new ones go to the least busy."""

    def __init__(self, name: str, handle: ActorHandle, *, limit: int) -> None:
        self.name = name
        self.requests = 0
        self._handle = handle
        self._life = _Lifeline(name, handle)
        self._batcher: Batcher[DraftJob, tuple[DraftBlock, ProbsRef | None]] = Batcher(
            self._call, isolate=_own_fault, limit=limit
        )

    @property
    def available(self) -> bool:
        return self._life.up.is_set()

    @property
    def restarts(self) -> int:
        return self._life.restarts

    async def draft(self, job: DraftJob) -> tuple[DraftBlock, ProbsRef | None]:
        """Raises `DraftLost`, `UnknownPrefix`, or what the model raised."""
        return await self._batcher.submit(job)

    async def _call(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftBlock, ProbsRef | None]]:
        blocks_ref, probs_ref = self._handle.draft.options(num_returns=2).remote(jobs)
        try:
            blocks: list[DraftBlock] = await blocks_ref
        except RayActorError as error:
            self._life.lost(error)
            raise DraftLost(f"{self.name}: {_first_line(error)}") from error
        return [
            (block, None if job.sampling.greedy else ProbsRef(probs_ref, entry))
            for entry, (job, block) in enumerate(zip(jobs, blocks, strict=True))
        ]

    def release(self, request_id: str) -> None:
        """Tell the actor to free the request; nothing to free when it is down."""
        if self.available:
            self._handle.release.remote(request_id)


class TargetPeer:
    """The target actor."""

    def __init__(self, handle: ActorHandle, *, limit: int) -> None:
        self._handle = handle
        self._life = _Lifeline("target", handle)
        self._batcher: Batcher[tuple[VerifyJob, ProbsRef | None], Judgement] = Batcher(
            self._call, isolate=_own_fault, limit=limit
        )

    @property
    def restarts(self) -> int:
        return self._life.restarts

    async def verify(self, job: VerifyJob, probs: ProbsRef | None) -> Judgement:
        """Raises `TargetLost`, `ProbsLost`, `UnknownPrefix`, or what the model raised."""
        return await self._batcher.submit((job, probs))

    async def returned(self) -> None:
        """Wait for a lost target. Raises `DuoRayError` when it will not come back."""
        while not self._life.up.is_set():
            if self._life.gone is not None:
                raise DuoRayError(f"the target is gone for good: {self._life.gone}")
            await asyncio.wait([asyncio.ensure_future(self._life.up.wait())], timeout=1.0)

    async def _call(self, batch: Sequence[tuple[VerifyJob, ProbsRef | None]]) -> list[Judgement]:
        refs: list[ray.ObjectRef] = []
        picks: list[ProbsPick | None] = []
        for _, probs in batch:
            if probs is None:
                picks.append(None)
                continue
            if probs.ref not in refs:
                refs.append(probs.ref)
            picks.append(ProbsPick(refs.index(probs.ref), probs.entry))
        try:
            reply: TargetReply = await self._handle.verify.remote([job for job, _ in batch], picks, *refs)
        except RayActorError as error:
            self._life.lost(error)
            raise TargetLost(f"target: {_first_line(error)}") from error
        except ObjectLostError as error:
            raise ProbsLost(_first_line(error)) from error
        return [Judgement(verdict, reply.span, reply.tokens) for verdict in reply.verdicts]

    def release(self, request_id: str) -> None:
        if self._life.up.is_set():
            self._handle.release.remote(request_id)


def _own_fault(error: Exception) -> bool:
    """Whether an error may be the fault of one job of a batch, not of the actor."""
    return not isinstance(error, DraftLost | TargetLost | UnknownPrefix)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
