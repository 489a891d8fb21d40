"""Processes that call a replica and die: Ray does not tell an actor that whoever waits for its answer is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

import ray
from ray import WorkerID
from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import WorkerTableData

from duo_ray.types import InvalidRequest

logger = logging.getLogger("ray.serve")

Caller = tuple[str, str]
"""Ids of a process of the cluster (of Ray's "worker", which a driver is, too) and of its node."""

PERIOD_S = 1.0


class Callers:
    """Ends the answers that nobody waits for any more.

    Args:
        end: called with the request id of such an answer.
        dead: which of these callers are gone; it may block.
    """

    def __init__(
        self,
        end: Callable[[str], Awaitable[None]],
        *,
        dead: Callable[[Collection[Caller]], Collection[Caller]] | None = None,
    ) -> None:
        self._end = end
        self._dead = dead or _dead
        self._callers: dict[str, Caller] = {}
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, request_id: str, caller: Caller) -> Iterator[None]:
        """Within this block `caller` waits for the request's answer.

        Raises:
            InvalidRequest: somebody waits for one of this id already.
        """
        if request_id in self._callers:
            raise InvalidRequest(f"request id {request_id} is in use")
        self._callers[request_id] = caller
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._look())
        try:
            yield
        finally:
            del self._callers[request_id]

    async def _look(self) -> None:
        told = True
        while self._callers:
            try:
                dead = await asyncio.to_thread(self._dead, set(self._callers.values()))
                for request_id in [each for each, caller in self._callers.items() if caller in dead]:
                    await self._end(request_id)
            except Exception:  # Ray's head may be on its way back; the next look tells
                if told:
                    logger.warning("who waits for answers cannot be told now", exc_info=True)
                told = False
            else:
                told = True
            await asyncio.sleep(PERIOD_S)


def _dead(callers: Collection[Caller]) -> Collection[Caller]:
    """Those whose process Ray has seen die, or whose node; one that Ray does not know (any more) counts as alive."""
    nodes = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
    return {caller for caller in callers if caller[1] in nodes or not _alive(caller[0])}


def _alive(worker: str) -> bool:
    told = cluster_state._connect_and_get_accessor().get_worker_info(WorkerID.from_hex(worker))
    return told is None or bool(WorkerTableData.FromString(told).is_alive)
