"""What one run of one method is measured by, and the line of JSON it is kept as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer."""

    prompt_tokens: int
    ids: Ids
    at: tuple[float, ...]
    """Seconds from the request to each token's arrival; tokens that came together have the same."""
    cpu_seconds: float
    """Of all processes at work, user and system."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Of our own engine: what `duo-ray generate --json` shows."""
    trace: tuple[Mapping[str, Any], ...] = ()

    @property
    def seconds(self) -> float:
        return self.at[-1] if self.at else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between a token and the one before it; 0 for tokens that came together."""
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt answered by one method, or why it was not."""

    task: str
    prompt: str
    method: str
    turns: tuple[Turn, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Largest resident memory so far of each process the method uses."""
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.prompt, self.method

    @property
    def tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def speed(self) -> float:
        """Tokens per second from a request's arrival to its last token, over all turns."""
        seconds = sum(turn.seconds for turn in self.turns)
        return self.tokens / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Run:
        """Raises KeyError or TypeError when this is not what `as_dict` gave."""
        turns = tuple(
            Turn(**{**turn, "ids": tuple(turn["ids"]), "at": tuple(turn["at"]), "trace": tuple(turn["trace"])})
            for turn in stored["turns"]
        )
        return cls(**{**stored, "turns": turns})


class Method(Protocol):
    """One way to generate greedily, ready to be timed."""

    def generate(self, ids: Sequence[int], max_tokens: int, *, trace: bool = False) -> Turn:
        """Answer until an end token or `max_tokens`."""
        ...

    def between(self) -> None:
        """Forget what was cached, so that the next run starts as this one did."""
        ...

    def peak_bytes(self) -> dict[str, int]:
        """Largest resident memory so far, by process."""
        ...

    def describe(self) -> str:
        """What exactly runs, in a few words."""
        ...


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of these processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def peak_memory(pid: int) -> int:
    """Bytes of the largest resident size so far (where the system does not keep it: of the present one)."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process(pid).memory_info().rss)
