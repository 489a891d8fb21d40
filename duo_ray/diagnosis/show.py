"""A diagnosis as text in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from duo_ray.diagnosis.diagnosis import Acceptance, Diagnosis
from duo_ray.diagnosis.positions import Estimate, Group
from duo_ray.types import DuoRayError


def show_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    scores, outlook = diagnosis.scores, diagnosis.outlook
    lines = [
        f"[bold]{escape(diagnosis.verdict)}[/]",
        "",
        escape(f"target {diagnosis.target}; draft {diagnosis.draft} ({scores.quant or 'unknown quantisation'})"),
        escape(diagnosis.observed.match.describe()),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    groups = (*diagnosis.kinds, diagnosis.overall)
    console.print(_groups(f"along {diagnosis.texts} texts of the target, by kind of token", groups))
    console.print(_groups("by place in the answer", diagnosis.places))
    console.print(
        "KL (nats) and TV: target against draft over the tokens both have; agree: the draft's first guess is the "
        "target's token; 1-TV: chance that a sampled token is kept",
        style="dim",
    )
    for title, lines in (
        ("acceptance", acceptance_lines(diagnosis)),
        ("temperature and templates", agreement_lines(diagnosis)),
        ("speed", speed_lines(diagnosis)),
    ):
        console.print(f"\n[bold]{title}[/]")
        for line in lines:
            console.print(f"  {escape(line)}", soft_wrap=True)
    table = Table("requests at once", "auto", "always drafting", title="speed-up, simulated", box=SIMPLE)
    for batch in outlook.batches:
        table.add_row(str(batch.size), f"{batch.auto:.2f}", f"{batch.always:.2f}")
    console.print(table)
    console.print("[bold]advice[/]")
    for advice in diagnosis.advice:
        console.print(f"  [green]{escape(advice.what)}[/]\n    because {escape(advice.because)}", soft_wrap=True)


def html_writer(path: Path) -> Callable[[Diagnosis], None]:
    """What writes a report to `path`: asked for before the long work, it says what is missing for it.

    Raises:
        DuoRayError: no directory there, or no matplotlib.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise DuoRayError(f"--html {path}: give the name of a file in a directory that exists")
    try:
        from duo_ray.diagnosis.html import write_html  # noqa: PLC0415 - an extra, for plots only
    except ImportError as error:
        raise DuoRayError(f"--html needs {error.name}: install it with pip install 'duo-ray[bench]'") from None
    return partial(write_html, path=path)


def acceptance_lines(diagnosis: Diagnosis) -> list[str]:
    """Predicted against measured."""
    temperature = diagnosis.sampling_temperature
    rules = ("the share of positions where both agree", "the mean of 1 - TV, arXiv 2211.17192, theorem 3.5")
    if diagnosis.scores.used.strategy == "string":
        rules = (rules[0], "the mean probability of the proposed token")
    return [
        f"greedy: {_compared(diagnosis.greedy)}; the prediction is {rules[0]}",
        f"sampled at {temperature:g}: {_compared(diagnosis.sampled)}; the prediction is {rules[1]}",
    ]


def _compared(acceptance: Acceptance) -> str:
    return f"predicted {shown(acceptance.predicted)}, measured in the pipeline {shown(acceptance.measured)}"


def shown(estimate: Estimate | None) -> str:
    """A share with its standard error and what it is of."""
    if estimate is None:
        return "nothing (no token was judged)"
    return f"{estimate.value:.1%} ± {estimate.error:.1%} (of {estimate.count})"


def agreement_lines(diagnosis: Diagnosis) -> list[str]:
    """Whether temperature or chat templates disagree, and how else the draft could be used."""
    scores, lines = diagnosis.scores, []
    fit = scores.temperature
    if fit is not None:
        lines.append(
            f"the draft fits best at {fit.best:.2f} times its temperature: KL {fit.best_divergence:.3f} nats in place "
            f"of {fit.divergence:.3f}, sampled tokens kept {fit.best_overlap:.1%} in place of {fit.overlap:.1%}"
        )
    lines.append(scores.templates.describe())
    if not diagnosis.observed.match.report.same:
        lines.append(f"the target gives {scores.shared_mass:.1%} of its probability to tokens that the draft has")
    if len(scores.views) > 1:
        for view in scores.views:
            template = {"none": "no chat template", "own": "its own template"}.get(
                view.template, "the target's template"
            )
            used = ", as now" if view.used else ""
            lines.append(f"matched by {view.strategy}, {template}{used}: {shown(view.agreement)} agree")
    return lines


def speed_lines(diagnosis: Diagnosis) -> list[str]:
    """Measured and simulated speeds, the best gamma, the best number of sequences."""
    observed, outlook = diagnosis.observed, diagnosis.outlook
    gammas = ", ".join(f"{gamma}: {speed:.2f}" for gamma, speed in outlook.gammas.items())
    sequences = ", ".join(f"{count}: {speed:.2f}" for count, speed in outlook.sequences.items())
    return [
        f"measured: {observed.alone.per_second:.1f} tokens/s alone, {observed.drafted.per_second:.1f} with the draft, "
        f"{observed.speedup:.2f} times as many",
        f"T_target / T_draft {outlook.ratio:.1f}; round overhead {observed.overhead_share:.1%} of a target pass",
        f"simulated: {outlook.auto:.2f} with automatic gamma (median {outlook.auto_gamma:.0f}, lead "
        f"{outlook.auto_lead:.0f})",
        f"by fixed gamma: {gammas}; best {outlook.best_gamma}",
        f"by sequences: {sequences}; best {outlook.best_sequences}",
        f"a draft twice as fast: {outlook.faster:.2f}; one with half the misses: {outlook.better:.2f}",
    ]


def _groups(title: str, groups: Sequence[Group]) -> Table:
    numbers = (Column(name, justify="right") for name in ("tokens", "KL", "TV", "agree", "1-TV"))
    table = Table(Column(no_wrap=True), *numbers, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for each in groups:
        table.add_row(each.name, str(each.count), f"{each.divergence:.3f}", f"{each.variation:.3f}",
                      f"{each.agreement:.1%}", f"{each.overlap:.1%}")  # fmt: skip
    return table
