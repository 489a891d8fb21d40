"""What a user gets: the student for transformers, .gguf files of several weight types, measured, and a model card."""

from __future__ import annotations

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from duo_ray.core.costs import Costs
from duo_ray.distillation.data import Answer, Progress
from duo_ray.distillation.gguf_file import write_gguf
from duo_ray.distillation.workspace import Workspace, read_json, write_json
from duo_ray.models.catalog import CHOSEN_DRAFT
from duo_ray.planning import Curve, Hardware, Text, simulate

QUANTS = ("Q8_0", "Q4_K_M", "Q4_1", "Q4_0")
"""Weight types to choose among. Those of blocks of 256 become similar ones of 32 where a model's rows do not fit."""

_TESTED_PLACES = 1024
_STEPS = 24
_WIDTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Exported:
    """One .gguf file, as measured on this machine."""

    file: str
    quant: str
    size: int
    """Bytes."""
    t_draft: float
    """Seconds of one drafted token."""
    acceptance: float
    """Expected chance that a token sampled at temperature 1 is kept; see `loss.acceptances`."""
    greedy: float
    """Share of places where its best token is the target's."""
    speedup: float
    """Simulated with the target's measured times: tokens per second, one request at a time, by the target's alone."""


def export(
    workspace: Workspace, testing: Sequence[Path], *, tokenizer_gguf: Path | None, threads: int, progress: Progress
) -> tuple[list[Exported], Exported]:
    """Write and measure all forms of the trained student.

    Args:
        testing: files of held-out answers.
        tokenizer_gguf: the file that the student's tokenizer came from, where it came from one.
        threads: cores of a draft.

    Returns:
        All of them, and the one with the highest simulated speed, which the directory then stands for as a draft.
    """
    from duo_ray.models.llama_library import quantize  # noqa: PLC0415 - loads llama.cpp

    for file in workspace.trained.iterdir():
        if file.name != "training.json":
            _link(file, workspace.out / file.name)
    name = workspace.out.resolve().name
    finest = workspace.out / f"{name}-F32.gguf"
    progress("writing float32 weights for llama.cpp", 0.0)
    write_gguf(workspace.trained, tokenizer_gguf, finest, name)
    answers = _tested(testing)
    costs = Costs.from_dict(read_json(workspace.costs) or {"target": {}, "draft": {}, "overhead": 0.0})
    measured = []
    for done, quant in enumerate(QUANTS):
        progress(f"measuring {quant}", (done + 0.5) / len(QUANTS))
        path = workspace.out / f"{name}-{quant}.gguf"
        path.unlink(missing_ok=True)  # of an export that was interrupted
        quantize(finest, path, quant, 0)
        measured.append(_measure(path, quant, answers, threads, costs))
    best = max(measured, key=lambda each: each.speedup)
    write_json(workspace.out / CHOSEN_DRAFT, {"file": best.file, "measured": [asdict(each) for each in measured]})
    return measured, best


def _link(source: Path, path: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def _tested(paths: Sequence[Path]) -> list[Answer]:
    """Some answers, greedy and sampled ones mixed."""
    found: list[Answer] = []
    for path in random.Random(0).sample(paths, len(paths)):
        if sum(len(each.answer) for each in found) >= _TESTED_PLACES:
            break
        found.append(Answer.load(path))
    return found


def _measure(path: Path, quant: str, answers: Sequence[Answer], threads: int, costs: Costs) -> Exported:
    from duo_ray.models.llama_cpp import LlamaCppDraft  # noqa: PLC0415 - loads llama.cpp

    longest = max(len(each.prompt) + len(each.answer) for each in answers)
    model = LlamaCppDraft.load(path, threads=threads, max_context=longest, slots=8)
    with closing(model):
        timings = defaultdict(list)
        for width, seconds in model.warm_up(_STEPS):
            timings[width].append(seconds)
        sums, places = np.zeros(2), 0
        for answer in answers:
            sums += _kept(model, answer)
            places += int((answer.top_probs.sum(-1) > 0).sum())
    acceptance, greedy = (float(each) for each in sums / max(1, places))
    curve = {width: median(seconds) for width, seconds in timings.items()}
    speedup = _speedup(costs, curve, greedy, answers)
    return Exported(path.name, quant, path.stat().st_size, curve[1], acceptance, greedy, speedup)


def _kept(model: Any, answer: Answer) -> Any:
    """Sums of both chances over an answer's places; see `loss.acceptances`."""
    found = np.zeros(2)
    text = (*answer.prompt.tolist(), *answer.answer[:-1].tolist())
    first = len(answer.prompt) - 1
    for place, logits in enumerate(model.logits_along(text)):
        if place >= first:
            ids, probs = answer.top_ids[place - first], answer.top_probs[place - first]
            weights = np.exp(logits - logits.max(), dtype=np.float64)
            q = weights[ids] / weights.sum()
            found += np.minimum(probs, q).sum(), probs[0] > 0 and logits.argmax() == ids[0]
    return found


def _speedup(costs: Costs, draft: Mapping[int, float], greedy: float, answers: Sequence[Answer]) -> float:
    target, faster = (
        Curve({width: costs.target_seconds(width, alone=each) for width in _WIDTHS}) for each in (False, True)
    )
    hardware = Hardware(
        target, Curve(dict(draft)), alone=faster, overhead=costs.overhead(drafting=False),
        overhead_drafting=costs.overhead(drafting=True),
    )  # fmt: skip
    prompt, length = (max(1, round(np.mean([len(part) for part in parts]))) for parts in (
        [each.prompt for each in answers], [each.answer for each in answers]
    ))  # fmt: skip
    text = Text(min(max(greedy, 0.01), 1.0), prompt, max(length, 32))
    alone = simulate(hardware, text, draft=False).tokens_per_second
    return simulate(hardware, text).tokens_per_second / alone
