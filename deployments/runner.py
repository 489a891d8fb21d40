"""Several requests of the engine as one stream, ended by whatever ends it; and whether the engine can answer at all."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from deployments.engine import Engine
from deployments.errors import ApiError, as_api_error
from duo_ray.types import Delta, DuoRayError, Finished, Overloaded, Request, SamplingParams

T = TypeVar("T")

PULSE_S = 5.0
"""For how long a token proves that more can be generated."""
_LOOK_S = 0.5
HEALTH = "health-"
"""What the ids of health checks begin with."""
PROBE_LIMIT_S = 20.0
"""How long the one-token request of a health check may take."""


class Runner:
    """Runs requests on the engine and remembers when it last gave a token."""

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        """`timeout_s` is the time limit of one HTTP request."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._last_failure: tuple[float, str] | None = None
        self._probing = asyncio.Lock()

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta | Finished], None]:
        """The items of all requests as they come, each with the index of its request.

        However the stream ends (closed, cancelled, one request failed), all requests are ended with it.

        Raises:
            ApiError: a request failed, or the time limit passed.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        items: asyncio.Queue[tuple[int, Delta | Finished | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(index, request, items)) for index, request in enumerate(requests)]
        try:
            running = len(tasks)
            while running:
                index, item = await self._next(items, deadline)
                if isinstance(item, Exception):
                    raise as_api_error(item) from item
                running -= isinstance(item, Finished)
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, index: int, request: Request, items: asyncio.Queue[tuple[int, Delta | Finished | Exception]]
    ) -> None:
        """Cancelling this task cancels the stream where it waits, which closes it."""
        try:
            finished = False
            async for item in self._engine.stream(request):
                finished = isinstance(item, Finished)
                items.put_nowait((index, item))
            if not finished:
                raise ApiError(503, "the server ended this request: it is shutting down", code="shutting_down")
        except Exception as error:
            items.put_nowait((index, error))

    async def _next(
        self, items: asyncio.Queue[tuple[int, Delta | Finished | Exception]], deadline: float
    ) -> tuple[int, Delta | Finished | Exception]:
        try:
            async with asyncio.timeout_at(deadline):
                return await items.get()
        except TimeoutError:
            limit = f"this server's limit of {self._timeout_s:g} s for one request"
            message = f"the answer was not complete within {limit}: ask for fewer tokens, or stream and use what comes"
            # The official client would otherwise ask for the same again, twice.
            raise ApiError(408, message, code="timeout", headers={"x-should-retry": "false"}) from None

    async def check_health(self) -> None:
        """Return when a token was generated within the last seconds, if need be for this check.

        Raises:
            ApiError: 503 with the reason.
        """
        try:
            await self._engine.check_health()
            async with self._probing:
                if self._last_failure is not None and time.monotonic() - self._last_failure[0] < PULSE_S:
                    raise DuoRayError(self._last_failure[1])
                if not self._engine.last_token or time.monotonic() - self._engine.last_token >= PULSE_S:
                    await self._probe()
        except DuoRayError as error:
            raise ApiError(503, str(error), code="unhealthy") from None

    async def _probe(self) -> None:
        """Ask for a token, and be content with one that anybody gets: the probe may have to wait for its turn."""
        began, probing = time.monotonic(), asyncio.create_task(self._ask())
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                while self._engine.last_token < began:
                    await asyncio.wait([probing], timeout=_LOOK_S)
                    if probing.done():
                        if not isinstance(probing.exception(), Overloaded):
                            probing.result()
                            break
                        await asyncio.sleep(_LOOK_S)
                        probing = asyncio.create_task(self._ask())
        except TimeoutError:
            self._fail(f"no token could be generated within {PROBE_LIMIT_S:g} s")
        except Exception as error:
            self._fail(f"no token could be generated: {as_api_error(error).detail}")
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _ask(self) -> None:
        request = Request(
            request_id=f"{HEALTH}{secrets.token_hex(12)}",
            prompt=tuple(self._engine.tokenizer.encode_part("a")),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
            draft=False,
        )
        async for _ in self._engine.stream(request):
            pass

    def _fail(self, reason: str) -> None:
        self._last_failure = time.monotonic(), reason
        raise DuoRayError(reason)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled, and has ended, when this raises.

    Args:
        receive: of a request whose body was read: the next message is that the client is gone.

    Raises:
        ClientDisconnect: the client is gone.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
