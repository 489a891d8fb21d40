"""A diagnosis as one HTML file with its plots in it."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from duo_ray.diagnosis.diagnosis import Diagnosis
from duo_ray.diagnosis.positions import by_position
from duo_ray.diagnosis.show import acceptance_lines, agreement_lines, speed_lines
from duo_ray.types import DuoRayError

_INK = "#010203"
"""What is drawn in this becomes the colour of the page's text, which its theme decides."""
_FIRST, _SECOND = "#3f8fc4", "#d9822b"
"""Legible on white and on black."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def write_html(diagnosis: Diagnosis, path: Path) -> None:
    """Write the report; it needs no other file and no network.

    Raises:
        DuoRayError: the file cannot be written.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))
    sections = {
        "Acceptance": acceptance_lines(diagnosis),
        "Temperature and templates": agreement_lines(diagnosis),
        "Speed": speed_lines(diagnosis),
    }
    page = template.render(diagnosis=diagnosis, sections=sections, plots=draw(diagnosis))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DuoRayError(f"{path}: {error.strerror or error}") from None


def draw(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(title, SVG element) of each plot."""
    plots: list[tuple[str, Callable[[Axes, Diagnosis], None]]] = [
        ("Acceptance, predicted and measured", _acceptance),
        ("By kind of token", _kinds),
        ("By position in the answer", _positions),
        ("Speed-up by gamma, simulated", _gammas),
        ("Speed-up by requests at once, simulated", _batches),
    ]
    if diagnosis.scores.temperature is not None:
        plots.insert(3, ("Divergence by the draft's temperature", _temperatures))
    drawn = []
    for title, plot in plots:
        # Ids are made of the salt: those of two plots in one page must differ.
        with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):
            figure = Figure(figsize=(6.4, 3.6), layout="constrained")
            plot(figure.subplots(), diagnosis)
            drawn.append((title, _svg(figure)))
    return drawn


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _acceptance(axes: Axes, diagnosis: Diagnosis) -> None:
    pairs = (("greedy", diagnosis.greedy), (f"sampled at {diagnosis.sampling_temperature:g}", diagnosis.sampled))
    for offset, colour, label in ((-0.2, _FIRST, "predicted"), (0.2, _SECOND, "measured")):
        found = [(row, getattr(acceptance, label)) for row, (_, acceptance) in enumerate(pairs)]
        known = [(row + offset, each) for row, each in found if each is not None]
        places, heights = [at for at, _ in known], [each.value for _, each in known]
        errors = [each.error for _, each in known]
        axes.bar(places, heights, 0.38, yerr=errors, color=colour, ecolor=_INK, capsize=4, label=label)
    axes.set_xticks(range(len(pairs)), [name for name, _ in pairs])
    axes.set_ylim(0.0, 1.05)
    axes.set_ylabel("share kept")
    axes.figure.legend(loc="outside upper right", ncols=2)


def _kinds(axes: Axes, diagnosis: Diagnosis) -> None:
    kinds = diagnosis.kinds
    rows = range(len(kinds))
    axes.barh([row - 0.2 for row in rows], [each.agreement for each in kinds], 0.38, color=_FIRST,
              label="first guess agrees")  # fmt: skip
    axes.barh([row + 0.2 for row in rows], [each.overlap for each in kinds], 0.38, color=_SECOND,
              label="sampled token kept")  # fmt: skip
    axes.set_yticks(rows, [f"{each.name} ({each.count})" for each in kinds])
    axes.set_xlim(0.0, 1.0)
    axes.invert_yaxis()
    axes.set_xlabel("share of the positions")
    axes.figure.legend(loc="outside upper right", ncols=2)


def _positions(axes: Axes, diagnosis: Diagnosis) -> None:
    found = by_position(diagnosis.scores.positions)
    places = [int(each.name) for each in found]
    axes.plot(places, [each.divergence for each in found], color=_FIRST, label="KL, nats")
    axes.plot(places, [each.variation for each in found], "--", color=_SECOND, label="total variation")
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("token of the answer")
    axes.figure.legend(loc="outside upper right", ncols=2)


def _temperatures(axes: Axes, diagnosis: Diagnosis) -> None:
    fit = diagnosis.scores.temperature
    if fit is None:
        return
    axes.plot(*zip(*fit.curve, strict=True), "o-", color=_FIRST, markersize=4)
    axes.axvline(fit.best, color=_SECOND, linestyle="--", label=f"best: {fit.best:.2f}")
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 0.5, 1.0, 2.0, 4.0], ["1/4", "1/2", "1", "2", "4"])
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("multiple of the draft's temperature")
    axes.set_ylabel("KL, nats")
    axes.legend()


def _gammas(axes: Axes, diagnosis: Diagnosis) -> None:
    outlook = diagnosis.outlook
    axes.bar([str(gamma) for gamma in outlook.gammas], list(outlook.gammas.values()), color=_FIRST, label="fixed gamma")
    axes.axhline(outlook.auto, color=_SECOND, linestyle="--", label=f"automatic: {outlook.auto:.2f}")
    axes.axhline(1.0, color=_INK, linewidth=1.0)
    axes.set_xlabel("gamma")
    axes.set_ylabel("times the target alone")
    axes.figure.legend(loc="outside upper right", ncols=2)


def _batches(axes: Axes, diagnosis: Diagnosis) -> None:
    batches = diagnosis.outlook.batches
    sizes = [str(batch.size) for batch in batches]
    axes.plot(sizes, [batch.auto for batch in batches], "o-", color=_FIRST, label="the controller decides")
    axes.plot(sizes, [batch.always for batch in batches], "s--", color=_SECOND, label="always drafting")
    axes.axhline(1.0, color=_INK, linewidth=1.0)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("times the target alone")
    axes.legend()
