"""What an earlier start measured on this machine with these models: engine, precision, times, in the user's cache.

A second start measures neither engine nor precision again, does not guess the first gamma, and a reproducible request
finds the same times as the last one.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duo_ray.models.catalog import cache_directory


@dataclass(frozen=True, slots=True)
class Calibration:
    """`dtype` is the target's; `costs` is what `core.costs.Costs.as_dict` gives."""

    dtype: str
    costs: dict[str, Any]


def calibration_file(*facts: object) -> Path:
    """Where the calibration for these facts (models, cores, versions, settings that change a time) is kept."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return cache_directory() / "calibration" / f"{digest}.json"


def read_calibration(path: Path) -> Calibration | None:
    """None where nothing usable is kept."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Calibration(str(stored["dtype"]), dict(stored["costs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    _write(path, asdict(calibration))


def read_seconds(path: Path) -> dict[str, float] | None:
    """What `write_seconds` kept; None where nothing usable is."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in stored.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def write_seconds(path: Path, seconds: Mapping[str, float]) -> None:
    """Keep the measured times of alternatives that a choice was made among."""
    _write(path, dict(seconds))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
