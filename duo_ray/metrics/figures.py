"""The figures of pipelines: of one, as one process tells another, and of all together, as people want to see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duo_ray.metrics.history import LONGER_S, RECENT_S, History, Second, Window, actor_of, together
from duo_ray.metrics.series import (
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    GENERATED_TOKENS,
    PLAIN_STEPS,
    PROMPT_TOKENS,
    QUANT_ACCEPTANCE,
    QUANT_IN_USE,
    QUANT_RATE,
    QUANT_T_DRAFT,
    QUEUED,
    REQUESTS,
    RESTARTS,
    RUNNING,
    TARGET_STEPS,
    WASTED_TOKENS,
    Labels,
)

Values = Mapping[tuple[str, Labels], float]
"""By name and values of the labels."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All that one pipeline tells about itself."""

    model_name: str
    replica: str
    """Which pipeline it is; with the model's name the labels of every series."""
    time: float
    """When it was told, in seconds since the epoch."""
    started: float
    actors: tuple[str, ...]
    counters: Values
    gauges: Values
    histograms: Mapping[str, tuple[list[int], float]]
    """Counts by bucket and sum of the values, by name."""
    history: dict[int, Second]


def snapshot(pipelines: Sequence[Figures]) -> dict[str, Any]:
    """Live figures of all these pipelines for people, JSON-ready: what `GET /stats` answers and the page draws.

    What counts requests, tokens or seconds is summed over them, shares of time are means over their actors, and the
    time with a running request is that of the busiest one.
    """
    first = pipelines[0]
    history = _common_history(pipelines)
    recent, longer = history.last(RECENT_S, first.time), history.last(LONGER_S, first.time)
    actors = [(actor, actor_of(each.replica, actor)) for each in pipelines for actor in each.actors]
    targets = [name for actor, name in actors if actor == "target"]
    drafts = [name for actor, name in actors if actor != "target"]
    counters: Counter[tuple[str, Labels]] = Counter()
    for each in pipelines:
        counters.update(each.counters)
    return {
        "model_name": first.model_name,
        "replicas": [_of_one(each) for each in pipelines],
        "uptime_s": round(max(each.time - each.started for each in pipelines), 1),
        "running": sum(_gauge(each, RUNNING) for each in pipelines),
        "queued": sum(_gauge(each, QUEUED) for each in pipelines),
        "now": {
            **_figures(recent, targets, drafts),
            "tokens_per_s": _rounded(recent.tokens_per_s or 0.0),
            "speedup_estimate": _rounded(recent.speedup),
            "round_overhead_ms": _ms(recent.overhead),
            "acceptance_per_position": longer.acceptance,
            "sequences_per_block": {str(number): count for number, count in sorted(longer.blocks.items())},
        },
        "history": _columns([{**_figures(each, targets, drafts), **_load(each)} for each in history.past(first.time)]),
        "totals": _totals(counters),
    }


def _common_history(pipelines: Sequence[Figures]) -> History:
    times = {at for each in pipelines for at in each.history}
    return History(
        {at: together({each.replica: each.history[at] for each in pipelines if at in each.history}) for at in times}
    )


def _of_one(pipeline: Figures) -> dict[str, Any]:
    recent = History(pipeline.history).last(RECENT_S, pipeline.time)
    return {
        "replica": pipeline.replica,
        "uptime_s": round(pipeline.time - pipeline.started, 1),
        "running": _gauge(pipeline, RUNNING),
        "queued": _gauge(pipeline, QUEUED),
        "tokens_per_s": _rounded(recent.tokens_per_s or 0.0),
        "generated_tokens": int(pipeline.counters[GENERATED_TOKENS, ()]),
        "draft_quants": [_of_quant(pipeline.gauges, labels) for name, labels in pipeline.gauges if name == QUANT_RATE],
    }


def _of_quant(gauges: Values, labels: Labels) -> dict[str, Any]:
    return {
        "quant": labels[0],
        "in_use": bool(gauges[QUANT_IN_USE, labels]),
        "t_draft_ms": _ms(gauges[QUANT_T_DRAFT, labels]),
        "acceptance": _rounded(gauges[QUANT_ACCEPTANCE, labels]),
        "expected_tokens_per_s": _rounded(gauges[QUANT_RATE, labels]),
    }


def _gauge(pipeline: Figures, name: str) -> int:
    return int(pipeline.gauges[name, ()])


def _figures(window: Window, targets: Sequence[str], drafts: Sequence[str]) -> dict[str, float | None]:
    return {
        "gamma": _rounded(window.gamma),
        "sequences": _rounded(window.sequences),
        "t_target_ms": _ms(window.t_target),
        "t_draft_ms": _ms(window.t_draft),
        "target_idle": _rounded(window.idle(*targets)),
        "draft_idle": _rounded(window.idle(*drafts)),
    }


def _load(second: Window) -> dict[str, float | None]:
    return {"tokens_per_s": second.tokens, "running": second.running, "queued": second.queued}


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """One list per figure, oldest first, a value a second; None where nothing happened."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def _totals(counters: Values) -> dict[str, Any]:
    def labelled(name: str) -> dict[str, int]:
        return {labels[0]: int(value) for (each, labels), value in counters.items() if each == name}

    return {
        "requests": labelled(REQUESTS),
        "prompt_tokens": int(counters[PROMPT_TOKENS, ()]),
        "generated_tokens": int(counters[GENERATED_TOKENS, ()]),
        "draft_tokens": int(counters[DRAFT_TOKENS, ()]),
        "accepted_tokens": int(counters[ACCEPTED_TOKENS, ()]),
        "wasted_tokens": int(counters[WASTED_TOKENS, ()]),
        "target_steps": int(counters[TARGET_STEPS, ()]),
        "plain_steps": labelled(PLAIN_STEPS),
        "restarts": labelled(RESTARTS),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
