"""The coordinator's loop in simulated time: the real controllers, rounds, batches and statistics, over models that only
wait.

A simulated text is a row of positions at each of which the draft's best guess is the target's token or is not, with
the acceptance asked for. Target and draft take the seconds their curves say; everything else (who plans, what is sent
when, what is waited for and for how long, late blocks, the first step, batches of several requests) is done as
`actors.run` does it, or by the same code. The guesses depend on the position alone, so that two schedules
simulated with one seed are compared on the same text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from duo_ray.actors.batching import Batcher
from duo_ray.actors.rounds import Rounds
from duo_ray.core.gamma import LARGEST, Acceptance, Costs, GammaController, Plan, Policy
from duo_ray.core.round import RoundPlanner
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.planning.scenario import Hardware, Text, Traffic
from duo_ray.planning.virtual_time import VirtualTime
from duo_ray.planning.writer import Writer, Written
from duo_ray.types import DraftBlock, DraftJob, Request, SamplingParams, Span, Verdict

_WARM_TARGET, _WARM_DRAFT = (1, 2, 4, 8, 16, 32), (1, 2, 4)
"""Widths that both models are timed at before the first request."""


@dataclass(frozen=True, slots=True)
class Served:
    """One simulated request."""

    arrived: float
    began: float
    """When it got its slot."""
    stats: RequestStats
    plans: tuple[Plan, ...]
    """One for each step."""

    @property
    def first_token(self) -> float:
        return self.stats.first_token if self.stats.first_token is not None else self.ended

    @property
    def ended(self) -> float:
        return self.stats.ended if self.stats.ended is not None else self.began


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a clock and the counters would have shown."""

    served: tuple[Served, ...]
    seconds: float
    """From the first arrival to the last token."""

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return sum(each.stats.completion_tokens for each in self.served) / self.seconds

    @property
    def decode_speed(self) -> float:
        """Tokens per second of one request after its first token, on average."""
        tokens = sum(each.stats.completion_tokens - 1 for each in self.served)
        seconds = sum(each.ended - each.first_token for each in self.served)
        return tokens / seconds if seconds else 0.0

    @property
    def time_to_first_token(self) -> float:
        return float(np.mean([each.first_token - each.arrived for each in self.served]))

    @property
    def waiting(self) -> list[float]:
        """Seconds each request waited for a slot."""
        return [each.began - each.arrived for each in self.served]

    def mean(self, figure: str) -> float:
        """Mean over the requests of one numeric entry of `RequestStats.as_dict`."""
        return float(np.mean([float(each.stats.as_dict()[figure]) for each in self.served]))  # type: ignore[arg-type]

    @property
    def plans(self) -> list[Plan]:
        """Of every step of every request."""
        return list(chain.from_iterable(each.plans for each in self.served))


def simulate(
    hardware: Hardware,
    text: Text,
    policy: Policy | None = None,
    *,
    max_sequences: int = 4,
    draft: bool = True,
    traffic: Traffic | None = None,
    seed: int = 0,
) -> Simulated:
    """Serve simulated requests; `draft=False` is the target alone."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        served = runner.run(
            _serve(hardware, text, policy or Policy(), max_sequences, draft, traffic or Traffic(), seed)
        )
    first = min(each.arrived for each in served)
    return Simulated(served, max(each.ended for each in served) - first)


async def _serve(
    hardware: Hardware, text: Text, policy: Policy, max_sequences: int, draft: bool, traffic: Traffic, seed: int
) -> tuple[Served, ...]:
    world = _World(hardware, text, policy, max_sequences, draft, seed)
    await world.serve(traffic)
    return tuple(world.served)


class _World:
    """One pipeline: models, shared estimates, slots. The simulated counterpart of the coordinator."""

    def __init__(
        self, hardware: Hardware, text: Text, policy: Policy, max_sequences: int, draft: bool, seed: int
    ) -> None:
        self.hardware, self.text, self.seed = hardware, text, seed
        self.costs, self.acceptance = Costs(), Acceptance()
        self.served: list[Served] = []
        self.rounds: Rounds[_Stream] = Rounds(self._begin_round)
        self._policy, self._max_sequences = policy, max_sequences
        self._random = np.random.default_rng([seed, 0])
        self.target = _Model(self._verify, hardware.slots)
        self.drafts = [_Model(self._draft, hardware.slots) for _ in range(hardware.draft_actors if draft else 0)]
        self.planner: RoundPlanner[_Stream] = RoundPlanner(
            policy, self.costs, drafts=len(self.drafts), chunk=hardware.chunk
        )
        self._slots = asyncio.Semaphore(hardware.slots)
        for n in _WARM_TARGET:
            self.costs.observe_target(n, hardware.target(n))
        for k in _WARM_DRAFT:
            self.costs.observe_draft(k, hardware.draft(k))

    def noisy(self, seconds: float) -> float:
        jitter = self.hardware.jitter
        return seconds * math.exp(jitter * self._random.standard_normal() - jitter**2 / 2.0)

    # --- requests

    async def serve(self, traffic: Traffic) -> None:
        """All requests of the traffic."""
        if traffic.rate is None:
            numbers = iter(range(traffic.requests))
            clients = min(traffic.concurrency, traffic.requests)
            await asyncio.gather(*(self._client(numbers) for _ in range(clients)))
        else:
            gaps = np.random.default_rng([self.seed, 1]).exponential(1.0 / traffic.rate, traffic.requests)
            await asyncio.gather(*(self._request(n, float(at)) for n, at in enumerate(np.cumsum(gaps))))

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._request(number)

    async def _request(self, number: int, arrival: float = 0.0) -> None:
        await asyncio.sleep(arrival)
        arrived = _now()
        async with self._slots:
            stream = _Stream(self, number, arrived)
            await stream.steps()
        self.served.append(Served(arrived, arrived + stream.stats.queued_s, stream.stats, tuple(stream.plans)))

    def decoding(self, number: int, stats: RequestStats) -> Decoding[None]:
        text = self.text
        request = Request(
            str(number), (0,) * text.prompt_tokens, SamplingParams(temperature=0.0), text.answer_tokens, ignore_eos=True
        )
        length = text.prompt_tokens + text.answer_tokens + 1
        return Decoding(
            request,
            eos_ids=frozenset(),
            detokenizer=_Silent(),
            controller=GammaController(self._policy, self.costs, self.acceptance),
            stats=stats,
            max_context=length,
            draft_context=length + 2 * LARGEST if self.drafts else None,
            max_sequences=self._max_sequences,
        )

    def _begin_round(self, streams: Sequence[_Stream]) -> list[_Stream]:
        return self.planner.begin(streams, rows=len(self.rounds), now=_now())

    # --- models

    async def _verify(self, tasks: Sequence[_Task]) -> None:
        """One target pass. Rows of different length share it without padding."""
        tokens = sum(task.width for task in tasks)
        seconds = self.noisy(self.hardware.target(tokens))
        await asyncio.sleep(seconds)
        if not any(task.prefill for task in tasks):
            self.costs.observe_target(tokens, seconds)

    async def _draft(self, tasks: Sequence[_Task]) -> None:
        """One draft call: all sequences of all jobs advance in the same decodes."""
        hardware = self.hardware
        per_token = hardware.draft(1) / 8.0 if hardware.draft_prompt is None else hardware.draft_prompt
        read = sum(hardware.draft(task.width) if task.width <= 2 else task.width * per_token for task in tasks)
        prompt_seconds = self.noisy(read)
        widths = [sum(level) for level in zip_longest(*(task.levels for task in tasks), fillvalue=0)]
        decodes = tuple((width, self.noisy(hardware.draft(width))) for width in widths)
        for task in tasks:
            task.prompt_seconds, task.token_seconds = prompt_seconds, decodes[: len(task.levels)]
        await asyncio.sleep(prompt_seconds + sum(seconds for _, seconds in decodes))
        for width, seconds in decodes:
            self.costs.observe_draft(width, seconds)


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Task:
    """A job at a model, by what it costs."""

    __slots__ = ("levels", "prefill", "prompt_seconds", "token_seconds", "width")

    def __init__(self, width: int, *, levels: Sequence[int] = (), prefill: bool = False) -> None:
        self.width = width
        """New tokens the model reads."""
        self.levels = levels
        """Sequences the draft advances in each decode after that."""
        self.prefill = prefill
        self.token_seconds: tuple[tuple[int, float], ...] = ()
        self.prompt_seconds = 0.0


class _Model:
    """One model's process: one call at a time, whatever waits when it becomes free goes out together."""

    def __init__(self, run: Callable[[Sequence[_Task]], Awaitable[None]], limit: int) -> None:
        self.requests = 0
        self._run = run
        self._batcher: Batcher[_Task, Span] = Batcher(self._call, isolate=lambda _: False, limit=limit)

    async def submit(self, task: _Task) -> Span:
        return await self._batcher.submit(task)

    async def _call(self, tasks: Sequence[_Task]) -> list[Span]:
        started = _now()
        await self._run(tasks)
        return [Span(started, _now())] * len(tasks)


class _Silent:
    def push(self, token: int) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class _Stream:
    """One request on its way: `actors.run.Run`, step for step."""

    def __init__(self, world: _World, number: int, arrived: float) -> None:
        self.stats = RequestStats(started=arrived, queued_s=_now() - arrived)
        self.decoding = world.decoding(number, self.stats)
        self.plans: list[Plan] = []
        self.prefilling = True
        self._world, self._rounds, self._planner = world, world.rounds, world.planner
        self._writer = Writer(world.text, [world.seed, 2, number])
        self._draft = min(world.drafts, key=lambda draft: draft.requests, default=None)
        self._without_draft = "no draft" if self._draft is None else None
        self._in_step = False
        self._chunk = 1
        self._target_holds = 0
        self._pending: asyncio.Task[DraftBlock] | None = None
        if self._draft is not None:
            self._draft.requests += 1

    async def steps(self) -> None:
        self._rounds.enter(self)
        while not self.decoding.finished:
            await self._step()
        self._rounds.leave(self)
        if self._draft is not None:
            self._draft.requests -= 1
        if self._pending is not None:
            self._pending.cancel()

    @property
    def shares_budget(self) -> bool:
        return not self._in_step and self.decoding.may_draft(self._without_draft)

    @property
    def waits_for_draft(self) -> bool:
        return self._pending is not None

    def begin_round(self, plan: Plan | None, chunk: int) -> bool:
        self._chunk = chunk
        if self._in_step:
            return False
        self._in_step = True
        self.plans.append(self.decoding.plan(without_draft=self._without_draft, shared=plan))
        return self.decoding.leads

    async def _step(self) -> None:
        decoding, stats, world = self.decoding, self.stats, self._world
        await self._rounds.join(self)
        began = _now()
        lead = await self._lead()
        await self._rounds.all_led()
        sent = _now()
        if (job := decoding.draft_job()) is not None:
            self._pending = self._ask(job)
        target, verdict = await self._judge()
        first = stats.first_token is None
        decoding.commit(verdict)
        if first:
            decoding.settle()
            stats.first_token = _now()
        patience = 0.0
        if job is not None and not first and decoding.worth_waiting:
            patience = self._planner.patience(job.budget, waited=_now() - sent, rows=len(self._rounds))
        block = await self._collect(patience)
        decoding.settle()
        self._in_step = False
        await asyncio.sleep(world.noisy(world.hardware.overhead))
        stats.ended = _now()
        if not first:
            lead_seconds, block_seconds = (each.span.seconds if each is not None else 0.0 for each in (lead, block))
            overhead = stats.timed(Span(began, stats.ended), target, lead_seconds, block_seconds)
            world.costs.observe_overhead(overhead)

    async def _lead(self) -> DraftBlock | None:
        job = self.decoding.lead_job()
        if job is None:
            return None
        self._pending = self._ask(job)
        await asyncio.wait([self._pending], timeout=self._planner.lead_patience(job.budget, rows=len(self._rounds)))
        self._rounds.led(self)
        lead = self._take()
        if lead is not None:
            self.decoding.hold(lead, None)
        return lead

    async def _judge(self) -> tuple[Span, Verdict]:
        """The target's token is 0 wherever it is asked."""
        decoding = self.decoding
        while True:
            job = decoding.verify_job(self._chunk)
            missing = job.context.length - min(self._target_holds, job.context.length - 1) + len(job.block)
            self.prefilling = missing > max(self._chunk, len(job.block) + 1)
            width = self._chunk if self.prefilling else missing
            span = await self._world.target.submit(_Task(width, prefill=missing > len(job.block) + 1))
            accepted = next((i for i, token in enumerate(job.block) if token != 0), len(job.block))
            verdict = Verdict(
                job.context.request_id, 0 if self.prefilling else accepted, None if self.prefilling else 0
            )
            self._target_holds = self._target_holds + width if self.prefilling else job.context.length + accepted
            if decoding.prefilled(verdict):
                return span, verdict
            await self._rounds.join(self)

    async def _collect(self, patience: float) -> DraftBlock | None:
        if self._pending is None:
            return None
        if not self.decoding.finished:
            await asyncio.wait([self._pending], timeout=patience)
        block = self._take()
        if block is not None:
            self.decoding.offer(block, None)
        return block

    def _take(self) -> DraftBlock | None:
        """The block in flight, if it is there."""
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def _ask(self, job: DraftJob) -> asyncio.Task[DraftBlock]:
        if self._draft is None:
            raise RuntimeError("a draft job for a request without a draft")
        return asyncio.create_task(self._answer(self._draft, job, self._writer.write(job)))

    async def _answer(self, draft: _Model, job: DraftJob, written: Written) -> DraftBlock:
        task = _Task(written.read, levels=written.levels)
        span = await draft.submit(task)
        request_id, length = job.context.request_id, job.context.length
        return DraftBlock(
            request_id, length, written.sequences, span, task.token_seconds, task.width, task.prompt_seconds
        )
