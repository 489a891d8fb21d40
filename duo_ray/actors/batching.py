"""Jobs of many requests, one call at a time: whatever waits when the callee becomes free goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Batcher(Generic[Job, Result]):
    """Serialises calls to one actor; a job that arrives while a call runs joins the next one."""

    def __init__(
        self,
        run: Callable[[Sequence[Job]], Awaitable[Sequence[Result]]],
        *,
        isolate: Callable[[Exception], bool],
        limit: int,
        alone: Callable[[Job], bool] = lambda _: False,
    ) -> None:
        """`run` takes at most `limit` jobs. When `isolate(error)`, the jobs of a failed batch are run again one by one,
        so that one request's fault stays its own. A job for which `alone` holds shares its call with no other.
        """
        self._run = run
        self._isolate = isolate
        self._limit = limit
        self._alone = alone
        self._waiting: list[tuple[Job, asyncio.Future[Result]]] = []
        self._drain: asyncio.Task[None] | None = None

    async def submit(self, job: Job) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            alone = (i for i, (job, _) in enumerate(self._waiting) if self._alone(job))
            size = min(self._limit, max(1, next(alone, self._limit)))
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            # A caller that went away while it waited needs no answer.
            batch = [(job, future) for job, future in batch if not future.cancelled()]
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[tuple[Job, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([job for job, _ in batch])
        except Exception as error:
            if len(batch) > 1 and self._isolate(error):
                for one in batch:
                    if not one[1].cancelled():  # its caller may have gone away in the meantime
                        await self._answer([one])
                return
            for _, future in batch:
                if not future.cancelled():
                    future.set_exception(error)
        else:
            for (_, future), result in zip(batch, results, strict=True):
                if not future.cancelled():
                    future.set_result(result)
