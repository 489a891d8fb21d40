"""Numbers as a user types them, or as `duo-ray doctor --json` wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duo_ray.planning.scenario import Curve, Hardware
from duo_ray.types import DuoRayError

TARGET_GROWTH, DRAFT_GROWTH = 0.015, 0.3
"""What a further token adds to a target pass, a further sequence to a draft decode, as a share of one; where only one
width is known. The controller starts from the same."""

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def read_seconds(text: str, option: str) -> float:
    """ "25ms", "0.3s", "800us" -> seconds.

    Raises:
        DuoRayError: names the option and what it takes.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", text)
    if found is None:
        raise DuoRayError(f"{option} {text!r}: write a number with its unit, such as 25ms, 0.3s or 800us")
    return float(found[1]) * _UNITS[found[2]]


def read_curve(text: str, option: str, growth: float) -> Curve:
    """ "25ms" (one token; wider passes grow by `growth` of that each) or "1:25ms,8:27ms,32:33ms".

    Raises:
        DuoRayError: names the option and what it takes.
    """
    points = {}
    for part in text.split(","):
        width, colon, seconds = part.rpartition(":")
        if colon and not re.fullmatch(r"\s*[1-9]\d{0,5}\s*", width):
            raise DuoRayError(f"{option} {text!r}: {width!r} is no number of tokens; write 1:25ms,8:27ms,32:33ms")
        points[int(width) if colon else 1] = read_seconds(seconds, option)
    if min(points.values()) <= 0.0:
        raise DuoRayError(f"{option} {text!r}: seconds must be above 0")
    return Curve(points, growth=growth)


def read_costs(path: Path) -> Mapping[str, Any]:
    """The measured times in a file that `duo-ray doctor --json` wrote.

    Raises:
        DuoRayError: no such file, or nothing was measured.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DuoRayError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise DuoRayError(f"{path}: not JSON: {error}") from None
    costs = report.get("costs") if isinstance(report, dict) else None
    if not isinstance(costs, dict):
        raise DuoRayError(f"{path}: holds no measured times: write it with `duo-ray doctor --measure --json > {path}`")
    return costs


def read_hardware(
    measured: Path | None,
    t_target: str | None,
    t_draft: str | None,
    overhead: str | None,
    t_draft_prompt: str | None,
    **others: int,
) -> Hardware:
    """Hardware from the options of `duo-ray plan`: a typed number goes before a measured one.

    Raises:
        DuoRayError: a number is missing or not one.
    """
    fields: dict[str, Any] = dict(others)
    if overhead is not None:
        fields["overhead"] = read_seconds(overhead, "--overhead")
    if t_draft_prompt is not None:
        fields["draft_prompt"] = read_seconds(t_draft_prompt, "--t-draft-prompt")
    if t_target is not None:
        fields["target"] = read_curve(t_target, "--t-target", TARGET_GROWTH)
    if t_draft is not None:
        fields["draft"] = read_curve(t_draft, "--t-draft", DRAFT_GROWTH)
    if measured is not None:
        return Hardware.from_costs(read_costs(measured), **fields)
    missing = [option for option, given in (("--t-target", t_target), ("--t-draft", t_draft)) if given is None]
    if missing:
        raise DuoRayError(f"{' and '.join(missing)} needed: type what you expect (25ms), or give --from doctor.json")
    return Hardware(**fields)
