"""What is counted; it knows nothing of who reads it."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from duo_ray.core.precision import Estimate
from duo_ray.core.stats import StepTimes
from duo_ray.metrics.figures import Figures
from duo_ray.metrics.history import RECENT_S, History
from duo_ray.metrics.series import (
    ACCEPTED_PER_POSITION,
    ACCEPTED_TOKENS,
    ACTIVE_SECONDS,
    BUSY_SECONDS,
    DRAFT_TOKENS,
    DRAFTS,
    GAMMA,
    GENERATED_TOKENS,
    IDLE_SHARE,
    INTER_TOKEN,
    OVERHEAD,
    PLAIN_STEPS,
    PROMPT_TOKENS,
    PROPOSED_PER_POSITION,
    QUANT_ACCEPTANCE,
    QUANT_IN_USE,
    QUANT_RATE,
    QUANT_REQUESTS,
    QUANT_T_DRAFT,
    QUEUED,
    REQUESTS,
    RESTARTS,
    RUNNING,
    SEQUENCES,
    SERIES,
    SPEEDUP,
    T_DRAFT,
    T_TARGET,
    TARGET_STEPS,
    TTFT,
    WASTED_TOKENS,
    Ended,
    Kind,
    Labels,
)

PENDING_LIMIT = 10_000
"""Histogram values kept for Ray when nobody takes them; later ones are not told."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What one step of one request brought, or several that were taken at once."""

    steps: int
    tokens: int
    """Committed."""
    gamma: int
    """Asked of the draft."""
    drafted: int
    drafted_seconds: float
    accepted: int
    proposed: int
    """Tokens of the judged block."""
    kept: int
    """How many of those were kept; a head that won its bet counts only in `accepted`."""
    blocks: Sequence[int]
    """Sequences of each drafted block that came back."""
    plain_reason: str | None
    """Why nothing was drafted; None when something was."""


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, and the values that Ray was not told yet."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0
    pending: list[float] = field(default_factory=list)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if len(self.pending) < PENDING_LIMIT:
            self.pending.append(value)


class Tally:
    """Counts since the start, and one entry a second of the last `HISTORY_S`. Safe to read from other threads.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.started = clock()
        self.actors: list[str] = []
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {
            (series.name, ()): 0.0 for series in SERIES if series.kind is Kind.COUNTER and not series.labels
        }
        for ended in Ended:
            self._counters[REQUESTS, (ended,)] = 0.0
        self._histograms = {
            series.name: Histogram(series.bounds, [0] * (len(series.bounds) + 1))
            for series in SERIES
            if series.kind is Kind.HISTOGRAM
        }
        self._history = History()
        self._precision: Sequence[Estimate] = ()
        self._running = self._queued = 0
        self._active_since = self.started

    # --- feeding

    def actor(self, name: str) -> None:
        """There is an actor of this name."""
        with self._lock:
            self.actors.append(name)
            self._counters[RESTARTS, (name,)] = self._counters[BUSY_SECONDS, (name,)] = 0.0

    def restarted(self, actor: str) -> None:
        with self._lock:
            self._counters[RESTARTS, (actor,)] += 1

    def busy(self, actor: str, seconds: float) -> None:
        """The actor has just worked for so long. (Its own clock may differ from ours, so it tells no times.)"""
        seconds = max(0.0, seconds)
        now = self.clock()
        with self._lock:
            self._counters[BUSY_SECONDS, (actor,)] += seconds
            for second, share in self._history.spread(now - seconds, now):
                second.busy[actor] = second.busy.get(actor, 0.0) + share

    def change_load(self, *, running: int = 0, queued: int = 0) -> None:
        """So many requests more (or, below zero, less) hold a slot, or wait for one."""
        with self._lock:
            self._count_active()
            self._running += running
            self._queued += queued
            self._note_load()

    def ended(self, how: Ended, wasted_tokens: int) -> None:
        with self._lock:
            self._counters[REQUESTS, (how,)] += 1
            self._counters[WASTED_TOKENS, ()] += wasted_tokens

    def quantised(self, quant: str, precision: Sequence[Estimate]) -> None:
        """A request that used this quantisation of the draft ended; what is now expected of each."""
        with self._lock:
            self._add(QUANT_REQUESTS, quant, 1)
            self._precision = precision

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        with self._lock:
            self._counters[PROMPT_TOKENS, ()] += prompt_tokens
            self._histograms[TTFT].observe(seconds)

    def step(self, done: StepCounts, times: StepTimes | None, gap: float | None) -> None:
        """One request went one step further, or several at once; `gap` is the time since its last output, None without
        tokens or before.
        """
        counters, steps = self._counters, done.steps
        with self._lock:
            second = self._history.at(self.clock())
            second.steps += steps
            second.tokens += done.tokens
            second.gamma += done.gamma
            second.drafted_seconds += done.drafted_seconds
            second.drafted_tokens += done.drafted
            counters[TARGET_STEPS, ()] += steps
            counters[GENERATED_TOKENS, ()] += done.tokens
            counters[DRAFT_TOKENS, ()] += done.drafted
            counters[ACCEPTED_TOKENS, ()] += done.accepted
            counters[DRAFTS, ()] += bool(done.proposed)
            for position in range(done.proposed):
                self._add(PROPOSED_PER_POSITION, str(position), 1)
                second.proposed[position] += 1
            for position in range(done.kept):
                self._add(ACCEPTED_PER_POSITION, str(position), 1)
                second.accepted[position] += 1
            for sequences in done.blocks:
                second.blocks[sequences] += 1
            if done.plain_reason is not None:
                self._add(PLAIN_STEPS, done.plain_reason, steps)
            if gap is not None:
                self._histograms[INTER_TOKEN].observe(gap)
                second.gaps += gap
                second.plain += times.plain * done.tokens if times is not None else 0.0
            if times is not None:
                for _ in range(steps):
                    self._histograms[OVERHEAD].observe(times.overhead / steps)
                second.timed_steps += steps
                second.target += times.target
                second.overhead += times.overhead

    # --- reading

    def counters(self) -> dict[tuple[str, Labels], float]:
        """Totals since the start by (name, label values)."""
        with self._lock:
            self._count_active()
            return dict(self._counters)

    def gauges(self) -> dict[tuple[str, Labels], float]:
        """Present values; means for which nothing happened are left out."""
        with self._lock:
            self._count_active()
            recent = self._history.last(RECENT_S, self.clock())
            values: dict[tuple[str, Labels], float | None] = {
                (RUNNING, ()): float(self._running),
                (QUEUED, ()): float(self._queued),
                (GAMMA, ()): recent.gamma,
                (SEQUENCES, ()): recent.sequences,
                (T_TARGET, ()): recent.t_target,
                (T_DRAFT, ()): recent.t_draft,
                (SPEEDUP, ()): recent.speedup,
                **{(IDLE_SHARE, (actor,)): recent.idle(actor) for actor in self.actors},
            }
            for each in self._precision:
                labels = (each.quant,)
                values[QUANT_IN_USE, labels] = float(each.in_use)
                values[QUANT_T_DRAFT, labels] = each.draft_seconds
                values[QUANT_ACCEPTANCE, labels] = each.token
                values[QUANT_RATE, labels] = each.tokens_per_second
        return {key: value for key, value in values.items() if value is not None}

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Counts by bucket and sum of the values, by name."""
        with self._lock:
            return {name: (list(each.counts), each.sum) for name, each in self._histograms.items()}

    def take_values(self) -> dict[str, list[float]]:
        """The values that came into each histogram since the last call."""
        with self._lock:
            taken = {name: each.pending for name, each in self._histograms.items()}
            for each in self._histograms.values():
                each.pending = []
        return taken

    def figures(self, *, model: str = "", replica: str = "") -> Figures:
        """All of it as it is now."""
        with self._lock:
            self._count_active()
            history = self._history.copy()
        return Figures(
            model_name=model,
            replica=replica,
            time=self.clock(),
            started=self.started,
            actors=tuple(self.actors),
            counters=self.counters(),
            gauges=self.gauges(),
            histograms=self.histograms(),
            history=history,
        )

    # --- with the lock held

    def _add(self, name: str, label: str, amount: float) -> None:
        key = (name, (label,))
        self._counters[key] = self._counters.get(key, 0.0) + amount

    def _count_active(self) -> None:
        now = self.clock()
        if self._running:
            self._counters[ACTIVE_SECONDS, ()] += max(0.0, now - self._active_since)
            for second, share in self._history.spread(self._active_since, now):
                second.active += share
                second.running, second.queued = max(second.running, self._running), max(second.queued, self._queued)
        self._active_since = now

    def _note_load(self) -> None:
        second = self._history.at(self.clock())
        second.running, second.queued = max(second.running, self._running), max(second.queued, self._queued)
