"""What the runs amount to: figures by task and method, as JSON and Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measured import Run, Turn

BASELINE = "target"
ALL = "all tasks"

_COLUMNS: dict[str, tuple[str, str]] = {
    "phi": ("phi", ".2f"),
    "tokens_per_s": ("tokens/s", ".1f"),
    "ttft_ms": ("TTFT ms", ".0f"),
    "gap_p50_ms": ("gap p50 ms", ".0f"),
    "gap_p99_ms": ("gap p99 ms", ".0f"),
    "mean_accepted": ("accepted", ".2f"),
    "several_sequences": ("several seq.", ".0%"),
    "gamma": ("gamma", ".0f"),
    "target_idle": ("target idle", ".0%"),
    "draft_idle": ("draft idle", ".0%"),
    "wasted": ("wasted", ".0%"),
    "overhead_p50_ms": ("overhead ms", ".1f"),
    "cpu_seconds_per_token": ("CPU s/token", ".3f"),
    "equal": ("equal", ""),
    "runs": ("runs", "d"),
}


_LEGEND = (
    "Speed counts from a request's arrival to its last token. A gap is the time between a token and the one before;",
    "tokens that arrive together are 0 apart. *accepted*: drafted tokens kept per target pass. *gamma*: median of what",
    "the draft was asked for at once, leads included. *wasted*: share of the drafted tokens that were not kept.",
    "*equal*: prompts whose answers are the target's, token by token.",
)


def summarise(runs: Sequence[Run], order: Sequence[str] = ()) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by task (and over all of them) and method: medians over the prompts.

    phi is a method's tokens per second as a multiple of the target's alone on the same prompt. Methods come in `order`,
    others after them.
    """
    good = [run for run in runs if run.error is None and run.tokens]
    base = {(run.task, run.prompt): run for run in good if run.method == BASELINE}
    tasks = list(dict.fromkeys(run.task for run in good))
    found = list(dict.fromkeys(run.method for run in runs))
    methods = [*(method for method in order if method in found), *(method for method in found if method not in order)]
    return {
        task: {
            method: figures(chosen, base)
            for method in methods
            if (chosen := [run for run in good if run.method == method and task in (run.task, ALL)])
        }
        for task in (*tasks, ALL)
    }


def figures(runs: Sequence[Run], base: Mapping[tuple[str, str], Run]) -> dict[str, Any]:
    """One row: a method on one task. Figures that only our engine has are left out for others."""
    turns = [turn for run in runs for turn in run.turns]
    pairs = [(run, base[run.task, run.prompt]) for run in runs if (run.task, run.prompt) in base]
    ratios = [run.speed / alone.speed for run, alone in pairs]
    gaps = np.array(list(chain.from_iterable(turn.gaps for turn in turns)) or [0.0])
    row: dict[str, Any] = {
        "runs": len(runs),
        "tokens_per_s": median(run.speed for run in runs),
        "ttft_ms": 1000.0 * median(turn.at[0] for turn in turns if turn.at),
        "gap_p50_ms": 1000.0 * float(np.quantile(gaps, 0.5)),
        "gap_p99_ms": 1000.0 * float(np.quantile(gaps, 0.99)),
        "cpu_seconds_per_token": sum(turn.cpu_seconds for turn in turns) / sum(len(turn.ids) for turn in turns),
        "peak_bytes": _largest(run.peak_bytes for run in runs),
    }
    if ratios:
        row |= {"phi": median(ratios), "phi_least": min(ratios), "phi_most": max(ratios)}
        same = [_equality(run, alone) for run, alone in pairs]
        row["equal"] = f"{same.count(True)}/{len(same)}"
    return row | _own_figures([turn for turn in turns if turn.stats])


def _own_figures(turns: Sequence[Turn]) -> dict[str, Any]:
    if not turns or not any(turn.stats["draft_tokens"] for turn in turns):
        return {}
    stats = [turn.stats for turn in turns]

    def middle(value: Callable[[Mapping[str, Any]], float]) -> float:
        return median(value(each) for each in stats)

    gammas = list(chain.from_iterable(each["gamma_history"] for each in stats))
    sequences = list(chain.from_iterable(each["sequences_history"] for each in stats))
    drafted = sum(each["draft_tokens"] for each in stats)
    return {
        "mean_accepted": sum(each["accepted_tokens"] for each in stats) / sum(each["target_steps"] for each in stats),
        "acceptance_per_position": _by_position(stats),
        "several_sequences": sum(count > 1 for count in sequences) / len(sequences) if sequences else 0.0,
        "gamma": median(gammas) if gammas else 0.0,
        "gamma_counts": {str(gamma): count for gamma, count in sorted(Counter(gammas).items())},
        "target_idle": middle(lambda each: each["target_idle"]),
        "draft_idle": middle(lambda each: each["draft_idle"]),
        "both_idle": middle(lambda each: each["both_idle"]),
        "wasted": sum(each["wasted_tokens"] for each in stats) / drafted,
        "overhead_p50_ms": middle(lambda each: each["round_overhead_ms"]["p50"]),
        "t_target_ms": middle(lambda each: each["t_target_ms"]),
        "t_draft_ms": middle(lambda each: each["t_draft_ms"]),
    }


def _by_position(stats: Sequence[Mapping[str, Any]]) -> list[float]:
    """Mean over the answers of the share accepted at each position of a block, as far as any went."""
    rows = [each["acceptance_per_position"] for each in stats]
    longest = max(map(len, rows), default=0)
    return [round(float(np.mean([row[i] for row in rows if i < len(row)])), 3) for i in range(longest)]


def _equality(run: Run, alone: Run) -> bool:
    """Whether all answers are the target's own, token by token."""
    return [turn.ids for turn in run.turns] == [turn.ids for turn in alone.turns]


def _largest(peaks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for each in peaks:
        for process, size in each.items():
            out[process] = max(size, out.get(process, 0))
    return out


def write_report(runs: Sequence[Run], about: Mapping[str, Any], out: Path) -> str:
    """Write results.json and report.md; returns the Markdown."""
    summary = summarise(runs, about.get("plan", {}).get("methods", ()))
    failed = [{"task": r.task, "prompt": r.prompt, "method": r.method, "error": r.error} for r in runs if r.error]
    (out / "results.json").write_text(
        json.dumps({**about, "summary": summary, "failed": failed}, indent=1, ensure_ascii=False), encoding="utf-8"
    )
    text = markdown(summary, about, failed)
    (out / "report.md").write_text(text, encoding="utf-8")
    return text


def markdown(
    summary: Mapping[str, Mapping[str, Mapping[str, Any]]],
    about: Mapping[str, Any],
    failed: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Tables: phi by task, then all figures over all tasks, and what ran on what."""
    hardware, versions, plan = (about.get(name, {}) for name in ("hardware", "versions", "plan"))
    tasks = list(summary)
    methods = list(summary[ALL])
    lines = [
        "# Benchmark",
        "",
        f"{hardware.get('cpu', 'CPU')}, {len(hardware.get('cores', ()))} cores, GPUs: "
        f"{', '.join(hardware.get('gpus', ())) or 'none'}. "
        + ", ".join(f"{name} {number}" for name, number in versions.items()),
        "",
        f"Target {about.get('models', {}).get('target')}, draft {about.get('models', {}).get('draft')}; greedy, up to "
        f"{plan.get('tokens')} tokens an answer, prompts: {plan.get('prompts')}.",
        "",
        "## phi: tokens per second as a multiple of the target's alone (median over the prompts)",
        "",
        _row(("method", *tasks)),
        _row("---" for _ in (0, *tasks)),
    ]
    lines += [_row((method, *(_cell(summary[task].get(method, {}), "phi") for task in tasks))) for method in methods]
    lines += [
        "",
        "## All tasks",
        "",
        _row(("method", *(title for title, _ in _COLUMNS.values()))),
        _row("---" for _ in (0, *_COLUMNS)),
    ]
    lines += [_row((method, *(_cell(summary[ALL][method], name) for name in _COLUMNS))) for method in methods]
    lines += [
        "",
        *_LEGEND,
        "",
        "## Methods",
        "",
        *(f"- `{name}`: {text}" for name, text in about.get("methods", {}).items()),
        *(f"- `{name}` was left out: {reason}" for name, reason in about.get("left_out", {}).items()),
    ]
    if failed:
        lines += ["", "## Failed runs", ""]
        lines += [f"- {each['method']} on {each['task']} {each['prompt']}: {each['error']}" for each in failed]
    lines += ["", "## Peak memory, MiB", ""]
    for method in methods:
        peaks = ", ".join(f"{p} {size / 2**20:.0f}" for p, size in summary[ALL][method]["peak_bytes"].items())
        lines.append(f"- `{method}`: {peaks}")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any], name: str) -> str:
    return format(row[name], _COLUMNS[name][1]) if name in row else "-"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
