"""The last minutes, second by second, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

HISTORY_S = 300
"""How many seconds are kept."""
RECENT_S = 10
"""Gauges, and the figures of `GET /stats` that change quickly, are means over this many seconds."""
LONGER_S = 60
"""Acceptance by position and sequences per block need more steps than that: seconds they are taken over."""


@dataclass(slots=True)
class Second:
    """What happened in one second of wall-clock time."""

    active: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    """Seconds of work by actor."""
    tokens: int = 0
    steps: int = 0
    timed_steps: int = 0
    gaps: float = 0.0
    """Time between the outputs of each stream, summed."""
    target: float = 0.0
    overhead: float = 0.0
    plain: float = 0.0
    gamma: int = 0
    drafted_seconds: float = 0.0
    drafted_tokens: int = 0
    blocks: Counter[int] = field(default_factory=Counter)
    """Drafted blocks by their number of sequences."""
    proposed: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    running: int = 0
    queued: int = 0
    """Running and queued are the most there were."""

    def copy(self) -> Second:
        return replace(
            self,
            busy=dict(self.busy),
            blocks=Counter(self.blocks),
            proposed=Counter(self.proposed),
            accepted=Counter(self.accepted),
        )


SUMMED = tuple(each.name for each in fields(Second) if each.name not in ("active", "busy"))


def together(parts: Mapping[str, Second]) -> Second:
    """The same second of several pipelines, by name, as one: active as long as the longest, the actors told apart."""
    whole = Second(active=max(part.active for part in parts.values()))
    for pipeline, part in parts.items():
        whole.busy |= {actor_of(pipeline, actor): seconds for actor, seconds in part.busy.items()}
        for name in SUMMED:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
    return whole


def actor_of(pipeline: str, actor: str) -> str:
    """What `together` calls an actor."""
    return f"{pipeline}/{actor}"


class History:
    """The entries of the last `HISTORY_S` seconds. Times are seconds since the epoch."""

    def __init__(self, seconds: dict[int, Second] | None = None) -> None:
        self._seconds = {} if seconds is None else seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def copy(self) -> dict[int, Second]:
        """The entries as they are now, by second."""
        return {at: second.copy() for at, second in self._seconds.items()}

    def at(self, time: float) -> Second:
        """The entry of that second; those too old for it are dropped."""
        at = math.floor(time)
        if (second := self._seconds.get(at)) is None:
            second = self._seconds[at] = Second()
            for old in [each for each in self._seconds if each < at - HISTORY_S]:
                del self._seconds[old]
        return second

    def spread(self, started: float, ended: float) -> Iterator[tuple[Second, float]]:
        """A stretch of time, cut into seconds: (entry, its part)."""
        started = max(started, ended - HISTORY_S)
        while started < ended:
            until = min(ended, math.floor(started) + 1.0)
            yield self.at(started), until - started
            started = until

    def last(self, seconds: int, now: float) -> Window:
        """The present second and those before it."""
        return self._window(range(math.floor(now) - seconds, math.floor(now) + 1))

    def past(self, now: float) -> list[Window]:
        """Each of the `HISTORY_S` whole seconds before the present one, oldest first."""
        return [self._window((at,)) for at in range(math.floor(now) - HISTORY_S, math.floor(now))]

    def _window(self, times: Iterable[int]) -> Window:
        return Window([self._seconds[at] for at in times if at in self._seconds])


class Window:
    """Means over some seconds; None where nothing happened."""

    def __init__(self, seconds: Sequence[Second]) -> None:
        self._seconds = seconds

    def _sum(self, name: str) -> float:
        return float(sum(getattr(second, name) for second in self._seconds))

    def _ratio(self, above: str, below: str) -> float | None:
        divisor = self._sum(below)
        return self._sum(above) / divisor if divisor else None

    @property
    def tokens(self) -> int:
        return sum(second.tokens for second in self._seconds)

    @property
    def running(self) -> int:
        return max((second.running for second in self._seconds), default=0)

    @property
    def queued(self) -> int:
        return max((second.queued for second in self._seconds), default=0)

    @property
    def tokens_per_s(self) -> float | None:
        return self._ratio("tokens", "active")

    @property
    def gamma(self) -> float | None:
        return self._ratio("gamma", "steps")

    @property
    def t_target(self) -> float | None:
        return self._ratio("target", "timed_steps")

    @property
    def t_draft(self) -> float | None:
        return self._ratio("drafted_seconds", "drafted_tokens")

    @property
    def overhead(self) -> float | None:
        return self._ratio("overhead", "timed_steps")

    @property
    def speedup(self) -> float | None:
        """ESTIMATE: seconds of plain passes the committed tokens would have taken, over the time between outputs.

        A plain pass is T_target for one token of each request in the pass, as fitted from measured passes: what the
        system itself costs is not counted against plain decoding, so it is rather too low than too high.
        """
        return self._ratio("plain", "gaps")

    @property
    def blocks(self) -> Counter[int]:
        return sum((second.blocks for second in self._seconds), Counter())

    @property
    def sequences(self) -> float | None:
        blocks = self.blocks
        return sum(number * count for number, count in blocks.items()) / blocks.total() if blocks else None

    @property
    def acceptance(self) -> list[float]:
        """Kept out of judged tokens at each position of a block."""
        proposed: Counter[int] = sum((second.proposed for second in self._seconds), Counter())
        accepted: Counter[int] = sum((second.accepted for second in self._seconds), Counter())
        return [round(accepted[position] / proposed[position], 3) for position in sorted(proposed)]

    def idle(self, *actors: str) -> float | None:
        """Share of the active time that these actors, on average, did not work."""
        active = self._sum("active") * len(actors)
        if not active:
            return None
        busy = sum(second.busy.get(actor, 0.0) for second in self._seconds for actor in actors)
        return min(1.0, max(0.0, 1.0 - busy / active))
