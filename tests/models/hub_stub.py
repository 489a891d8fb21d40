"""The few routes of the Hugging Face hub that a snapshot download uses, served from memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Asked(NamedTuple):
    method: str
    file: str
    first_byte: int


class Hub:
    """Serves `repositories`, {name: {file: content}}. Use it as a context manager.

    `cut` holds files whose next transfer breaks off after so many bytes; `stalled` is set when one in `stall` has sent
    half of itself, and no more comes. `asked` lists the requests for files.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.cut: dict[str, int] = {}
        self.stall: set[str] = set()
        self.stalled, self.closing = threading.Event(), threading.Event()
        self.asked: list[Asked] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def transfers(self) -> list[str]:
        """Files whose content was asked for, in order."""
        return [asked.file for asked in self.asked if asked.method == "GET"]

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output stays theirs."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/[^/]+", path)
        match = match or re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        name, kind = match.groups() if match else ("", "")
        files = self.hub.repositories.get(name)
        if files is None:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/") and kind == "revision":
            self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
        elif path.startswith("/api/"):
            self._json([{"type": "file", "path": f, "size": len(c), "oid": _oid(c)} for f, c in files.items()])
        elif kind in files:
            self._file(kind, files[kind])
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, file: str, content: bytes) -> None:
        first = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.hub.asked.append(Asked(self.command, file, first))
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(206 if first else 200, content[first:], headers, file)

    def _send(self, status: int, body: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.hub.stall:
            self.wfile.write(body[: len(body) // 2])
            self.hub.stalled.set()
            self.hub.closing.wait()
            self.close_connection = True
        elif (length := self.hub.cut.pop(file, None)) is not None:
            self.wfile.write(body[:length])
            self.close_connection = True
        else:
            self.wfile.write(body)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
