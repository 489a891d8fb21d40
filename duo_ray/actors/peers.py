"""The coordinator's side of each model actor: how it is reached, batched calls, loss, return."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError

from duo_ray.actors.batching import Batcher
from duo_ray.actors.models import DraftLost, Judgement, ProbsLost, TargetLost
from duo_ray.actors.node import node_id
from duo_ray.actors.target import ProbsPick
from duo_ray.actors.wire import Link, LinkLostError
from duo_ray.metrics import Meter
from duo_ray.types import DraftBlock, DraftJob, DuoRayError, TargetReply, VerifyJob

logger = logging.getLogger(__name__)

RETURN_DEADLINE_S = 600.0
"""How long a request waits for a restarted target (a large model loads for minutes)."""


@dataclass(frozen=True, slots=True)
class ProbsHandle:
    """What a draft returned beside its blocks, not unpacked here, and which entry of it belongs to this block.

    Between nodes it is a reference into the object store, on one node the bytes that came over the socket.
    """

    source: ray.ObjectRef | bytes
    entry: int


class _Peer:
    """An actor, the socket to it when it is on this node, and whether it answers; after a loss, until it is back."""

    def __init__(self, name: str, handle: ActorHandle, meter: Meter) -> None:
        self.name = name
        self._tally = meter.tally
        self._tally.actor(name)
        self.restarts = 0
        self._handle = handle
        self._link: Link | None = None
        self._up = asyncio.Event()
        self._gone: str | None = None
        self._recovery: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        return self._up.is_set()

    async def connect(self) -> None:
        """Open the socket where there can be one; actor calls do the same elsewhere."""
        node, path = await self._handle.listen.remote()
        self._link = await Link.open(path) if node == node_id() else None
        self._up.set()

    async def close(self) -> None:
        """Close the socket and wait for no return."""
        if self._recovery is not None:
            self._recovery.cancel()
        if self._link is not None:
            await self._link.aclose()

    def release(self, request_id: str) -> None:
        """Tell the actor to free the request; nothing to free when it is down."""
        if not self.available:
            return
        if self._link is not None:
            self._link.post("release", request_id)
        else:
            self._handle.release.remote(request_id)

    def _lost(self, error: Exception) -> str:
        self._up.clear()
        reason = _first_line(error)
        if self._recovery is None or self._recovery.done():
            logger.warning("%s was lost (%s); waiting for its restart", self.name, reason)
            self._recovery = asyncio.create_task(self._recover())
        return f"{self.name}: {reason}"

    async def _recover(self) -> None:
        began, pause = time.monotonic(), 0.1
        if self._link is not None:
            self._link.close()
        while time.monotonic() - began < RETURN_DEADLINE_S:
            try:
                await self.connect()
            except ActorDiedError as error:
                self._gone = _first_line(error)
                logger.error("%s will not come back: %s", self.name, self._gone)
                return
            except (RayActorError, OSError):
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
            else:
                self.restarts += 1
                self._tally.restarted(self.name)
                logger.warning("%s is back after %.1f s", self.name, time.monotonic() - began)
                return
        self._gone = f"it did not come back within {RETURN_DEADLINE_S:.0f} s"


class DraftPeer(_Peer):
    """One draft actor. `requests` counts those that use it, so that new ones go to the least busy."""

    def __init__(
        self,
        name: str,
        handle: ActorHandle,
        meter: Meter,
        *,
        tokenizer: ray.ObjectRef,
        limit: int,
        observe: Callable[[str, Sequence[DraftBlock]], None],
    ) -> None:
        """`tokenizer` is the target's; `observe` is told the quantisation and the blocks of every call."""
        super().__init__(name, handle, meter)
        self._tokenizer = tokenizer
        self.requests = 0
        self._observe = observe
        self._batcher: Batcher[tuple[str, DraftJob], Draft] = Batcher(
            self._call, isolate=_own_fault, limit=limit, group=lambda asked: None if asked[1].reproducible else asked[0]
        )

    async def connect(self) -> None:
        """Tell the draft the target's tokens, which a restarted one has forgotten, and open the socket."""
        await self._handle.adapt.remote(self._tokenizer)
        await super().connect()

    @property
    def busy(self) -> bool:
        """Whether it is at work, or about to be."""
        return self._batcher.busy

    def abandon(self, request_id: str) -> None:
        """See `actors.models.Drafter`. An actor call, which overtakes those that wait in the socket."""
        if self.available:
            self._handle.abandon.remote(request_id)

    async def draft(self, quant: str, job: DraftJob) -> Draft:
        """See `actors.models.Drafter`."""
        return await self._batcher.submit((quant, job))

    async def _call(self, asked: Sequence[tuple[str, DraftJob]]) -> list[Draft]:
        quant, jobs = asked[0][0], [job for _, job in asked]
        blocks: list[DraftBlock]
        source: ray.ObjectRef | bytes
        try:
            if self._link is not None:
                blocks, (source,) = await self._link.call("draft", (quant, jobs))
            else:
                blocks_ref, source = self._handle.draft.options(num_returns=2).remote(quant, jobs)
                blocks = await blocks_ref
        except (RayActorError, LinkLostError) as error:
            raise DraftLost(self._lost(error)) from error
        self._tally.busy(self.name, max(block.span.seconds for block in blocks))
        self._observe(quant, blocks)
        return [
            (block, None if job.sampling.greedy else ProbsHandle(source, entry))
            for entry, (job, block) in enumerate(zip(jobs, blocks, strict=True))
        ]


class TargetPeer(_Peer):
    """The target actor."""

    def __init__(
        self,
        handle: ActorHandle,
        meter: Meter,
        *,
        limit: int,
        alone: Callable[[int], bool],
        observe: Callable[[TargetReply], None],
        cannot: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        alone: whether a pass over so many tokens is to have the spare cores, too: no draft is at work.
        observe: told, once, of every call without a prefill.
        cannot: told when a target that might have had them had not: it came back on another node.
        """
        super().__init__("target", handle, meter)
        self._alone, self._observe, self._cannot = alone, observe, cannot
        self._batcher: Batcher[tuple[VerifyJob, ProbsHandle | None], Judgement] = Batcher(
            self._call, isolate=_own_fault, limit=limit
        )

    async def verify(self, job: VerifyJob, probs: ProbsHandle | None) -> Judgement:
        """See `actors.models.Target`."""
        if self._link is not None and probs is not None and not isinstance(probs.source, bytes):
            # Fetched here: between taking a job from the queue and sending it nothing may be waited for, so that a
            # release sent after it is obeyed after it.
            try:
                probs = ProbsHandle(pickle.dumps(await probs.source), probs.entry)
            except ObjectLostError as error:
                raise ProbsLost(_first_line(error)) from error
        return await self._batcher.submit((job, probs))

    async def returned(self) -> None:
        """See `actors.models.Target`."""
        while not self.available:
            self.check()
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raises `DuoRayError` when it will not come back."""
        if self._gone is not None:
            raise DuoRayError(f"the target is gone for good: {self._gone}")

    async def _call(self, batch: Sequence[tuple[VerifyJob, ProbsHandle | None]]) -> list[Judgement]:
        jobs = [job for job, _ in batch]
        sources: list[ray.ObjectRef | bytes] = []
        picks: list[ProbsPick | None] = []
        for _, probs in batch:
            if probs is not None and probs.source not in sources:
                sources.append(probs.source)
            picks.append(None if probs is None else ProbsPick(sources.index(probs.source), probs.entry))
        width = sum(_width(job) for job in jobs)
        reply: TargetReply
        try:
            if self._link is not None:
                parts = [each if isinstance(each, bytes) else pickle.dumps(await each) for each in sources]
                alone = self._alone(width)
                reply, _ = await self._link.call("verify", (jobs, picks, alone), parts)
            else:
                alone = self._alone(width)
                reply = await self._handle.verify.remote(jobs, picks, alone, *sources)
        except (RayActorError, LinkLostError) as error:
            raise TargetLost(self._lost(error)) from error
        except ObjectLostError as error:
            raise ProbsLost(_first_line(error)) from error
        self._tally.busy(self.name, reply.span.seconds)
        if alone and not reply.alone:
            self._cannot()
        if reply.tokens <= width and not any(_prefills(job) for job in jobs):
            self._observe(reply)
        return [Judgement(verdict, reply.span, len(jobs), reply.passes) for verdict in reply.verdicts]


Draft = tuple[DraftBlock, ProbsHandle | None]


def _prefills(job: VerifyJob) -> bool:
    """Whether the target has not run all of the request's prompt yet, or has lost it."""
    return not (job.context.agreed and job.context.ids)


def _width(job: VerifyJob) -> int:
    """New tokens of the coming pass, unless the target has lost something: it holds what it accepted and drew."""
    if not _prefills(job):
        return 1 + len(job.block)
    missing = len(job.context.ids) or job.chunk or 1  # no ids: the prefill goes on
    return min(missing, job.chunk or missing) + len(job.block)


def _own_fault(error: Exception) -> bool:
    """Whether an error may be the fault of one job of a batch, not of the actor."""
    return not isinstance(error, DraftLost | TargetLost)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
