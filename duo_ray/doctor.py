"""`duo-ray doctor`: the machine, the choices made for it, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

from rich.console import Console
from rich.markup import escape

from duo_ray.actors.launch import TAGS
from duo_ray.actors.prepare import Prepared, Progress, prepare
from duo_ray.config import Config
from duo_ray.core.costs import Costs
from duo_ray.core.precision import Estimate, Trial
from duo_ray.hardware.cores import show_cores
from duo_ray.hardware.load import sample_load
from duo_ray.hardware.machine import detect_machine
from duo_ray.models.calibration import read_calibration
from duo_ray.session import Duo
from duo_ray.types import DuoRayError

LIBRARIES = ("duo-ray", "ray", "torch", "transformers", "llama-cpp-python", "numpy")
_GIB = 2**30


@dataclass(slots=True)
class Report:
    """What was found: sections of (name, value), what does not work, and what works worse than it could."""

    sections: dict[str, dict[str, object]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    costs: dict[str, object] | None = None
    """Measured seconds as `Costs.as_dict` gives them, for `duo-ray plan --from`."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def show(self, console: Console) -> None:
        for title, rows in self.sections.items():
            console.print(f"[bold]{title}[/]")
            for name, value in rows.items():
                console.print(f"  {name:<22} {escape(str(value))}", soft_wrap=True)
        for problem in self.problems:
            console.print(f"[bold red]problem:[/] {escape(problem)}", soft_wrap=True)
        for warning in self.warnings:
            console.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
        if not self.problems:
            console.print("[green]nothing wrong was found[/]")


def examine(config: Callable[[], Config], *, measure: bool, progress: Progress) -> Report:
    """Describe machine and choices; `measure` starts the pipeline and times both models.

    What is wrong becomes a problem of the report, not an exception.
    """
    report = Report()
    _machine(report)
    report.sections["libraries"] = {name: version(name) for name in LIBRARIES}
    try:
        settings = config()
        prepared = prepare(settings, progress=progress)
        _choices(report, prepared)
        if measure:
            _measured(report, settings, progress)
        else:
            _remembered(report, prepared)
    except DuoRayError as error:
        report.problems.append(str(error))
    return report


def _machine(report: Report) -> None:
    machine, load = detect_machine(), sample_load()
    gpus = [f"{gpu.name}, {gpu.memory / _GIB:.0f} GiB, driver {gpu.driver}" for gpu in machine.gpus]
    report.sections["machine"] = {
        "CPU": machine.cpu,
        "cores": show_cores(machine.cores),
        "NUMA nodes": "; ".join(show_cores(node) for node in machine.numa_nodes),
        "CPU limit": machine.cpu_limit if machine.cpu_limit is not None else "none",
        "instructions": ", ".join(sorted(machine.isa)) or "plain",
        "memory": f"{machine.memory_available / _GIB:.1f} of {machine.memory_total / _GIB:.1f} GiB free",
        "GPUs": "; ".join(gpus) or "none",
        "load": ", ".join(f"{share:.0%}" for share in load.cores) + " of each core",
    }
    if load.cores and min(load.cores) > 0.5:
        report.warnings.append(
            "every core is more than half busy with other work: times will be worse than they could be"
        )


def _choices(report: Report, prepared: Prepared) -> None:
    settings = prepared.settings
    drafts = settings.drafts
    choices: dict[str, object] = {
        "target": prepared.files.source,
        "target engine": settings.target.engine,
        "target device": settings.target.device,
        "target precision": settings.target.dtype,
        "target cores": show_cores(settings.target.cores) or "any",
        "target context": f"{settings.target.max_context} tokens x {settings.target.slots} requests",
        "draft": ", ".join(path for _, path in drafts[0].files) if drafts else "none",
        "draft actors": len(drafts),
        "draft cores": "; ".join(show_cores(draft.cores) or "any" for draft in drafts) or "none",
        "placement group": settings.footprint.bundles(TAGS),
    }
    report.sections["choices"] = choices | {f"note {i}": note for i, note in enumerate(prepared.notes, 1)}
    report.sections["memory to be taken"] = {name: str(size) for name, size in prepared.memory.items()}


def _remembered(report: Report, prepared: Prepared) -> None:
    kept = read_calibration(prepared.calibration_path)
    if kept is None:
        report.sections["times"] = {"measured": "not yet: --measure, or the first start, does it"}
        return
    report.costs = kept.costs
    report.sections["times at an earlier start"] = _times(Costs.from_dict(kept.costs))
    trials = {quant: Trial(**trial) for quant, trial in kept.costs.get("trials", {}).items()}
    if trials:
        report.sections["quantisations of the draft at an earlier start"] = {
            quant: f"{trial.kept} of {trial.judged} drafted tokens kept" + ", used" * (quant == kept.costs["quant"])
            for quant, trial in trials.items()
        }


def _measured(report: Report, settings: Config, progress: Progress) -> None:
    with Duo(settings, progress=progress) as duo:
        info = duo.pipeline.info
        report.costs = info.measured
        report.sections["times"] = _times(Costs.from_dict(info.measured))
        report.sections["vocabularies"] = {
            f"draft {i}": f"{d.vocabulary.strategy}: {d.vocabulary.why}" for i, d in enumerate(info.drafts)
        }
        if len(info.precision) > 1:
            report.sections["quantisations of the draft"] = _quantisations(info.precision)
        memory = {
            "target": info.target.memory_bytes,
            **{f"draft {i}": d.memory_bytes for i, d in enumerate(info.drafts)},
        }
        report.sections["memory of weights and caches"] = {
            name: f"{size / _GIB:.2f} GiB" for name, size in memory.items()
        }


def _quantisations(precision: Sequence[Estimate]) -> dict[str, object]:
    return {
        each.quant: f"T_draft {each.draft_seconds * 1000:.1f} ms, acceptance {each.token:.2f}, expected "
        f"{each.tokens_per_second:.1f} tokens/s{' (in use)' if each.in_use else ''}"
        for each in precision
    }


def _times(costs: Costs) -> dict[str, object]:
    target = {f"T_target({n})": f"{costs.target_seconds(n) * 1000:.1f} ms" for n in (1, 4, 8, 16, 32)}
    if costs.as_dict()["alone"]:
        target |= {
            f"T_target({n}), no draft at work": f"{costs.target_seconds(n, alone=True) * 1000:.1f} ms" for n in (1, 8)
        }
    draft = {f"T_draft({k} sequences)": f"{costs.draft_seconds(k) * 1000:.1f} ms" for k in (1, 2, 4)}
    ratio = costs.target_seconds(1) / costs.draft_seconds(1)
    return {**target, **draft, "T_target(1) / T_draft(1)": f"{ratio:.1f}"}
