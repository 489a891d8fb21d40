"""Jobs of many requests, one call at a time: whatever waits when the callee becomes free goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
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
        group: Callable[[Job], Hashable | None] = lambda _: "",
    ) -> None:
        """`run` takes at most `limit` jobs. When `isolate(error)`, the jobs of a failed batch are run again one by one,
        so that one request's fault stays its own. Jobs of different groups share no call; one whose group is None
        shares its call with no other at all.
        """
        self._run = run
        self._isolate = isolate
        self._limit = limit
        self._group = group
        self._waiting: list[tuple[Job, asyncio.Future[Result]]] = []
        self._drain: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call runs or a job waits for one."""
        return self._drain is not None and not self._drain.done()

    async def submit(self, job: Job) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            # A caller that went away while it waited needs no answer.
            batch = [(job, future) for job, future in self._take() if not future.cancelled()]
            if batch:
                await self._answer(batch)

    def _take(self) -> list[tuple[Job, asyncio.Future[Result]]]:
        """The job that has waited longest, and all that may go with it."""
        first, group = self._waiting[0], self._group(self._waiting[0][0])
        batch: list[tuple[Job, asyncio.Future[Result]]] = []
        rest: list[tuple[Job, asyncio.Future[Result]]] = []
        for each in self._waiting:
            goes = each is first or (group is not None and self._group(each[0]) == group)
            (batch if goes and len(batch) < self._limit else rest).append(each)
        self._waiting = rest
        return batch

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
