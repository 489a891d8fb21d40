"""The pipeline in simulated time: the real loop of every request, controllers, rounds and batches, over models that
only wait.

A simulated text is a row of positions at each of which the draft's best guess is the target's token or is not, with
the acceptance asked for. Target and draft take the seconds their curves say, and their answers the overhead to arrive;
everything else (who plans, what is sent when, what is waited for and for how long) is `actors.run` itself. The guesses
depend on the position alone, so that two schedules simulated with one seed are compared on the same text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from duo_ray.actors.batching import Batcher
from duo_ray.actors.models import Judgement
from duo_ray.actors.rounds import Rounds
from duo_ray.actors.run import Run
from duo_ray.core.acceptance import Acceptance
from duo_ray.core.costs import LARGEST, Costs
from duo_ray.core.gamma import GammaController, Plan, Policy
from duo_ray.core.round import RoundPlanner
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.planning.scenario import Curve, Hardware, Text, Traffic
from duo_ray.planning.virtual_time import VirtualTime
from duo_ray.planning.writer import Writer, Written
from duo_ray.types import DraftBlock, DraftJob, Request, SamplingParams, Span, Verdict, VerifyJob

_WARM_TARGET, _WARM_DRAFT = (1, 2, 4, 8, 16, 32), (1, 2, 4)
"""Widths that both models are timed at before the first request."""

_QUANT = "simulated"
"""The one quantisation of the draft."""


@dataclass(frozen=True, slots=True)
class Served:
    """One simulated request."""

    arrived: float
    began: float
    """When it got its slot."""
    stats: RequestStats
    plans: tuple[Plan, ...]
    """One for each step, or for several plain ones that were taken at once."""

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
        self._rounds: Rounds[Run[None]] = Rounds(self._begin_round)
        self._policy, self._max_sequences = policy, max_sequences
        self._random = np.random.default_rng([seed, 0])
        self._target = _Target(self)
        self._drafts = [_Draft(self, f"draft-{i}") for i in range(hardware.draft_actors if draft else 0)]
        self._planner: RoundPlanner[Run[None]] = RoundPlanner(
            policy, self.costs, drafts=len(self._drafts), chunk=hardware.chunk
        )
        self._slots = asyncio.Semaphore(hardware.slots)
        for n in _WARM_TARGET:
            self.costs.observe_target(n, hardware.target(n))
            if hardware.alone is not None:
                self.costs.observe_target(n, hardware.alone(n), alone=True)
        for k in _WARM_DRAFT:
            self.costs.observe_draft(k, hardware.draft(k))

    def noisy(self, seconds: float) -> float:
        jitter = self.hardware.jitter
        return seconds * math.exp(jitter * self._random.standard_normal() - jitter**2 / 2.0)

    @property
    def alone(self) -> Curve | None:
        """Times of a target pass that begins now, if no draft works beside it and that makes a difference."""
        return None if self.drafting else self.hardware.alone

    @property
    def drafting(self) -> bool:
        """Whether a draft is at work."""
        return any(draft.busy for draft in self._drafts)

    async def delivery(self, *, drafting: bool) -> None:
        """What an answer takes to arrive, in a step that drafts or in another one."""
        plain, more = self.hardware.overhead, self.hardware.overhead_drafting
        await asyncio.sleep(self.noisy(plain if more is None or not drafting else more))

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
        arrived = now()
        async with self._slots:
            plans: list[Plan] = []
            quant = _QUANT if self._drafts else None
            stats = RequestStats(started=arrived, queued_s=now() - arrived, draft_quant=quant)
            decoding = self._decoding(number, stats)
            run = Run(
                decoding,
                target=self._target,
                draft=min(self._drafts, key=lambda draft: draft.requests, default=None),
                rounds=self._rounds,
                planner=self._planner,
                costs=self.costs,
                clock=now,
                stepped=lambda _: plans.append(decoding.current_plan),
            )
            await run.steps(lambda _: None)
        self.served.append(Served(arrived, arrived + stats.queued_s, stats, tuple(plans)))

    def _decoding(self, number: int, stats: RequestStats) -> Decoding[None]:
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
            draft_context=length + 2 * LARGEST if self._drafts else None,
            max_sequences=self._max_sequences,
        )

    def _begin_round(self, runs: Sequence[Run[None]]) -> list[Run[None]]:
        return self._planner.begin(runs, rows=len(self._rounds), now=now())


def now() -> float:
    """Simulated seconds."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class _Pass:
    """What a target pass does for one request."""

    width: int
    """New tokens."""
    verdict: Verdict
    prefill: bool


class _Target:
    """Takes its time; its token is 0 wherever it is asked."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._holds: dict[str, int] = {}
        """Ids of each request in its cache."""
        self._batcher: Batcher[_Pass, Judgement] = Batcher(
            self._call, isolate=lambda _: False, limit=world.hardware.slots
        )

    async def verify(self, job: VerifyJob, _probs: None) -> Judgement:
        request_id, length, block = job.context.request_id, job.context.length, job.block
        held = self._holds.get(request_id, 0)
        missing = length - min(held, length - 1) + len(block)
        room = missing if job.chunk is None else max(job.chunk, len(block) + 1)
        whole, width = missing <= room, min(missing, room)
        accepted = next((i for i, token in enumerate(block) if token != 0), len(block)) if whole else 0
        self._holds[request_id] = length + accepted + job.further if whole else held + width
        verdict = Verdict(request_id, accepted, 0 if whole else None, further=(0,) * job.further)
        drafting = self._world.drafting
        judgement = await self._batcher.submit(_Pass(width, verdict, prefill=missing > len(block) + 1))
        await self._world.delivery(drafting=drafting)
        return judgement

    async def returned(self) -> None:
        """It is never lost."""

    def release(self, request_id: str) -> None:
        self._holds.pop(request_id, None)

    async def _call(self, passes: Sequence[_Pass]) -> list[Judgement]:
        """Rows of different length share a pass without padding."""
        world, began = self._world, now()
        tokens = sum(each.width for each in passes)
        alone = world.alone
        count = 1 + max(len(each.verdict.further) for each in passes)
        seconds = sum(world.noisy((alone or world.hardware.target)(tokens)) for _ in range(count))
        await asyncio.sleep(seconds)
        if not any(each.prefill for each in passes):
            world.costs.observe_target(tokens, seconds / count, alone=alone is not None)
        span = Span(began, now())
        return [Judgement(each.verdict, span, len(passes), count) for each in passes]


class _Draft:
    """Takes its time; what it writes is a `Writer`'s affair."""

    available = True

    def __init__(self, world: _World, name: str) -> None:
        self.name, self.requests = name, 0
        self._world = world
        self._writers: dict[str, Writer] = {}
        self._batcher: Batcher[tuple[DraftJob, Written], DraftBlock] = Batcher(
            self._call, isolate=lambda _: False, limit=world.hardware.slots
        )

    @property
    def busy(self) -> bool:
        """Whether it is at work, or about to be."""
        return self._batcher.busy

    async def draft(self, quant: str, job: DraftJob) -> tuple[DraftBlock, None]:  # noqa: ARG002
        request_id = job.context.request_id
        if request_id not in self._writers:
            self._writers[request_id] = Writer(self._world.text, [self._world.seed, 2, int(request_id)])
        block = await self._batcher.submit((job, self._writers[request_id].write(job)))
        await self._world.delivery(drafting=not job.bets)  # beside a pass, the target's answer takes longer
        return block, None

    def abandon(self, request_id: str) -> None:
        """No request is cancelled."""

    def release(self, request_id: str) -> None:
        self._writers.pop(request_id, None)

    async def _call(self, tasks: Sequence[tuple[DraftJob, Written]]) -> list[DraftBlock]:
        """All sequences of all jobs advance in the same decodes."""
        world, began = self._world, now()
        hardware, written = world.hardware, [each for _, each in tasks]
        reading = world.noisy(hardware.draft_reads(sum(each.read for each in written)))
        widths = [sum(level) for level in zip_longest(*(each.levels for each in written), fillvalue=0)]
        decodes = tuple((width, world.noisy(hardware.draft(width))) for width in widths)
        await asyncio.sleep(reading + sum(seconds for _, seconds in decodes))
        span = Span(began, now())
        blocks = [
            DraftBlock(
                job.context.request_id, job.context.length, each.sequences, span, decodes[: len(each.levels)],
                each.read, reading,
            )
            for job, each in tasks
        ]  # fmt: skip
        world.costs.observe_call(blocks)
        return blocks


class _Silent:
    def push(self, token: int) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""
