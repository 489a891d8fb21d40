"""A series of runs from names to report: what `duo-ray bench` calls."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import DEFAULTS, METHODS, Plan, Progress, chosen, measure
from benchmarks.plots import write_plots
from benchmarks.report import summarise, write_report
from benchmarks.tasks import TASKS
from duo_ray.config import Config
from duo_ray.types import DuoRayError

__all__ = ["DEFAULTS", "run"]


def run(
    config: Config,
    out: Path,
    *,
    tasks: str,
    methods: str,
    prompts: Path | None,
    count: int | None,
    tokens: int,
    seed: int,
    progress: Progress,
) -> str:
    """Measure what is missing in `out`, write results.json, report.md and plots there; returns the report.

    Raises:
        DuoRayError: see `harness.measure`; or not one run succeeded.
    """
    plan = Plan(
        tasks=chosen(tasks, list(TASKS), "task"),
        methods=chosen(methods, list(METHODS), "method"),
        prompts=prompts,
        count=count,
        tokens=tokens,
        seed=seed,
    )
    journal, about = measure(plan, config, out, progress)
    if not any(run.error is None for run in journal.runs):
        reasons = {run.error for run in journal.runs} | set(about.get("left_out", {}).values())
        raise DuoRayError(f"nothing was measured: {'; '.join(str(reason) for reason in reasons)}")
    progress("drawing", 1, 1)
    text = write_report(journal.runs, about, out)
    write_plots(journal.runs, summarise(journal.runs, plan.methods), out)
    return text
