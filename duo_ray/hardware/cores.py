"""Cores by number: how they are written, bound to a process, and kept from other pipelines."""

from __future__ import annotations

import getpass
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from duo_ray.config import ConfigError


def show_cores(cores: Iterable[int]) -> str:
    """Cores as `taskset` writes them: (0, 1, 2, 5) -> "0-2,5"."""
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def pin(cores: Sequence[int]) -> str | None:
    """Bind this process, and every thread it starts from now on, to `cores`.

    Returns:
        None, or a note that says why nothing was bound: the platform cannot do it.

    Raises:
        ConfigError: a core that does not exist or is not allowed.
    """
    if not hasattr(os, "sched_setaffinity"):
        return f"{platform.system()} does not let a process choose its cores: actors are not pinned"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(
            f"cannot pin to cores {show_cores(cores)}: {error.strerror}; set hardware.cpu_affinity"
        ) from None
    return None


def give_way() -> None:
    """Have this thread, and all it starts from now on, not interrupt others when they wake; where the platform can.

    A model's threads compute for milliseconds at a time. One that is woken by a message would take the core from the
    process that has sent it and is about to send another: the coordinator was off for 4 ms so (a slice of Linux's
    scheduler). Their share of the cores stays what it is.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def threads_here() -> frozenset[int]:
    """Numbers of this process's threads; none where the platform does not list them."""
    return frozenset(int(task.name) for task in Path("/proc/self/task").glob("*"))


def pin_threads(cores: Iterable[int], threads: Iterable[int]) -> None:
    """Bind the calling thread and others of this process to `cores`, where the platform can."""
    if hasattr(os, "sched_setaffinity"):
        for thread in (0, *threads):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cores)


class CoreClaims:
    """Which cores the pipelines on this machine run on: two of them must not crowd onto some and leave others idle.

    A claim is a locked file for each core. The kernel drops it with the process, however that ends.
    """

    def __init__(self, directory: Path | None = None) -> None:
        user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
        self._directory = directory or Path(tempfile.gettempdir()) / f"duo_ray-cores-{user}"
        self._directory.mkdir(exist_ok=True)
        self._held: list[BaseFileLock] = []

    @contextmanager
    def choosing(self) -> Iterator[frozenset[int]]:
        """The cores that other pipelines have; within this block nobody else chooses."""
        with FileLock(self._directory / "choosing"):
            named = [int(file.name) for file in self._directory.iterdir() if file.name.isdecimal()]
            yield frozenset(core for core in named if self._lock(core) is None)

    def take(self, cores: Iterable[int]) -> None:
        """Claim these, as far as nobody has them, until `release` or the end of this process."""
        self._held += [lock for core in cores if (lock := self._lock(core)) is not None]

    def release(self) -> None:
        """Give all claims back."""
        for lock in self._held:
            lock.release()
        self._held.clear()

    def _lock(self, core: int) -> BaseFileLock | None:
        lock = FileLock(self._directory / str(core), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return None
        return lock
