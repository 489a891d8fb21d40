"""Virtual time: generators that wait for delays and answers, run in the order of the simulated clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """An answer that will be there at some simulated time."""

    __slots__ = ("_then", "_value")

    def __init__(self) -> None:
        self._value: list[T] = []
        self._then: list[Callable[[], None]] = []

    def keep(self, value: T) -> None:
        self._value.append(value)
        waiting, self._then = self._then, []
        for resume in waiting:
            resume()

    @property
    def done(self) -> bool:
        return bool(self._value)

    @property
    def kept(self) -> T:
        """The answer, once it is there."""
        return self._value[0]

    def then(self, resume: Callable[[], None]) -> None:
        if self.done:
            resume()
        else:
            self._then.append(resume)


class Wait(NamedTuple):
    """What a process yields: go on when `promise` is kept, or after `timeout` seconds, whichever is first."""

    promise: Promise[Any] | None
    timeout: float | None = None


Process = Generator[Wait, None, None]


class Clock:
    """Simulated seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # events of the same time run in the order they were set

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def spawn(self, process: Process) -> None:
        """Run a process up to its first wait, and from there as its waits end."""
        wait = next(process, None)
        if wait is None:
            return
        ended = False

        def resume() -> None:
            nonlocal ended
            if not ended:  # the promise and the timeout may both fire
                ended = True
                self.spawn(process)

        if wait.promise is not None:
            # Not at once: whoever keeps the promise finishes its own turn first.
            wait.promise.then(lambda: self.after(0.0, resume))
        if wait.timeout is not None:
            self.after(wait.timeout, resume)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
