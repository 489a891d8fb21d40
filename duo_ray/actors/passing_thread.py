"""Work on a model before it serves, in a thread that ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, from a thread of its own.

    An actor loads and warms up its model in one thread and serves from another, the socket's. OpenMP keeps a team of
    threads for each, and once there are more of them than cores (libgomp's `gomp_managed_threads`), all of them sleep
    at every barrier: a pass of a 135M model on two cores took 32 ms in torch and not 17. A thread that ends takes its
    team with it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
