"""The model card of a draft, and the same figures for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from duo_ray.distillation.export import Exported

_COLUMNS = ("file", "MiB", "T_draft ms", "acceptance", "greedy", "simulated speed-up")

_CARD = """---
library_name: transformers
base_model: {target}
tags: [speculative-decoding, draft, gguf]
---

# {name}

A draft for {target}, made by `duo-ray distill`: {origin}, trained on {texts} to {prompts} prompts
({answers} answers; {held_out} answers to other prompts were held out). Loss: cross-entropy on the target's tokens plus
KL divergence ({divergence}) over its 64 most probable tokens and the rest as one. It writes what this target writes,
and is of no use by itself.

    duo-ray generate --target {target} --draft {folder} "..."

takes the file marked *. Measured on the machine it was made on ({threads} threads), on held-out answers:

{table}

- *T_draft*: milliseconds a token.
- *acceptance*: expected chance that a token sampled at temperature 1 is kept, the mean of sum min(p, q) over the
  target's 64 most probable tokens (a lower bound). *greedy*: share of places where both models' best tokens agree.
- *simulated speed-up*: tokens per second by the target's alone, one request at a time, with the times measured there.
- In float32, before training: acceptance {before[acceptance]:.3f}, greedy {before[greedy]:.3f}; after {done} steps of
  {batch} answers in {precision}: {after[acceptance]:.3f}, {after[greedy]:.3f}.

The directory itself is the float32 model for transformers; the F32 file is what other weight types are best made of
(`duo-ray quantize`).
"""


def write_card(path: Path, measured: Sequence[Exported], best: Exported, facts: Mapping[str, Any]) -> None:
    """Write a model card with the figures; `facts` are what `_CARD` names beside them."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(each, best) for each in measured)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    path.write_text(_CARD.format(table=table, **facts), encoding="utf-8")


def show_drafts(console: Console, measured: Sequence[Exported], best: Exported) -> None:
    """The same table for the terminal."""
    table = Table(*_COLUMNS, box=None)
    for each in measured:
        table.add_row(*_row(each, best))
    console.print(table)


def _row(each: Exported, best: Exported) -> tuple[str, ...]:
    return (
        f"{each.file}{' *' * (each is best)}",
        f"{each.size / 2**20:.0f}",
        f"{1000 * each.t_draft:.1f}",
        f"{each.acceptance:.3f}",
        f"{each.greedy:.3f}",
        f"{each.speedup:.2f}",
    )
