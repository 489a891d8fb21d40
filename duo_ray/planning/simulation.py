"""The coordinator's loop in simulated time: the real `Decoding`, controller and statistics, over models that only wait.

A simulated text is a row of positions at each of which the draft's best guess is the target's token or is not, with
the acceptance asked for. Target and draft take the seconds their curves say; everything else (who plans, what is sent
when, what is waited for and for how long, late blocks, the first step, batches of several requests) is done as
`actors.coordinator` does it, or by the same code. The guesses depend on the position alone, so that two schedules
simulated with one seed are compared on the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duo_ray.core.context import common_prefix
from duo_ray.core.gamma import LARGEST, Acceptance, Costs, GammaController, Plan, Policy
from duo_ray.core.sequences import open_heads, split
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.planning.clock import Clock, Process, Promise, Wait
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
    VerifyJob,
)

_WARM_TARGET, _WARM_DRAFT = (1, 2, 4, 8, 16, 32), (1, 2, 4)
"""Widths that both models are timed at before the first request."""

_RUNNER_UP = 0.5
"""Of the probability the draft leaves to other tokens than its best, the share of the next best one; and so on."""

_WIDE = 32
"""Longer segments get a target pass of their own, as in `models.transformers`."""


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
    world = _World(hardware, text, policy or Policy(), max_sequences, draft, seed)
    traffic = traffic or Traffic()
    if traffic.rate is None:
        numbers = iter(range(traffic.requests))
        for _ in range(min(traffic.concurrency, traffic.requests)):
            world.clock.spawn(world.client(numbers))
    else:
        gaps = np.random.default_rng([seed, 1]).exponential(1.0 / traffic.rate, traffic.requests)
        for number, arrival in enumerate(np.cumsum(gaps)):
            world.clock.after(float(arrival), lambda n=number: world.clock.spawn(world.request(n)))  # type: ignore[misc]
    world.clock.run()
    first = min(each.arrived for each in world.served)
    return Simulated(tuple(world.served), max(each.ended for each in world.served) - first)


class _World:
    """One pipeline: models, shared estimates, slots."""

    def __init__(
        self, hardware: Hardware, text: Text, policy: Policy, max_sequences: int, draft: bool, seed: int
    ) -> None:
        self.hardware, self.text = hardware, text
        self.clock = Clock()
        self.costs, self.acceptance = Costs(), Acceptance()
        self.served: list[Served] = []
        self._policy, self._max_sequences, self._seed = policy, max_sequences, seed
        self._random = np.random.default_rng([seed, 0])
        self.target = _Server(self, hardware.slots, self._verify)
        self.drafts = [_Server(self, hardware.slots, self._draft) for _ in range(hardware.draft_actors if draft else 0)]
        self._free = hardware.slots
        self._queue: list[Promise[None]] = []
        for n in _WARM_TARGET:
            self.costs.observe_target(n, hardware.target(n))
        for k in _WARM_DRAFT:
            self.costs.observe_draft(k, hardware.draft(k))

    def noisy(self, seconds: float) -> float:
        jitter = self.hardware.jitter
        return seconds * math.exp(jitter * self._random.standard_normal() - jitter**2 / 2.0)

    # --- requests

    def client(self, numbers: Iterator[int]) -> Process:
        """One request after the other."""
        for number in numbers:
            yield from self.request(number)

    def request(self, number: int) -> Process:
        arrived = self.clock.now
        if self._free == 0:
            place: Promise[None] = Promise()
            self._queue.append(place)
            yield Wait(place)
        else:
            self._free -= 1
        stream = _Stream(self, number, arrived)
        yield from stream.steps()
        self.served.append(Served(arrived, stream.stats.started, stream.stats, tuple(stream.plans)))
        if self._queue:
            self._queue.pop(0).keep(None)
        else:
            self._free += 1

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

    # --- models

    def _verify(self, tasks: Sequence[_Task]) -> float:
        """Answer the jobs of one target call; its seconds."""
        seconds = 0.0
        for wide in (False, True):
            widths = [task.width for task in tasks if (task.width > _WIDE) == wide]
            if widths:
                seconds += self.hardware.target(len(widths) * max(widths))
        return self.noisy(seconds)

    def _draft(self, tasks: Sequence[_Task]) -> float:
        """Write the blocks of one draft call; its seconds. All sequences of all jobs advance in the same decodes."""
        hardware = self.hardware
        per_token = hardware.draft(1) / 8.0 if hardware.draft_prompt is None else hardware.draft_prompt
        read = sum(hardware.draft(task.width) if task.width <= 2 else task.width * per_token for task in tasks)
        prompt_seconds = self.noisy(read)
        total = prompt_seconds
        for task in tasks:
            task.prompt_seconds = prompt_seconds
        for level in range(max(len(task.levels) for task in tasks)):
            live = [task for task in tasks if level < len(task.levels)]
            seconds = self.noisy(hardware.draft(sum(task.levels[level] for task in live)))
            total += seconds
            for task in live:
                task.token_seconds.append((task.levels[level], seconds))
        return total


class _Task:
    """A job at a model: what it costs, and the promise of its answer (the span of the call)."""

    __slots__ = ("answer", "levels", "prompt_seconds", "token_seconds", "total", "width")

    def __init__(self, width: int, levels: Sequence[int] = ()) -> None:
        self.width = width
        """New tokens the model reads."""
        self.levels = levels
        """Sequences the draft advances in each decode after that."""
        self.answer: Promise[Span] = Promise()
        self.token_seconds: list[tuple[int, float]] = []
        self.prompt_seconds = 0.0
        self.total = 0
        """New tokens of the whole target call."""


class _Server:
    """One model: one call at a time, whatever waits when it becomes free goes out together (`actors.batching`)."""

    def __init__(self, world: _World, limit: int, run: Callable[[Sequence[_Task]], float]) -> None:
        self.requests = 0
        self._world, self._limit, self._run = world, limit, run
        self._waiting: list[_Task] = []
        self._busy = False

    def submit(self, task: _Task) -> Promise[Span]:
        self._waiting.append(task)
        if not self._busy:
            self._busy = True
            # After everything else that happens at this moment: jobs sent at once share a call.
            self._world.clock.after(0.0, self._serve)
        return task.answer

    def _serve(self) -> None:
        batch, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
        if not batch:
            self._busy = False
            return
        clock, started = self._world.clock, self._world.clock.now
        seconds = self._run(batch)

        def answer() -> None:
            for task in batch:
                task.total = sum(each.width for each in batch)
                task.answer.keep(Span(started, clock.now))
            clock.after(0.0, self._serve)

        clock.after(seconds, answer)


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
        self.stats = RequestStats(started=world.clock.now)
        self._world, self._clock = world, world.clock
        self._guesses = _Guesses(world.text, [world._seed, 2, number])
        self._decoding = world.decoding(number, self.stats)
        self._arrived = arrived
        self._draft = min(world.drafts, key=lambda draft: draft.requests, default=None)
        self.plans: list[Plan] = []
        self._target_holds = 0
        self._cached: list[int] = []
        self._branches: list[Ids] = []
        self._pending: tuple[Promise[Span], _Task, DraftJob, tuple[DraftSequence, ...]] | None = None
        if self._draft is not None:
            self._draft.requests += 1

    def steps(self) -> Process:
        while not self._decoding.finished:
            yield from self._step()
        if self._draft is not None:
            self._draft.requests -= 1

    def _step(self) -> Process:
        decoding, clock, world = self._decoding, self._clock, self._world
        began, first = clock.now, self.stats.first_token is None
        self.plans.append(decoding.plan(without_draft="no draft" if self._draft is None else None))
        lead: DraftBlock | None = None
        if (lead_job := decoding.lead_job()) is not None:
            self._ask(lead_job)
            yield from self._wait(max(1.0, self._patience(lead_job, began)))
            if (lead := self._take()) is not None:
                decoding.hold(lead, None)
        sent, job = clock.now, None
        if self._draft is not None and (job := decoding.draft_job()) is not None:
            self._ask(job)
        chunk = world.hardware.chunk
        verify = decoding.verify_job(chunk)
        length = verify.context.length
        while length - self._target_holds + len(verify.block) > chunk:
            yield Wait(world.target.submit(_Task(chunk)))
            self._target_holds += chunk
        task = _Task(length - min(self._target_holds, length - 1) + len(verify.block))
        yield Wait(world.target.submit(task))
        target, verdict = task.answer.kept, _verdict(verify)
        decoding.prefilled(verdict)
        self._target_holds = length + verdict.accepted
        decoding.commit(verdict)
        if first:
            decoding.settle()
            self.stats.first_token = clock.now
        waits = job is not None and not first and decoding.worth_waiting
        patience = self._patience(job, sent) if job is not None and waits else 0.0
        if not decoding.finished:
            yield from self._wait(patience)
        if (block := self._take()) is not None:
            decoding.offer(block, None)
        decoding.settle()
        yield Wait(None, world.noisy(world.hardware.overhead))
        self.stats.ended = clock.now
        if first:
            return
        lead_seconds, block_seconds = (each.span.seconds if each is not None else 0.0 for each in (lead, block))
        overhead = self.stats.timed(Span(began, clock.now), target, lead_seconds, block_seconds)
        world.costs.observe_target(task.total, target.seconds)
        for each in (lead, block):
            for width, seconds in each.token_seconds if each is not None else ():
                world.costs.observe_draft(width, seconds)
        world.costs.observe_overhead(overhead)

    def _patience(self, job: DraftJob, sent: float) -> float:
        costs = self._world.costs
        expected = job.budget * costs.draft_seconds(1)
        return max(costs.target_seconds(1), sent + 1.5 * expected - self._clock.now)

    def _wait(self, patience: float) -> Process:
        """For the draft job in flight, at most this long."""
        if self._pending is not None and not self._pending[0].done:
            yield Wait(self._pending[0], patience)

    # --- the draft's side

    def _ask(self, job: DraftJob) -> None:
        if self._draft is None:
            raise RuntimeError("a draft job for a request without a draft")
        held, known = self._read(job)
        lengths, sequences = self._write(job, known)
        task = _Task(job.context.length - held, _levels(lengths, bets=job.bets))
        self._pending = (self._draft.submit(task), task, job, sequences)

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

    def _take(self) -> DraftBlock | None:
        """The block in flight, if it is there."""
        if self._pending is None or not self._pending[0].done:
            return None
        (answer, task, job, sequences), self._pending = self._pending, None
        return DraftBlock(
            job.context.request_id,
            job.context.length,
            sequences,
            answer.kept,
            tuple(task.token_seconds),
            task.width,
            task.prompt_seconds,
        )


def _levels(lengths: Sequence[int], *, bets: bool) -> list[int]:
    """Sequences advanced by each decode after the context's own: a best head goes one ahead of the others."""
    best, *others = lengths
    if not bets:
        return [1] * (best - 1)
    ahead = [1] if best > 1 else []
    left = [best - 2, *(length - 1 for length in others)]
    return ahead + [sum(each > level for each in left) for level in range(max(0, *left, 0))]


def _verdict(job: VerifyJob) -> Verdict:
    """The target's token is 0 wherever it is asked."""
    accepted = next((i for i, token in enumerate(job.block) if token != 0), len(job.block))
    return Verdict(job.context.request_id, accepted, 0)
