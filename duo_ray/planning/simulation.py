"""The coordinator's loop in simulated time: the real controllers, rounds, batches and statistics, over models that only
wait.

A simulated text is a row of positions at each of which the draft's best guess is the target's token or is not, with
the acceptance asked for. Target and draft take the seconds their curves say; everything else (who plans, what is sent
when, what is waited for and for how long, late blocks, the first step, batches of several requests) is done as
`actors.coordinator` does it, or by the same code. The guesses depend on the position alone, so that two schedules
simulated with one seed are compared on the same text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duo_ray.actors.batching import Batcher
from duo_ray.actors.rounds import Rounds
from duo_ray.core.context import common_prefix
from duo_ray.core.gamma import LARGEST, Acceptance, Costs, GammaController, Plan, Policy
from duo_ray.core.round import RoundPlanner
from duo_ray.core.sequences import open_heads, split
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.planning.virtual_time import VirtualTime
from duo_ray.types import (
    DraftBlock,
    DraftJob,
    DraftSequence,
    DuoRayError,
    Ids,
    Outcome,
    Request,
    SamplingParams,
    Span,
    Verdict,
)

_WARM_TARGET, _WARM_DRAFT = (1, 2, 4, 8, 16, 32), (1, 2, 4)
"""Widths that both models are timed at before the first request."""

_RUNNER_UP = 0.5
"""Of the probability the draft leaves to other tokens than its best, the share of the next best one; and so on."""


class InvalidScenario(DuoRayError, ValueError):
    """A number that describes hardware, text or traffic is out of range; the text names it."""


class Curve:
    """Seconds of one pass by its width, from measured or assumed points.

    Between points it is linear, before the first and after the last it keeps the slope there.
    """

    def __init__(self, points: Mapping[int, float], *, growth: float = 0.0) -> None:
        """`growth`: share of the first point's seconds that each further unit of width adds, for a single point."""
        if not points or min(points) < 1 or not all(0.0 < s < math.inf for s in points.values()):
            raise InvalidScenario(
                f"{dict(points)} is no curve: give seconds above 0 for at least one width of 1 or more"
            )
        self.points = dict(sorted(points.items()))
        if len(self.points) == 1:
            ((width, seconds),) = self.points.items()
            self.points[width + 1] = seconds * (1.0 + growth)
        self._x, self._y = (np.array(list(v), dtype=np.float64) for v in (self.points.keys(), self.points.values()))

    def __call__(self, width: float) -> float:
        x, y = self._x, self._y
        if width > x[-1]:
            return float(y[-1] + max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) * (width - x[-1]))
        return float(np.interp(width, x, y))


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a pipeline runs on."""

    target: Curve
    """T_target(n): seconds of a pass over n new tokens, summed over the requests in it."""
    draft: Curve
    """T_draft(k): seconds of a decode that advances k sequences by one token."""
    overhead: float = 0.002
    """Seconds of a step that are neither model's work."""
    draft_prompt: float | None = None
    """Seconds per prompt token the draft reads; None: an eighth of T_draft(1)."""
    jitter: float = 0.05
    """Standard deviation of the logarithm of every pass's seconds."""
    draft_actors: int = 1
    slots: int = 8
    """Requests held at once; more wait."""
    chunk: int = 128
    """Prompt tokens of one target pass."""

    @classmethod
    def from_costs(cls, stored: Mapping[str, Any], **others: Any) -> Hardware:
        """From what `Costs.as_dict` or `duo-ray doctor --json` measured; `others` are further fields.

        Raises:
            InvalidScenario: the costs lack times of the target or of the draft.
        """
        try:
            target, draft = ({int(n): float(s) for n, s in stored[side].items()} for side in ("target", "draft"))
            overhead = float(stored["overhead"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidScenario(f"no measured times of target and draft ({error!r})") from None
        known: dict[str, Any] = {"target": Curve(target), "draft": Curve(draft, growth=0.3), "overhead": overhead}
        return cls(**(known | others))


@dataclass(frozen=True, slots=True)
class Text:
    """What is asked and how well the draft knows the answers."""

    acceptance: float = 0.8
    """Chance that the draft's best guess at a position is the target's token."""
    prompt_tokens: int = 128
    answer_tokens: int = 256
    decided: float = 1.0
    """How the draft's probability of its best guess spreads around the acceptance (beta distribution with this many
    pseudo-counts): small for a draft that is sure here and clueless there, as language models are."""

    def __post_init__(self) -> None:
        checks = (
            ("acceptance", 0.0 < self.acceptance <= 1.0, "above 0, up to 1"),
            ("prompt_tokens", self.prompt_tokens >= 1, "1 or more"),
            ("answer_tokens", self.answer_tokens >= 1, "1 or more"),
            ("decided", self.decided > 0.0, "above 0"),
        )
        for name, fine, allowed in checks:
            if not fine:
                raise InvalidScenario(f"{name}={getattr(self, name)!r} is out of range: {allowed}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which requests come when."""

    requests: int = 8
    concurrency: int = 1
    """This many at a time, each followed by the next at once; ignored when `rate` is given."""
    rate: float | None = None
    """Requests per second on average, at random times (Poisson)."""


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


class _Guesses:
    """What the draft knows of one text. The target's token is 0 everywhere; others are wrong guesses."""

    def __init__(self, text: Text, seed: Sequence[int]) -> None:
        random = np.random.default_rng(seed)
        size = text.prompt_tokens + text.answer_tokens + 3 * LARGEST
        a, spread = min(text.acceptance, 1.0 - 1e-6), text.decided
        self.best: NDArray[np.float64] = random.beta(a * spread, (1.0 - a) * spread, size)
        """The draft's probability of its best guess at each position."""
        right = random.random(size) < self.best
        self.rank: NDArray[np.int64] = np.where(right, 0, random.geometric(1.0 - _RUNNER_UP, size))
        """Place of the target's token among the draft's guesses."""

    def heads(self, position: int, count: int, *, known: bool) -> list[tuple[int, float]]:
        """The best guesses and the draft's probabilities of them; `known`: the text before is the target's."""
        rank, best = int(self.rank[position]) if known else -1, float(self.best[position])
        rest = [(1.0 - best) * (1.0 - _RUNNER_UP) * _RUNNER_UP**j for j in range(count - 1)]
        return [(0 if j == rank else 1 + j, chance) for j, chance in enumerate((best, *rest))]

    def tail(self, position: int, count: int, *, known: bool) -> Ids:
        """The draft's greedy continuation: right until its first wrong guess."""
        right = 0
        while known and right < count and self.rank[position + right] == 0:
            right += 1
        return (0,) * right + (1,) * (count - right)


class _Stream:
    """One request on its way: `actors.coordinator._Run`, step for step."""

    def __init__(self, world: _World, number: int, arrived: float) -> None:
        self.stats = RequestStats(started=arrived, queued_s=_now() - arrived)
        self.decoding = world.decoding(number, self.stats)
        self.plans: list[Plan] = []
        self.prefilling = True
        self._world, self._rounds, self._planner = world, world.rounds, world.planner
        self._guesses = _Guesses(world.text, [world.seed, 2, number])
        self._draft = min(world.drafts, key=lambda draft: draft.requests, default=None)
        self._without_draft = "no draft" if self._draft is None else None
        self._in_step = False
        self._chunk = 1
        self._target_holds = 0
        self._cached: list[int] = []
        self._branches: list[Ids] = []
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

    # --- the draft's side

    def _ask(self, job: DraftJob) -> asyncio.Task[DraftBlock]:
        if self._draft is None:
            raise RuntimeError("a draft job for a request without a draft")
        held, known = self._read(job)
        lengths, sequences = self._write(job, known)
        task = _Task(job.context.length - held, levels=_levels(lengths, bets=job.bets))
        return asyncio.create_task(self._answer(self._draft, job, task, sequences))

    async def _answer(
        self, draft: _Model, job: DraftJob, task: _Task, sequences: tuple[DraftSequence, ...]
    ) -> DraftBlock:
        span = await draft.submit(task)
        length = job.context.length
        return DraftBlock(
            job.context.request_id, length, sequences, span, task.token_seconds, task.width, task.prompt_seconds
        )

    def _read(self, job: DraftJob) -> tuple[int, bool]:
        """Take the context over: how many of its ids were cached, and whether all of it is the target's text."""
        ids = [*self._cached[: job.context.agreed], *job.context.ids]
        held = max(
            (common_prefix([*self._cached, *branch], ids) for branch in (self._branches or [()])),
            default=0,
        )
        self._cached, self._branches = ids, []
        return min(held, len(ids) - 1), not any(ids[-max(1, job.assumed) :])

    def _write(self, job: DraftJob, known: bool) -> tuple[list[int], tuple[DraftSequence, ...]]:
        """The block, and the lengths of its sequences, as `LlamaCppDraft` writes it."""
        guesses, at = self._guesses, job.context.length
        if job.budget == 0:  # the draft only reads
            return [], ()
        if not job.bets:
            ids = guesses.tail(at, job.budget, known=known)
            self._branches = [ids[:-1]]
            return [job.budget], (DraftSequence(None, ids, 1.0),)
        most = min(job.max_sequences, job.budget)
        heads = guesses.heads(at, most, known=known)
        lengths = [job.budget]
        if job.budget > 1:
            chances = [chance for _, chance in heads]
            opened = open_heads(chances, float(guesses.best[at + 1]), most)
            lengths = split(job.budget, chances[:opened], job.acceptance, job.width_cost)
        sequences = tuple(
            DraftSequence(
                Outcome(job.assumed, head),
                guesses.tail(at + 1, length - 1, known=known and head == 0),
                chance,
            )
            for (head, chance), length in zip(heads, lengths, strict=False)
            if length
        )
        self._branches = [
            (sequence.bet.token, *sequence.ids)[:-1] for sequence in sequences if sequence.bet is not None
        ]
        return [length for length in lengths if length], sequences


def _levels(lengths: Sequence[int], *, bets: bool) -> list[int]:
    """Sequences advanced by each decode after the context's own: a best head goes one ahead of the others."""
    if not lengths:
        return []
    best, *others = lengths
    if not bets:
        return [1] * (best - 1)
    ahead = [1] if best > 1 else []
    left = [best - 2, *(length - 1 for length in others)]
    return ahead + [sum(each > level for each in left) for level in range(max(0, *left, 0))]
