"""Programs that call a replica and die: Ray does not tell an actor that whoever waits for its answer is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from ray._private.state import state as cluster_state

PERIOD_S = 1.0


class Callers:
    """Ends the streams of Ray jobs that have ended.

    Args:
        end: called with the request id of such a stream.
        dead_jobs: ids of the jobs that have ended; it may block.
    """

    def __init__(
        self, end: Callable[[str], Awaitable[None]], *, dead_jobs: Callable[[], set[str]] | None = None
    ) -> None:
        self._end = end
        self._dead_jobs = dead_jobs or _dead_jobs
        self._jobs: dict[str, str] = {}
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, request_id: str, job: str) -> Iterator[None]:
        """Within this block a program of the job `job` waits for the request's answer."""
        self._jobs[request_id] = job
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._look())
        try:
            yield
        finally:
            del self._jobs[request_id]

    async def _look(self) -> None:
        while self._jobs:
            dead = await asyncio.to_thread(self._dead_jobs)
            for request_id in [each for each, job in self._jobs.items() if job in dead]:
                await self._end(request_id)
            await asyncio.sleep(PERIOD_S)


def _dead_jobs() -> set[str]:
    return {job["JobID"] for job in cluster_state.job_table() if job["IsDead"]}
