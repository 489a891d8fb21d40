"""An asyncio event loop whose clock jumps from one event to the next: what would take minutes takes no time at all."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class VirtualTime(asyncio.SelectorEventLoop):
    """Runs whatever is ready; when nothing is, it is as late as the next timer wants it to be."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self._advance))

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now

    def _advance(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    """Instead of waiting for I/O, of which there is none, it says how long the wait would have been."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that will never happen")
        self._advance(max(0.0, timeout))
        return []
