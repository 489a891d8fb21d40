"""The loop: for every request, draft and target at the same time, step after step."""

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
from duo_ray.actors.peers import Draft, DraftLost, DraftPeer, Judgement, ProbsHandle, ProbsLost, TargetLost, TargetPeer
from duo_ray.actors.rounds import Rounds
from duo_ray.actors.target import TargetInfo
from duo_ray.core.gamma import Acceptance, Costs, GammaController, Plan, Policy
from duo_ray.core.round import RoundPlanner
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.hardware.load import sample_load
from duo_ray.metrics import Meter, RequestMeter, StepTimes
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import Strategy
from duo_ray.types import (
    Delta,
    DraftBlock,
    DraftJob,
    DuoRayError,
    Finished,
    Request,
    Span,
    Token,
    TraceEvent,
    UnknownPrefix,
)

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
        self._planner: RoundPlanner[_Run] = RoundPlanner(
            settings.policy, self._costs, drafts=len(drafts), chunk=settings.chunk
        )
        self._rounds: Rounds[_Run] = Rounds(self._begin_round)
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
            DraftPeer(f"draft-{i}", handle, self._meter, tokenizer=tokenizer, limit=slots, observe=self._learn_draft)
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
                await _Run(self, request, meter, arrived).steps(emit)
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

    def _begin_round(self, runs: Sequence[_Run]) -> list[_Run]:
        return self._planner.begin(runs, rows=len(self._rounds), now=time.time())

    # --- for _Run

    @property
    def target(self) -> TargetPeer:
        return self._target

    @property
    def rounds(self) -> Rounds[_Run]:
        return self._rounds

    @property
    def planner(self) -> RoundPlanner[_Run]:
        return self._planner

    def choose_draft(self) -> DraftPeer | None:
        """The least busy draft that answers, else the least busy one."""
        return min(self._drafts, key=lambda draft: (not draft.available, draft.requests), default=None)

    def decoding(self, request: Request, stats: RequestStats, *, with_draft: bool) -> Decoding[ProbsHandle]:
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
            stats=stats,
            max_context=self._target_info.max_context,
            draft_context=min(info.max_context for info in self._draft_infos) if with_draft else None,
            max_sequences=self._settings.max_sequences,
            prefetch=self._settings.prefetch,
        )

    def learn_overhead(self, seconds: float) -> None:
        self._costs.observe_overhead(seconds)

    def _learn_draft(self, block: DraftBlock) -> None:
        for width, seconds in block.token_seconds:
            self._costs.observe_draft(width, seconds)

    def plain_seconds(self, requests: int) -> float:
        """Estimate of a target pass over one token of each of so many requests."""
        return self._costs.target_seconds(requests)


class _Run:
    """One request on its way through the actors."""

    def __init__(self, coordinator: Coordinator, request: Request, meter: RequestMeter, arrived: float) -> None:
        self._coordinator = coordinator
        self._meter = meter
        self._rounds, self._planner = coordinator.rounds, coordinator.planner
        self._request = request
        self._draft = coordinator.choose_draft() if request.draft else None
        self._stats = RequestStats(started=arrived, queued_s=time.time() - arrived)
        self.decoding = coordinator.decoding(request, self._stats, with_draft=self._draft is not None)
        self._pending: asyncio.Task[Draft] | None = None
        self._draft_fault: str | None = None
        self._trace: list[TraceEvent] = []
        self.prefilling = True
        """Whether the target does not hold the whole prompt yet."""
        self._in_step = False
        self._chunk = 1
        if self._draft is not None:
            self._draft.requests += 1

    async def steps(self, emit: Callable[[Delta | Finished], None]) -> None:
        """Step after step to the end of the request, or until it is cancelled; frees what it held in any case."""
        self._rounds.enter(self)
        try:
            while not self.decoding.finished:
                await self._step(lambda tokens: emit(Delta(tuple(tokens))) if tokens else None)
            emit(self._finished())
        finally:
            self._close()

    # --- rounds

    @property
    def shares_budget(self) -> bool:
        """Whether what this request drafts is decided together with what others do."""
        own = self._request.reproducible or self._request.draft_budget is not None
        return not self._in_step and not own and self.decoding.may_draft(self._without_draft())

    @property
    def waits_for_draft(self) -> bool:
        """Whether a block asked for in an earlier step has not come yet."""
        return self._pending is not None

    def begin_round(self, plan: Plan | None, chunk: int) -> bool:
        """Start a step, unless a prefill goes on. True: it has a lead that the others wait for."""
        self._chunk = chunk
        if self._in_step:
            return False
        self._in_step = True
        self.decoding.plan(without_draft=self._without_draft(), shared=plan)
        return self.decoding.leads and not self._request.reproducible

    async def _step(self, emit: Callable[[list[Token]], None]) -> None:
        decoding, stats = self.decoding, self._stats
        await self._rounds.join(self)
        began = time.time()
        lead = await self._lead()
        await self._rounds.all_led()
        sent, job = time.time(), None
        if self._without_draft() is None and (job := decoding.draft_job()) is not None:
            self._pending = self._ask(job)
        judgement = await self._judge()
        first = stats.first_token is None
        tokens = decoding.commit(judgement.verdict)
        if first:
            # Shown at once: the first token does not wait for the draft's prompt pass.
            emit(tokens + decoding.settle())
            tokens, stats.first_token = [], time.time()
        patience = 0.0
        if job is not None and not first and decoding.worth_waiting:
            patience = self._planner.patience(job.budget, waited=time.time() - sent, rows=len(self._rounds))
        block = await self._collect(patience)
        # One message a step: each costs the processes at both ends time that the models could use.
        emit(tokens + decoding.settle())
        self._in_step = False
        stats.ended = time.time()
        if first:
            self._meter.step(stats)
            return
        self._account(Span(began, stats.ended), judgement, lead, block)

    @property
    def _draft_name(self) -> str:
        return "" if self._draft is None else self._draft.name

    def _ask(self, job: DraftJob) -> asyncio.Task[Draft]:
        if self._draft is None:
            raise DuoRayError("a draft job for a request without a draft")
        return asyncio.create_task(self._draft.draft(job))

    async def _lead(self) -> DraftBlock | None:
        job = self.decoding.lead_job()
        if job is None:
            return None
        self._pending = self._ask(job)
        if self._request.reproducible:
            with self._rounds.away(self):
                await asyncio.wait([self._pending])
        else:
            patience = self._planner.lead_patience(job.budget, rows=len(self._rounds))
            await asyncio.wait([self._pending], timeout=patience)
            self._rounds.led(self)
        if not self._pending.done():
            return None
        answer = self._take()
        if answer is None:
            return None
        self.decoding.hold(*answer)
        self._note(self._draft_name, "lead", answer[0].span, tokens=answer[0].drafted)
        return answer[0]

    async def _judge(self) -> Judgement:
        """The target's verdict, however often the target has to be waited for, and however long the prompt is."""
        target, decoding = self._coordinator.target, self.decoding
        while True:
            job = decoding.verify_job(self._chunk)
            try:
                judgement = await target.verify(job, decoding.hand_probs)
            except TargetLost:
                with self._rounds.away(self):
                    await target.returned()
                decoding.target_lost()
            except UnknownPrefix:
                decoding.target_lost()
            except ProbsLost:
                decoding.drop_hand()
            else:
                self.prefilling = not decoding.prefilled(judgement.verdict)
                name = "prefill" if self.prefilling else "verify"
                self._note("target", name, judgement.span, block=len(job.block), accepted=judgement.verdict.accepted)
                if not self.prefilling:
                    return judgement
                await self._rounds.join(self)

    async def _collect(self, patience: float) -> DraftBlock | None:
        """The block written meanwhile, if it comes within `patience` seconds.

        One that is late already (a prompt pass, a busy core) is not waited for: the target goes on alone.
        """
        if self._pending is None:
            return None
        if self._request.reproducible:
            # Whether a block is late must not depend on time; others need not wait for it.
            with self._rounds.away(self):
                await asyncio.wait([self._pending])
        elif not self.decoding.finished:
            await asyncio.wait([self._pending], timeout=patience)
        if not self._pending.done():
            return None
        answer = self._take()
        if answer is None:
            return None
        block, probs = answer
        self.decoding.offer(block, probs)
        self._note(self._draft_name, "block", block.span, tokens=block.drafted, sequences=len(block.sequences))
        return block

    def _take(self) -> Draft | None:
        """The finished draft job's answer; a failed one leaves the request without a draft for now."""
        task, self._pending = self._pending, None
        if task is None:
            return None
        try:
            return task.result()
        except (DraftLost, UnknownPrefix):
            self.decoding.draft_lost()
        except Exception as error:  # whatever is wrong with the draft, the target's text does not depend on it
            self.decoding.draft_lost()
            self._draft_fault = f"draft failed: {error}"
            logger.warning("%s: %s; this request goes on without a draft", self._request.request_id, error)
        return None

    def _without_draft(self) -> str | None:
        """Why no draft can be asked now; None when one can."""
        if self._draft is None or self._draft_fault is not None:
            return self._draft_fault or "no draft"
        return None if self._draft.available else "draft not available"

    def _account(self, wall: Span, judgement: Judgement, lead: DraftBlock | None, block: DraftBlock | None) -> None:
        lead_seconds = lead.span.seconds if lead is not None else 0.0
        block_seconds = block.span.seconds if block is not None else 0.0
        overhead = self._stats.timed(wall, judgement.span, lead_seconds, block_seconds)
        self._coordinator.learn_overhead(overhead)
        plain = self._coordinator.plain_seconds(judgement.requests)
        self._meter.step(self._stats, StepTimes(judgement.span.seconds, overhead, plain))
        self._note("coordinator", "step", wall)

    def _note(self, actor: str, name: str, span: Span, **details: int) -> None:
        if self._request.trace:
            self._trace.append(TraceEvent(actor, name, span, tuple((k, str(v)) for k, v in details.items())))

    def _finished(self) -> Finished:
        decoding = self.decoding
        reason = decoding.generation.finish_reason
        if reason is None:
            raise DuoRayError("the stream ended before the request did")
        self._stats.load = asdict(sample_load(seconds=0.0))
        stats = self._stats.as_dict()
        self._meter.finished(reason)
        return Finished(reason, self._stats.prompt_tokens, self._stats.completion_tokens, stats, tuple(self._trace))

    def _close(self) -> None:
        request_id = self._request.request_id
        self._rounds.leave(self)
        self._coordinator.target.release(request_id)
        if self._draft is not None:
            self._draft.requests -= 1
            self._draft.release(request_id)
        if self._pending is not None:
            # The job may still run; its answer is of no use to anyone.
            self._pending.cancel()
