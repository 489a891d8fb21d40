"""A Unix-domain socket between two actors of one node.

An actor call costs about ten thread switches there and back; while both cores of a small machine compute, each of them
waits for a core. A message over a socket costs two. Ray sets the socket up, restarts what died, and carries everything
between nodes; see docs/decisions/003-a-socket-between-actors-of-one-node.md.

A frame is a count of parts, their lengths, the parts. The first part is a pickled message; the others are passed on as
they are, so that the coordinator hands probabilities from draft to target without unpacking them.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Parts = tuple[bytes, ...]
Handler = Callable[[Any, Parts], tuple[Any, Parts]]
"""(argument, parts) of a request -> (result, parts) of its answer."""

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class LinkLostError(ConnectionError):
    """The other end is gone."""


def listen(handlers: dict[str, Handler], posts: dict[str, Callable[[Any], None]]) -> str:
    """Serve one connection from a thread of its own; returns the path of its socket.

    Args:
        handlers: called in the order the requests come, one at a time; what they raise is raised at the caller.
        posts: the same without an answer.

    The thread inherits this thread's core affinity and ends with the connection.
    """
    folder = Path(tempfile.mkdtemp(prefix="duo_ray-"))  # only this user may enter
    path = folder / secrets.token_hex(4)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
        path.unlink()
        folder.rmdir()
        with connection:
            while (parts := _receive(connection)) is not None:
                name, argument = pickle.loads(parts[0])
                if name in posts:
                    posts[name](argument)
                else:
                    _send(connection, _answer(handlers[name], argument, parts[1:]))

    threading.Thread(target=serve, name="wire", daemon=True).start()
    return str(path)


def _answer(handler: Handler, argument: Any, parts: Parts) -> Parts:
    try:
        result, extra = handler(argument, parts)
    except Exception as error:  # it is the caller's: raised again at the other end
        return (pickle.dumps((False, error)),)
    return (pickle.dumps((True, result)), *extra)


class Link:
    """The caller's end: one request in flight at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, path: str) -> Link:
        return cls(*await asyncio.open_unix_connection(path))

    async def call(self, name: str, argument: Any, parts: Sequence[bytes] = ()) -> tuple[Any, Parts]:
        """Raises what the handler raised, or `LinkLostError`."""
        try:
            self._write((pickle.dumps((name, argument)), *parts))
            answer = await self._read()
        except (OSError, EOFError) as error:
            raise LinkLostError(f"connection lost: {error or type(error).__name__}") from error
        fine, result = pickle.loads(answer[0])
        if not fine:
            raise result
        return result, answer[1:]

    def post(self, name: str, argument: Any) -> None:
        """Send without waiting; kept in order with calls. Nothing happens when the other end is gone."""
        if not self._writer.is_closing():
            self._write((pickle.dumps((name, argument)),))

    def close(self) -> None:
        self._writer.close()

    async def aclose(self) -> None:
        """Close, and wait until the socket is."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the other end was faster
            await self._writer.wait_closed()

    def _write(self, parts: Sequence[bytes]) -> None:
        self._writer.write(_header(parts) + b"".join(parts))

    async def _read(self) -> Parts:
        (count,) = _COUNT.unpack(await self._reader.readexactly(_COUNT.size))
        raw = await self._reader.readexactly(count * _LENGTH.size)
        lengths = [length for (length,) in _LENGTH.iter_unpack(raw)]
        return tuple([await self._reader.readexactly(length) for length in lengths])


def _header(parts: Sequence[bytes]) -> bytes:
    return _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) for part in parts)


def _send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    connection.sendall(_header(parts) + b"".join(parts))


def _receive(connection: socket.socket) -> Parts | None:
    """The parts of the next frame; None when the other end has gone."""
    head = _exactly(connection, _COUNT.size)
    if head is None:
        return None
    (count,) = _COUNT.unpack(head)
    raw = _exactly(connection, count * _LENGTH.size)
    if raw is None:
        return None
    parts = []
    for (length,) in _LENGTH.iter_unpack(raw):
        part = _exactly(connection, length)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            chunk = connection.recv(count - len(data))
        except ConnectionError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)
