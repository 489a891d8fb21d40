"""The page at `/`: a chat that shows where each token came from, and the figures of the running system."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_ASSETS = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def mount_page(app: FastAPI) -> None:
    """Serve the page at `/` and its parts under `/page/`; they hold no secret, so no key is asked for."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return _file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> FileResponse:
        if name not in _ASSETS:
            raise HTTPException(404, f"the page has no part {name!r}")
        return _file(name)


def _file(name: str) -> FileResponse:
    path = _ASSETS[name]
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=HEADERS)
