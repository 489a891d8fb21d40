"""The coordinator: many requests, one target, a group of drafts; who gets a slot, and what was learned from all."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle

from duo_ray.actors.draft import DraftInfo
from duo_ray.actors.peers import DraftPeer, ProbsHandle, TargetPeer
from duo_ray.actors.rounds import Rounds
from duo_ray.actors.run import Run
from duo_ray.actors.target import TargetInfo
from duo_ray.core.acceptance import Acceptance
from duo_ray.core.costs import Costs
from duo_ray.core.gamma import GammaController, Policy
from duo_ray.core.precision import Estimate, PrecisionChooser, Trial
from duo_ray.core.round import RoundPlanner
from duo_ray.core.spare_cores import SpareCores
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.hardware.load import sample_load
from duo_ray.metrics import Meter, RequestMeter
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import Strategy
from duo_ray.types import Delta, DraftBlock, DuoRayError, Finished, InvalidRequest, Request, SamplingParams, TargetReply

logger = logging.getLogger(__name__)

_TRIAL_TEXTS = (
    "Explain in a few sentences why ice floats on water.",
    "Write a Python function that returns the longest word of a text.",
)
"""What quantisations of the draft are first compared by: prose and code."""
_TRIAL_TOKENS, _TRIAL_BUDGET = 32, 4

_MESSAGE_INTERVAL_S = 0.02
"""Between two messages of a stream, at least: each costs this process and its reader about a millisecond, which a fast
target and its draft could use, and nobody reads faster."""
_MODELS_FIRST_S = 0.001
"""Between the tokens of a step and the message of them: meanwhile the models are asked for the next ones."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    tokenizer_path: str
    vocab_size: int
    """Ids that the target emits."""
    policy: Policy
    max_sequences: int
    prefetch: bool
    chunk: int
    """Prompt tokens per prefill pass; fewer while others are streaming."""
    calibration: dict[str, Any] | None
    """What an earlier start on this machine measured (`PipelineInfo.calibration`); reproducible requests rely on it."""


@dataclass(frozen=True, slots=True)
class PipelineInfo:
    """What is running, for `doctor` and the start-up message."""

    coordinator_pid: int
    target: TargetInfo
    drafts: tuple[DraftInfo, ...]
    target_restarts: int
    draft_restarts: int
    calibration: dict[str, Any]
    """Costs that reproducible requests rely on, the quantisation they use (`quant`), and what all of them showed when
    they were first compared (`trials`)."""
    measured: dict[str, object]
    """Costs as they are now."""
    precision: tuple[Estimate, ...]
    """What is expected of each quantisation of the draft."""


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
        self._tokenizer = Tokenizer.load(settings.tokenizer_path, rows=settings.vocab_size)
        self._costs = Costs()
        self._spare_cores = SpareCores(self._costs)
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
        # All drafts are loaded by now, and idle.
        own, alone = await self._target_handle.measure_alone.remote()
        if own:
            self._target_info = replace(self._target_info, timings=own)
        for match in dict.fromkeys(info.vocabulary for info in self._draft_infos):
            if match.strategy is not Strategy.SAME:
                logger.info("%s", match.describe())
        quants = list(self._draft_infos[0].timings) if self._draft_infos else [""]
        self._precision = PrecisionChooser(quants, self._settings.policy, self._costs)
        slots = self._target_info.slots
        self._target = TargetPeer(
            self._target_handle,
            self._meter,
            limit=slots,
            alone=self._works_alone,
            cannot=self._costs.drop_alone,
            observe=self._learn_target,
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
        for tokens, seconds in alone:
            self._costs.observe_target(tokens, seconds, alone=True)
        for info in self._draft_infos:
            for quant, timings in info.timings.items():
                for width, seconds in timings:
                    self._precision.knowledge[quant].costs.observe_draft(width, seconds)
        await self._calibrate(self._settings.calibration)
        self._meter.publish()
        return self.describe()

    def _works_alone(self, tokens: int) -> bool:
        """Whether the target is to have the spare cores for the coming pass."""
        return not any(draft.busy for draft in self._drafts) and self._spare_cores.lent(tokens)

    async def _calibrate(self, kept: dict[str, Any] | None) -> None:
        """Compare the quantisations of the draft, unless an earlier start did; settle what seeded requests use."""
        chooser = self._precision
        self._calibrated = self._costs.frozen()  # trials plan by what the warm-up showed
        trials = {quant: trial for quant, trial in (kept or {}).get("trials", {}).items() if quant in chooser.quants}
        if len(chooser.quants) > max(1, len(trials)):
            trials = {quant: asdict(await self._try(quant)) for quant in chooser.quants}
        chooser.compare({quant: Trial(**trial) for quant, trial in trials.items()})
        costs = chooser.knowledge[chooser.in_use].costs
        self._calibration = kept or {**costs.as_dict(), "quant": chooser.in_use, "trials": trials}
        # Read back as the next start will read it, so that both plan alike.
        self._calibrated = Costs.from_dict(self._calibration).frozen()
        quant = self._calibration.get("quant")
        self._calibrated_quant = quant if quant in chooser.quants else chooser.quants[0]

    async def _try(self, quant: str) -> Trial:
        """What one quantisation of the draft shows on texts that are the same for all."""
        policy = replace(self._settings.policy, draft_budget=_TRIAL_BUDGET, fallback=False)
        trials = []
        for number, text in enumerate(_TRIAL_TEXTS):
            chat = self._tokenizer.has_chat_template
            ids = self._tokenizer.chat([{"role": "user", "content": text}]) if chat else self._tokenizer.encode(text)
            prompt = tuple(ids[: self._target_info.max_context // 2])
            request = Request(
                f"trial-{quant}-{number}", prompt, SamplingParams(temperature=0.0), _TRIAL_TOKENS, ignore_eos=True,
                reproducible=True, draft_quant=quant,
            )  # fmt: skip
            with Meter().request() as meter:  # a user's figures know nothing of it
                run = self._run(request, meter, time.time(), policy)
                await run.steps(lambda _: None)
            trials.append(Trial.of(run.decoding.stats))
        return sum(trials[1:], trials[0])

    def describe(self) -> PipelineInfo:
        return PipelineInfo(
            coordinator_pid=os.getpid(),
            target=self._target_info,
            drafts=tuple(self._draft_infos),
            target_restarts=self._target.restarts,
            draft_restarts=sum(draft.restarts for draft in self._drafts),
            calibration=self._calibration,
            measured=self._precision.knowledge[self._precision.in_use].costs.as_dict(),
            precision=self._precision.estimates() if self._drafts else (),
        )

    def check(self) -> None:
        """Raises `DuoRayError` when no request can be served any more, now or later."""
        self._target.check()

    async def generate(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Stream one answer; a cancelled one ends without `Finished`.

        Whatever ends the stream, what the request holds on target and draft is freed within a step, or within a stretch
        of plain ones.
        """
        if request.request_id in self._streams:
            raise DuoRayError(f"request id {request.request_id} is in use")
        # Ray hands on each item before it asks for the next: the steps must not wait for that.
        items: asyncio.Queue[Delta | Finished | None] = asyncio.Queue()
        stream = self._streams[request.request_id] = asyncio.create_task(self._serve(request, items.put_nowait))
        stream.add_done_callback(lambda _: self._streams.pop(request.request_id))
        stream.add_done_callback(lambda _: items.put_nowait(None))
        try:
            async for item in gathered(items, _MESSAGE_INTERVAL_S):
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
                run = self._run(request, meter, arrived, self._settings.policy)
                try:
                    await run.steps(lambda tokens: emit(Delta(tuple(tokens))))
                finally:
                    self._learn_precision(run.decoding.stats)
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

    def _run(self, request: Request, meter: RequestMeter, arrived: float, policy: Policy) -> Run[ProbsHandle]:
        """A request that has its slot, with the least busy draft that answers, else the least busy one."""
        drafts = self._drafts if request.draft else []
        draft = min(drafts, key=lambda draft: (not draft.available, draft.requests), default=None)
        quant = None if draft is None else self._quant(request)
        decoding = self._decoding(request, arrived, quant, policy)
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

    def _quant(self, request: Request) -> str:
        """The quantisation of the draft that a request uses from its first step to its last."""
        if request.draft_quant is not None:
            if request.draft_quant not in self._precision.quants:
                loaded = ", ".join(self._precision.quants)
                raise InvalidRequest(f"draft_quant={request.draft_quant!r} is not loaded; there are: {loaded}")
            return request.draft_quant
        if request.reproducible:
            # The blocks of another would end elsewhere, and the same seed give another text.
            return self._calibrated_quant
        return self._precision.choose()

    def _decoding(self, request: Request, arrived: float, quant: str | None, policy: Policy) -> Decoding[ProbsHandle]:
        if request.draft_budget is not None:
            policy = replace(policy, draft_budget=request.draft_budget)
        if request.reproducible:
            # The schedule decides which tokens are heads; with live times the same seed would give another text.
            costs, acceptance = self._calibrated, Acceptance()
        else:
            known = self._precision.knowledge[quant or self._precision.in_use]
            costs, acceptance = known.costs, known.acceptance
        return Decoding(
            request,
            eos_ids=self._tokenizer.eos_ids,
            detokenizer=self._tokenizer.stream(),
            controller=GammaController(policy, costs, acceptance),
            stats=RequestStats(started=arrived, queued_s=time.time() - arrived, draft_quant=quant),
            max_context=self._target_info.max_context,
            draft_context=None if quant is None else min(info.max_context for info in self._draft_infos),
            max_sequences=self._settings.max_sequences,
            prefetch=self._settings.prefetch,
        )

    def _learn_target(self, reply: TargetReply) -> None:
        self._costs.observe_target(reply.tokens, reply.span.seconds / reply.passes, alone=reply.alone)

    def _learn_draft(self, quant: str, blocks: Sequence[DraftBlock]) -> None:
        self._precision.knowledge[quant].costs.observe_call(blocks)

    def _learn_precision(self, stats: RequestStats) -> None:
        if stats.draft_quant is not None:
            self._precision.observe(stats.draft_quant, Trial.of(stats))
            self._meter.tally.quantised(stats.draft_quant, self._precision.estimates())


async def gathered(
    items: asyncio.Queue[Delta | Finished | None], interval: float
) -> AsyncGenerator[Delta | Finished, None]:
    """What comes out of a queue, up to None; tokens that come within `interval` seconds of a message join the next."""
    loop = asyncio.get_running_loop()
    due, pause = loop.time(), 0.0
    while (item := await items.get()) is not None:
        due = max(due, loop.time() + pause)
        tokens = list(item.tokens) if isinstance(item, Delta) else []
        while isinstance(item, Delta) and (loop.time() < due or not items.empty()):
            try:
                async with asyncio.timeout_at(due):
                    item = await items.get()
            except TimeoutError:
                break
            tokens += item.tokens if isinstance(item, Delta) else ()
        if tokens:
            yield Delta(tuple(tokens))
            due, pause = loop.time() + interval, _MODELS_FIRST_S
        if isinstance(item, Finished):
            yield item
        if item is None:
            return


def _finished(run: Run[ProbsHandle], meter: RequestMeter) -> Finished:
    """The last message of an answer."""
    stats, reason = run.decoding.stats, run.decoding.generation.finish_reason
    if reason is None:
        raise DuoRayError("the stream ended before the request did")
    stats.load = asdict(sample_load(seconds=0.0))
    meter.finished(reason)
    return Finished(reason, stats.prompt_tokens, stats.completion_tokens, stats.as_dict(), tuple(run.trace))
