"""The runs as pictures: phi by task and method, the timeline of one request, gamma against the ratio of the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.measured import Run
from benchmarks.report import ALL, BASELINE
from duo_ray.planning import Curve, Hardware, Text, Traffic, simulate

mpl.use("Agg")

_COLOURS = {"target": "tab:blue", "draft-0": "tab:orange", "coordinator": "tab:gray"}
_SHOWN_SECONDS = 2.0
_RATIOS = (2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 20.0)


def write_plots(runs: Sequence[Run], summary: Mapping[str, Mapping[str, Mapping[str, Any]]], out: Path) -> list[Path]:
    """Write what the runs allow as PNG files; returns their paths."""
    drawn = {
        "phi.png": plot_phi(summary),
        "timeline.png": plot_timeline(runs),
        "gamma.png": plot_gamma(runs),
    }
    paths = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(out / name, dpi=150, bbox_inches="tight")
            paths.append(out / name)
    return paths


def plot_phi(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure | None:
    """Bars: one group for each task, one bar for each method."""
    methods = [m for m, row in summary[ALL].items() if "phi" in row and m != BASELINE]
    if not methods:
        return None
    tasks = list(summary)
    figure = Figure(figsize=(max(8.0, 1.4 * len(tasks) + 0.25 * len(tasks) * len(methods) ** 0.5), 4.5))
    axes = figure.subplots()
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        heights = [summary[task].get(method, {}).get("phi", np.nan) for task in tasks]
        places = np.arange(len(tasks)) - 0.4 + (number + 0.5) * width
        axes.bar(places, heights, width, label=method, color=mpl.colormaps["tab20"](number % 20))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("speed / speed of the target alone")
    axes.legend(fontsize="small", ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def plot_timeline(runs: Sequence[Run]) -> Figure | None:
    """What each actor did in the first seconds of the first traced request."""
    trace = next((turn.trace for run in runs for turn in run.turns if turn.trace), ())
    if not trace:
        return None
    start = min(event["from"] for event in trace)
    actors = sorted({event["actor"] for event in trace}, key=lambda actor: ("target", "draft", "coord").index(
        next(kind for kind in ("target", "draft", "coord") if actor.startswith(kind))
    ))  # fmt: skip
    figure = Figure(figsize=(11.0, 0.7 * len(actors) + 1.0))
    axes = figure.subplots()
    for row, actor in enumerate(actors):
        bars = [
            (event["from"] - start, event["to"] - event["from"])
            for event in trace
            if event["actor"] == actor and event["from"] - start < _SHOWN_SECONDS
        ]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=_COLOURS.get(actor, "tab:green"), edgecolors="white")
    axes.set_yticks(range(len(actors)), actors)
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    return figure


def plot_gamma(runs: Sequence[Run]) -> Figure | None:
    """Median gamma of each drafted answer against T_target / T_draft, and what the simulated loop chooses."""
    points: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for turn in run.turns:
            stats = turn.stats
            if run.method == "duo" and stats.get("gamma_history") and stats.get("t_draft_ms"):
                points.setdefault(run.task, []).append(
                    (stats["t_target_ms"] / stats["t_draft_ms"], median(stats["gamma_history"]))
                )
    if not points:
        return None
    figure = Figure(figsize=(7.0, 4.5))
    axes = figure.subplots()
    for task, pairs in points.items():
        ratios, gammas = zip(*pairs, strict=True)
        axes.scatter(ratios, gammas, label=task, s=18)
    for acceptance in (0.6, 0.8, 0.95):
        axes.plot(_RATIOS, [_simulated_gamma(ratio, acceptance) for ratio in _RATIOS], linewidth=0.9, color="gray")
        axes.annotate(f"simulated, {acceptance:.0%} accepted", (_RATIOS[-1], _simulated_gamma(_RATIOS[-1], acceptance)),
                      fontsize="x-small")  # fmt: skip
    axes.set_xlabel("T_target / T_draft")
    axes.set_ylabel("gamma (median)")
    axes.legend(fontsize="small")
    return figure


def _simulated_gamma(ratio: float, acceptance: float) -> float:
    hardware = Hardware(Curve({1: 0.05}, growth=0.015), Curve({1: 0.05 / ratio}, growth=0.3))
    simulated = simulate(hardware, Text(acceptance, 16, 128), traffic=Traffic(2))
    gammas = [plan.gamma for plan in simulated.plans if plan.gamma]
    return float(median(gammas)) if gammas else 0.0
