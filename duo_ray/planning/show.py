"""A prediction as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from duo_ray.planning.prediction import Capacity, Figures, Prediction


def show_prediction(console: Console, prediction: Prediction) -> None:
    best = prediction.best
    rows = {each.name: each for each in (prediction.alone, *prediction.schedules)}
    console.print(_table("schedules", rows, best))
    if len(prediction.actors) > 1:
        rows = {f"drafts: {each.draft_actors}": each for each in prediction.actors}
        console.print(_table("auto, by number of draft actors", rows, best))
    console.print(
        "TTFT: ms; kept: drafted tokens accepted a target pass; t idle, d idle: of target and draft", style="dim"
    )
    console.print(
        f"best: {best.name} with {best.draft_actors} draft actor{'s' if best.draft_actors != 1 else ''}, "
        f"{best.speedup:.2f} times the target alone ({best.tokens_per_s:.1f} tokens/s; gamma {best.gamma:.0f}, "
        f"lead {best.lead:.0f})"
    )


def show_capacity(console: Console, capacity: Mapping[str, Capacity], title: str) -> None:
    table = Table("", "pipelines", "GPUs", "CPU cores", "wait p95 s", "tokens/s a stream", title=title, box=SIMPLE)
    for name, each in capacity.items():
        counts = (str(count) for count in (each.pipelines, each.gpus, each.cpu_cores))
        table.add_row(name, *counts, f"{each.waiting_p95_s:.2f}", f"{each.decode_speed:.1f}")
    console.print(table)


def _table(title: str, rows: Mapping[str, Figures], best: Figures) -> Table:
    columns = ("phi", "tok/s", "TTFT", "gamma", "lead", "kept", "t idle", "d idle")
    table = Table(Column(no_wrap=True), *columns, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.speedup:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.ttft_ms:.0f}",
            f"{row.gamma:.0f}",
            f"{row.lead:.0f}",
            f"{row.mean_accepted:.2f}",
            f"{row.target_idle:.0%}",
            f"{row.draft_idle:.0%}",
            style="bold green" if row is best else None,
        )
    return table
