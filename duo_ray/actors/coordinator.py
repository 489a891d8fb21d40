"""The coordinator: many requests, one target, a group of drafts; who gets a slot, and what was learned from all."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, replace

import ray
from ray.actor import ActorHandle

from duo_ray.actors.draft import DraftInfo
from duo_ray.actors.peers import DraftPeer, ProbsHandle, TargetPeer
from duo_ray.actors.rounds import Rounds
from duo_ray.actors.run import Run
from duo_ray.actors.target import TargetInfo
from duo_ray.core.gamma import Acceptance, Costs, GammaController, Policy
from duo_ray.core.round import RoundPlanner
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.hardware.load import sample_load
from duo_ray.metrics import Meter, RequestMeter
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import Strategy
from duo_ray.types import Delta, DuoRayError, Finished, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    tokenizer_path: str
    policy: Policy
    max_sequences: int
    prefetch: bool
    chunk: int
    """Prompt tokens per prefill pass; fewer while others are streaming."""
    calibration: dict[str, object] | None
    """Costs measured at an earlier start on this machine; reproducible requests rely on them."""


@dataclass(frozen=True, slots=True)
class PipelineInfo:
    """What is running, for `doctor` and the start-up message."""

    coordinator_pid: int
    target: TargetInfo
    drafts: tuple[DraftInfo, ...]
    target_restarts: int
    draft_restarts: int
    calibration: dict[str, object]
    """Costs that reproducible requests rely on."""
    measured: dict[str, object]
    """Costs as they are now."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a pipeline is."""

    running: int
    """Requests that hold a slot."""
    queued: int
    """Requests that wait for one, first come, first served."""


class Coordinator:
    """Async Ray actor: many requests, one target, a group of drafts. Needs no GPU and next to no CPU."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        target: ActorHandle,
        drafts: list[ActorHandle],
        meter: Meter | None = None,
    ) -> None:
        self._settings = settings
        self._meter = meter or Meter()
        self._target_handle, self._draft_handles = target, drafts
        self._tokenizer = Tokenizer.load(settings.tokenizer_path)
        self._acceptance = Acceptance()
        self._costs = Costs()
        self._planner: RoundPlanner[Run[ProbsHandle]] = RoundPlanner(
            settings.policy, self._costs, drafts=len(drafts), chunk=settings.chunk
        )
        self._rounds: Rounds[Run[ProbsHandle]] = Rounds(self._begin_round)
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._queued = 0

    async def start(self) -> PipelineInfo:
        """Wait until every actor is loaded and warm, and take over their measured times."""
        self._target_info: TargetInfo = await self._target_handle.describe.remote()
        # Too large for an actor's settings, which Ray would have to keep for its restart.
        tokenizer = ray.put(self._tokenizer)
        self._draft_infos: list[DraftInfo] = [await handle.adapt.remote(tokenizer) for handle in self._draft_handles]
        for match in dict.fromkeys(info.vocabulary for info in self._draft_infos):
            if match.strategy is not Strategy.SAME:
                logger.info("%s", match.describe())
        slots = self._target_info.slots
        self._target = TargetPeer(
            self._target_handle,
            self._meter,
            limit=slots,
            observe=lambda reply: self._costs.observe_target(reply.tokens, reply.span.seconds),
        )
        self._drafts = [
            DraftPeer(
                f"draft-{i}", handle, self._meter, tokenizer=tokenizer, limit=slots, observe=self._costs.observe_call
            )
            for i, handle in enumerate(self._draft_handles)
        ]
        for peer in (self._target, *self._drafts):
            await peer.connect()
        self._slots = asyncio.Semaphore(slots)
        for tokens, seconds in self._target_info.timings:
            self._costs.observe_target(tokens, seconds)
        for info in self._draft_infos:
            for width, seconds in info.timings:
                self._costs.observe_draft(width, seconds)
        # Read back as the next start will read it, so that both plan alike.
        self._calibration = self._settings.calibration or self._costs.as_dict()
        self._calibrated = Costs.from_dict(self._calibration).frozen()
        self._meter.publish()
        return self.describe()

    def describe(self) -> PipelineInfo:
        return PipelineInfo(
            coordinator_pid=os.getpid(),
            target=self._target_info,
            drafts=tuple(self._draft_infos),
            target_restarts=self._target.restarts,
            draft_restarts=sum(draft.restarts for draft in self._drafts),
            calibration=self._calibration,
            measured=self._costs.as_dict(),
        )

    def check(self) -> None:
        """Raises `DuoRayError` when no request can be served any more, now or later."""
        self._target.check()

    async def generate(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Stream one answer; a cancelled one ends without `Finished`.

        Whatever ends the stream, what the request holds on target and draft is freed within a step.
        """
        if request.request_id in self._streams:
            raise DuoRayError(f"request id {request.request_id} is in use")
        # Ray hands on each item before it asks for the next: the steps must not wait for that.
        items: asyncio.Queue[Delta | Finished | None] = asyncio.Queue()
        stream = self._streams[request.request_id] = asyncio.create_task(self._serve(request, items.put_nowait))
        stream.add_done_callback(lambda _: self._streams.pop(request.request_id))
        stream.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item
            if not stream.cancelled():
                await stream  # raises what went wrong
        finally:
            stream.cancel()
            await asyncio.wait([stream])

    async def _serve(self, request: Request, emit: Callable[[Delta | Finished], None]) -> None:
        arrived = time.time()
        with self._meter.request() as meter:
            self._queued += 1
            try:
                await self._slots.acquire()
            finally:
                self._queued -= 1
            meter.admitted()
            try:
                run = self._run(request, meter, arrived)
                await run.steps(lambda tokens: emit(Delta(tuple(tokens))))
                emit(_finished(run, meter))
            finally:
                self._slots.release()

    async def cancel(self, request_id: str) -> None:
        """End a stream, whatever it waits for; unknown or finished requests are ignored."""
        if request_id in self._streams:
            self._streams[request_id].cancel()

    async def close(self) -> None:
        """Close the connections to the models; the object is of no use afterwards."""
        for peer in (self._target, *self._drafts):
            await peer.close()

    def load(self) -> Load:
        """How many requests run and wait."""
        return Load(running=len(self._rounds), queued=self._queued)

    def _begin_round(self, runs: Sequence[Run[ProbsHandle]]) -> list[Run[ProbsHandle]]:
        return self._planner.begin(runs, rows=len(self._rounds), now=time.time())

    def _run(self, request: Request, meter: RequestMeter, arrived: float) -> Run[ProbsHandle]:
        """A request that has its slot, with the least busy draft that answers, else the least busy one."""
        drafts = self._drafts if request.draft else []
        draft = min(drafts, key=lambda draft: (not draft.available, draft.requests), default=None)
        decoding = self._decoding(request, arrived, with_draft=draft is not None)
        return Run(
            decoding,
            target=self._target,
            draft=draft,
            rounds=self._rounds,
            planner=self._planner,
            costs=self._costs,
            clock=time.time,
            stepped=lambda times: meter.step(decoding.stats, times),
        )

    def _decoding(self, request: Request, arrived: float, *, with_draft: bool) -> Decoding[ProbsHandle]:
        policy = self._settings.policy
        if request.draft_budget is not None:
            policy = replace(policy, draft_budget=request.draft_budget)
        costs, acceptance = self._costs, self._acceptance
        if request.reproducible:
            # The schedule decides which tokens are heads; with live times the same seed would give another text.
            costs, acceptance = self._calibrated, Acceptance()
        return Decoding(
            request,
            eos_ids=self._tokenizer.eos_ids,
            detokenizer=self._tokenizer.stream(),
            controller=GammaController(policy, costs, acceptance),
            stats=RequestStats(started=arrived, queued_s=time.time() - arrived),
            max_context=self._target_info.max_context,
            draft_context=min(info.max_context for info in self._draft_infos) if with_draft else None,
            max_sequences=self._settings.max_sequences,
            prefetch=self._settings.prefetch,
        )


def _finished(run: Run[ProbsHandle], meter: RequestMeter) -> Finished:
    """The last message of an answer."""
    stats, reason = run.decoding.stats, run.decoding.generation.finish_reason
    if reason is None:
        raise DuoRayError("the stream ended before the request did")
    stats.load = asdict(sample_load(seconds=0.0))
    meter.finished(reason)
    return Finished(reason, stats.prompt_tokens, stats.completion_tokens, stats.as_dict(), tuple(run.trace))
