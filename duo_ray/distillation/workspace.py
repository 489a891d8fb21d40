"""Where a distillation keeps what it has done, so that another start goes on from there.

Whatever is found under its final name is whole: files and folders are written under another one and renamed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duo_ray.types import DuoRayError


class DistillationError(DuoRayError):
    """A draft cannot be made as asked; the text says why and what would do."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One training: the folder it starts from, what it keeps while it runs, the folder that comes of it."""

    start: Path
    plan: Path
    checkpoints: Path
    trained: Path


class Workspace:
    """The folder of one draft: what the user gets on top, what a resumed run needs in `work`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out / "work"
        self.answers = self.work / "answers"
        self.translated = self.work / "translated"
        self.student = self.work / "student"
        self.own = self.work / "own"
        self.trained = self.work / "trained"
        self.costs = self.work / "costs.json"
        self.plan = self.work / "plan.json"
        self.clock = self.work / "clock.json"

    def stages(self, *, on_policy: bool) -> tuple[Stage, ...]:
        """The trainings, one after the other: on the target's answers and, if so asked, on the student's own, too."""
        first = self.work / "first" if on_policy else self.trained
        stages = [Stage(self.student, self.work / "training.json", self.work / "checkpoints", first)]
        if on_policy:
            own = self.work / "training-own.json", self.work / "checkpoints-own"
            stages.append(Stage(first, *own, self.trained))
        return tuple(stages)

    def begin(self, plan: Mapping[str, Any], *, resume: bool) -> None:
        """Start in an empty folder, or go on in one that was begun with the same plan.

        Raises:
            DistillationError: the folder is not empty, holds nothing to resume, or was begun with other options.
        """
        if not resume:
            # Nothing is lost of a start that was killed before it had written down what it was asked for.
            if any(each.is_file() and each.suffix != ".part" for each in self.out.rglob("*")):
                raise DistillationError(
                    f"{self.out} is not empty: go on with what was begun there (--resume), or name another directory"
                )
            self.work.mkdir(parents=True, exist_ok=True)
            write_json(self.plan, plan)
            self.answers.mkdir(exist_ok=True)
            return
        begun = read_json(self.plan)
        if begun is None:
            raise DistillationError(f"{self.out} holds nothing to resume: leave --resume out to begin")
        self.answers.mkdir(exist_ok=True)
        # An option that an older version did not have yet was off.
        changed = [name for name in plan if (name in begun or plan[name]) and begun.get(name) != plan[name]]
        if changed:
            name = changed[0]
            raise DistillationError(
                f"{self.out} was begun with {name} {begun.get(name)}, not {plan[name]}: resume with the same options, "
                "or begin in another directory"
            )


class Clock:
    """Seconds that a distillation may take over all its starts, and those it took."""

    def __init__(self, path: Path, minutes: float) -> None:
        self._path, self._limit = path, 60.0 * minutes
        self._before = float((read_json(path) or {}).get("seconds", 0.0))
        self._started = time.monotonic()

    @property
    def spent(self) -> float:
        return self._before + time.monotonic() - self._started

    def left(self, share: float) -> float:
        """Seconds until so large a share of the time is spent; below 0 when it is."""
        return share * self._limit - self.spent

    def keep(self) -> None:
        """Remember what was spent so far."""
        write_json(self._path, {"seconds": round(self.spent, 1)})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None where the file is not there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else None


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder whole or not at all; one that is there stays."""
    if path.is_dir():
        return
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a run that was killed
    part.mkdir(parents=True)
    fill(part)
    part.rename(path)
