"""The timeline of a request as a Chrome trace (chrome://tracing, ui.perfetto.dev): one row per actor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from duo_ray.types import TraceEvent


def write_trace(path: Path, events: Sequence[TraceEvent]) -> None:
    """Write the events as a JSON object in Chrome's trace event format; times are microseconds from the first event."""
    rows = {actor: row for row, actor in enumerate(dict.fromkeys(event.actor for event in events), start=1)}
    origin = min((event.span.started for event in events), default=0.0)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": actor}} for actor, row in rows.items()
    ]
    bars = [
        {
            "ph": "X",
            "name": event.name,
            "pid": 1,
            "tid": rows[event.actor],
            "ts": round((event.span.started - origin) * 1e6, 1),
            "dur": round(event.span.seconds * 1e6, 1),
            "args": dict(event.details),
        }
        for event in events
    ]
    path.write_text(json.dumps({"traceEvents": names + bars, "displayTimeUnit": "ms"}), encoding="utf-8")
