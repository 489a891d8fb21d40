"""What to expect and what to choose: schedules compared, draft actors counted, capacity for a load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from duo_ray.core.gamma import Policy
from duo_ray.planning.scenario import Hardware, InvalidScenario, Text, Traffic
from duo_ray.planning.simulation import Simulated, simulate


@dataclass(frozen=True, slots=True)
class Schedule:
    """A way to run the loop."""

    name: str
    policy: Policy
    max_sequences: int = 4


SCHEDULES = (
    Schedule("auto", Policy()),
    Schedule("two sequences", Policy(), 2),
    Schedule("one sequence", Policy(), 1),
    Schedule("lead 0, as published", Policy(lead=0)),
    Schedule("sequential", Policy(overlap=False)),
    *(Schedule(f"gamma {gamma}", Policy(draft_budget=gamma)) for gamma in (2, 4, 8, 16, 24)),
)
"""What `predict` compares; the first is what a pipeline does by default."""

TOKENS = 3000
"""Simulated tokens behind each figure, at least: the luck of the draw is then worth about 2%."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One schedule, as a clock would show it."""

    name: str
    tokens_per_s: float
    """Of all concurrent requests together, prompt passes included."""
    speedup: float
    """phi: `tokens_per_s` as a multiple of the target's alone, at the same concurrency."""
    ttft_ms: float
    gamma: float
    """Median of the tokens drafted beside a target pass."""
    lead: float
    """Median of the tokens drafted before a pass, of the steps that began so."""
    mean_accepted: float
    target_idle: float
    draft_idle: float
    draft_actors: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures by schedule, and what to choose."""

    alone: Figures
    """The target without a draft."""
    schedules: tuple[Figures, ...]
    """`SCHEDULES`, in their order, with one draft actor for each 8 concurrent requests."""
    actors: tuple[Figures, ...]
    """The default schedule with other numbers of draft actors."""

    @property
    def best(self) -> Figures:
        """The fastest of all; of those within 1%, the one with the fewest draft actors, then the first."""
        fastest = max(each.tokens_per_s for each in (*self.schedules, *self.actors))
        good = [each for each in (*self.schedules, *self.actors) if each.tokens_per_s >= 0.99 * fastest]
        return min(good, key=lambda each: each.draft_actors)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": asdict(self.best)}


@dataclass(frozen=True, slots=True)
class Capacity:
    """Pipelines that keep up with a load."""

    pipelines: int
    gpus: int
    cpu_cores: int
    waiting_p95_s: float
    """Seconds from a request's arrival to its slot."""
    decode_speed: float
    """Tokens per second of one stream."""


def predict(hardware: Hardware, text: Text, *, concurrency: int = 1, seed: int = 0) -> Prediction:
    """Compare all schedules on the same simulated texts.

    Args:
        concurrency: requests that run at once, each followed by the next.
    """
    traffic = Traffic(requests=_requests(text, concurrency), concurrency=concurrency)
    alone = simulate(hardware, text, draft=False, traffic=traffic, seed=seed)

    def run(schedule: Schedule, actors: int) -> Figures:
        machine = replace(hardware, draft_actors=actors)
        simulated = simulate(
            machine, text, schedule.policy, max_sequences=schedule.max_sequences, traffic=traffic, seed=seed
        )
        return _figures(schedule.name, simulated, alone, actors)

    counts = sorted({hardware.draft_actors, *(n for n in (1, 2, 4, 8, 16) if n <= min(concurrency, hardware.slots))})
    return Prediction(
        alone=_figures("target alone", alone, alone, 0),
        schedules=tuple(run(schedule, hardware.draft_actors) for schedule in SCHEDULES),
        actors=tuple(run(SCHEDULES[0], count) for count in counts),
    )


def _requests(text: Text, concurrency: int) -> int:
    return max(2 * concurrency, math.ceil(TOKENS / text.answer_tokens))


def _figures(name: str, simulated: Simulated, alone: Simulated, actors: int) -> Figures:
    plans = simulated.plans
    return Figures(
        name=name,
        tokens_per_s=simulated.tokens_per_second,
        speedup=simulated.tokens_per_second / alone.tokens_per_second,
        ttft_ms=1000.0 * simulated.time_to_first_token,
        gamma=_median([plan.gamma for plan in plans if plan.gamma]),
        lead=_median([plan.lead for plan in plans if plan.lead]),
        mean_accepted=simulated.mean("mean_accepted"),
        target_idle=simulated.mean("target_idle"),
        draft_idle=simulated.mean("draft_idle"),
        draft_actors=actors,
    )


def _median(values: Sequence[int]) -> float:
    return float(median(values)) if values else 0.0


def required_capacity(
    hardware: Hardware,
    text: Text,
    *,
    rate: float,
    draft: bool = True,
    cores_per_actor: int = 8,
    gpus_per_pipeline: int = 1,
    longest_wait: float = 1.0,
    seed: int = 0,
) -> Capacity:
    """The fewest pipelines of this kind that serve requests arriving at random times; see `Capacity`.

    Args:
        rate: requests per second, all pipelines together; each gets an equal share of them.
        draft: False: the target alone.
        cores_per_actor: CPU cores of one draft actor; each pipeline needs one more for target and coordinator.
        longest_wait: seconds that 95% of the requests may wait for a slot at most.
    """
    if not 0.0 < rate < math.inf:
        raise InvalidScenario(f"rate={rate} requests per second must be above 0")
    full = Traffic(requests=max(3 * hardware.slots, _requests(text, 1)), concurrency=hardware.slots)
    most = simulate(hardware, text, draft=draft, traffic=full, seed=seed).tokens_per_second
    pipelines = max(1, math.floor(rate * text.answer_tokens / most))
    while True:
        # Long enough for a queue that grows to show: some 10 times what is served at once.
        traffic = Traffic(requests=10 * hardware.slots, rate=rate / pipelines)
        simulated = simulate(hardware, text, draft=draft, traffic=traffic, seed=seed)
        waiting = simulated.waiting[len(simulated.waiting) // 2 :]
        late = float(np.quantile(waiting, 0.95))
        if late <= longest_wait:
            break
        pipelines += max(1, pipelines // 20)
    cores = 1 + (hardware.draft_actors * cores_per_actor if draft else 0)
    return Capacity(pipelines, pipelines * gpus_per_pipeline, pipelines * cores, late, simulated.decode_speed)
