"""A running service from any Python process: on its cluster, by its address, or from afar through Ray Client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import uuid
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any, Protocol

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from duo_ray.actors.launch import JOIN_LIMIT_S, connect, plain_error
from duo_ray.closing import Closing
from duo_ray.session import Answer, Prompt, collect, unpacked
from duo_ray.types import Delta, DuoRayError, Finished, Overloaded, Token


class DuoClient(Closing):
    """Asks a service started with `serve run deployments:app`.

        with DuoClient() as client:
            print(client.generate("Explain gravity to a child.").text)

    Options of every method are those of `duo_ray.session.build_request`. A stream that is closed or abandoned ends the
    work on it within a step.

    Args:
        address: "host:port", or "ray://host:10001" from outside the cluster; None: the cluster this process is in, the
            one RAY_ADDRESS names, or the one on this machine.
        app_name: the Serve application's name.

    Raises:
        DuoRayError: no cluster there, a refusal (both within 10 seconds), or no such application.
    """

    def __init__(self, address: str | None = None, *, app_name: str = "default") -> None:
        self._cleanup = contextlib.ExitStack()
        try:
            self._join(address)
            if ray.util.client.ray.is_connected():
                relay = ray.remote(_Relay).options(num_cpus=0, max_concurrency=1000).remote(app_name)
                self._cleanup.callback(ray.kill, relay)
                ray.get(relay.ready.remote(), timeout=JOIN_LIMIT_S)
                self._streams: _Streams = _PolledStreams(relay)
            else:
                self._streams = _DirectStreams(_app_handle(app_name))
        except GetTimeoutError:
            self.close()
            raise DuoRayError(
                f"the cluster did not start a process for this client within {JOIN_LIMIT_S:.0f} s: is there a node "
                "that has room? See `ray status` there"
            ) from None
        except RayError as error:
            self.close()
            raise plain_error(error) from error
        except BaseException:
            self.close()
            raise

    def _join(self, address: str | None) -> None:
        if not ray.is_initialized():
            connect(address or os.environ.get("RAY_ADDRESS") or "auto")
            self._cleanup.callback(ray.shutdown)
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise DuoRayError(
                f"address={address}: this process is in a Ray cluster already; leave the address out to use that one, "
                "or call ray.shutdown() first"
            )

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Token | Finished, None, None]:
        """Tokens as they become certain, then `Finished`.

        Raises:
            Overloaded: as many requests wait as may.
            DuoRayError: the request cannot be served; the text says why.
        """
        with _user_errors(), contextlib.closing(self._streams.open(prompt, options)) as items:
            for item in items:
                yield from unpacked(item)

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Token | Finished, None]:
        """`stream` for asyncio."""
        with _user_errors():
            async with contextlib.aclosing(self._streams.aopen(prompt, options)) as items:
                async for item in items:
                    for each in unpacked(item):
                        yield each

    def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """The whole answer; raises what `stream` raises."""
        return collect(self.stream(prompt, **options))

    async def agenerate(self, prompt: Prompt, **options: Any) -> Answer:
        """`generate` for asyncio."""
        async with contextlib.aclosing(self.astream(prompt, **options)) as items:
            return collect([item async for item in items])

    def close(self) -> None:
        """Leave the cluster, if this client joined it."""
        self._cleanup.close()


Items = Generator[Delta | Finished, None, None]
AsyncItems = AsyncGenerator[Delta | Finished, None]


class _Streams(Protocol):
    """How streams reach this process."""

    def open(self, prompt: Prompt, options: dict[str, Any]) -> Items: ...

    def aopen(self, prompt: Prompt, options: dict[str, Any]) -> AsyncItems: ...


class _DirectStreams:
    """From the replica to this process, which is a part of the cluster."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(stream=True)

    def open(self, prompt: Prompt, options: dict[str, Any]) -> Items:
        response = self._handle.stream.remote(prompt, **options)
        try:
            yield from response
        finally:
            response.cancel()  # of no effect on a stream that has ended

    async def aopen(self, prompt: Prompt, options: dict[str, Any]) -> AsyncItems:
        response = self._handle.stream.remote(prompt, **options)
        try:
            async for item in response:
                yield item
        finally:
            response.cancel()


class _PolledStreams:
    """Through an actor in the cluster that is asked for news: Ray Client cannot stream."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay

    def open(self, prompt: Prompt, options: dict[str, Any]) -> Items:
        stream = uuid.uuid4().hex
        self._relay.open.remote(stream, prompt, options)
        try:
            while items := ray.get(self._relay.poll.remote(stream)):
                yield from items
        finally:
            self._relay.close.remote(stream)

    async def aopen(self, prompt: Prompt, options: dict[str, Any]) -> AsyncItems:
        stream = uuid.uuid4().hex
        self._relay.open.remote(stream, prompt, options)
        news = self._relay.poll.remote(stream).as_future()
        try:
            while items := await asyncio.shield(news):
                for item in items:
                    yield item
                news = self._relay.poll.remote(stream).as_future()
        finally:
            self._relay.close.remote(stream)
            # Ray Client breaks when an answer comes that nobody waits for any more; closing brings it.
            await asyncio.wait([news])


class _Relay:
    """Actor of one client behind Ray Client. It dies with the client's connection, and its streams end with it."""

    def __init__(self, app_name: str) -> None:
        self._direct = _DirectStreams(_app_handle(app_name))
        self._news: dict[str, asyncio.Queue[Delta | Finished | Exception | None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ready(self) -> None:
        """Answers once the application is found."""

    def open(self, stream: str, prompt: Prompt, options: dict[str, Any]) -> None:
        """Begin a stream under a name that the client chose."""
        self._news[stream] = asyncio.Queue()
        self._tasks[stream] = asyncio.get_running_loop().create_task(self._read(stream, prompt, options))

    async def _read(self, stream: str, prompt: Prompt, options: dict[str, Any]) -> None:
        news = self._news[stream]
        try:
            async with contextlib.aclosing(self._direct.aopen(prompt, options)) as items:
                async for item in items:
                    news.put_nowait(item)
            news.put_nowait(None)
        except Exception as error:  # the client's next question raises it
            news.put_nowait(error)

    async def poll(self, stream: str) -> list[Delta | Finished]:
        """What came since the last question, as soon as there is something; nothing at the end.

        Raises:
            Exception: what ended the stream.
        """
        news = self._news[stream]
        items: list[Delta | Finished] = []
        while not items or not news.empty():
            item = await news.get()
            if item is None or (isinstance(item, Exception) and items):
                news.put_nowait(item)  # the answer to the next question
                break
            if isinstance(item, Exception):
                raise item
            items.append(item)
        return items

    def close(self, stream: str) -> None:
        """End a stream, if it has not ended, answer whoever still asks for its news, and forget it."""
        if stream in self._tasks:
            self._tasks.pop(stream).cancel()
            self._news.pop(stream).put_nowait(None)


def _app_handle(app_name: str) -> DeploymentHandle:
    try:
        return serve.get_app_handle(app_name)
    except RayServeException as error:
        raise DuoRayError(
            f"no application {app_name!r} runs on this Ray cluster ({error}); start it: serve run deployments:app"
        ) from error


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """What Ray and Serve raise, as what this package raises."""
    try:
        yield
    except RayError as error:
        raise plain_error(error) from error
    except BackPressureError as error:
        raise Overloaded(error.args[0], math.ceil(error.retry_after_s or 1)) from error
    except RayServeException as error:
        raise DuoRayError(str(error)) from error
