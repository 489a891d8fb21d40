"""What Serve runs in every process that sends requests here: HTTP proxies, other applications, programs with a handle.

Serve ships this module by value, so that those processes need not have the package: it imports Ray only.
"""

from __future__ import annotations

import weakref
from typing import Any

import ray
import ray.util.client
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

ANSWERS = ("stream", "generate")
"""Methods of the replica that take an argument `caller`."""


class QueueFull(BackPressureError):  # type: ignore[misc]
    """As many requests as may wait for a replica that takes them."""

    @property
    def message(self) -> Any:
        """The body of Serve's answer over HTTP: in OpenAI's shape, as the replica's own refusal is."""
        details = {"message": str(self), "type": "server_error", "param": None, "code": "overloaded"}
        return {"error": details}

    def __str__(self) -> str:
        return f"{self.args[0]} requests wait already: try again in {self.retry_after_s} s"


class Router(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Serve's own choice of a replica. Beside it, the replica is told who asks, and not too many wait.

    A replica learns neither of a caller's death nor that it has dropped a stream without cancelling it: it would go on
    to the last token. So it gets the ids of the caller's process and node to look after, and a stream that nobody holds
    any more is cancelled here.
    """

    def initialize_state(self, *, queue: int, retry_after_s: int) -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            queue: requests that may wait here while no replica has a place for them.
            retry_after_s: what others are told then.
        """
        self._queue, self._retry_after_s = queue, retry_after_s
        self._waiting = 0
        context = ray.get_runtime_context()
        self._caller = context.get_worker_id(), context.get_node_id()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Serve's own limit (max_queued_requests) refuses a burst though there is place, and answers in plain text.
        if not is_retry and self._waiting >= self._queue and not self.select_available_replicas():
            raise QueueFull(self._waiting, self._queue, 503, self._retry_after_s)
        if pending_request.metadata.call_method in ANSWERS:
            pending_request.kwargs["caller"] = self._caller
        self._waiting += 1
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        finally:
            self._waiting -= 1

    def on_request_routed(self, pending_request: PendingRequest, _replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has taken a request; `result` is what its caller holds."""
        asked = pending_request.metadata
        if asked.call_method in ANSWERS and asked.is_streaming and asked._by_reference:  # over gRPC it ends by itself
            items = result.to_object_ref_gen()
            dropped = weakref.finalize(items, _cancel, items.completed(), self._caller)
            dropped.atexit = False  # the process' end is seen by the replica


def _cancel(end: ray.ObjectRef, caller: tuple[str, str]) -> None:
    """End a stream that was begun by `caller`; of no effect on one that has ended.

    A program may have left its cluster since, or come back over Ray Client: its streams went with the connection.
    """
    if ray.is_initialized() and not ray.util.client.ray.is_connected():
        context = ray.get_runtime_context()
        if (context.get_worker_id(), context.get_node_id()) == caller:
            ray.cancel(end)
