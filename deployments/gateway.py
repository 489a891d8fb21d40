"""Around every request: its id, its key, the size of its body, and an answer whatever fails."""

from __future__ import annotations

import asyncio
import hmac
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError, as_api_error

GUARDED = ("/v1/", "/stats", "/metrics")
"""Where the key is asked for: what is open (health, version, the documentation, the page) tells nothing of the use."""
BODY_LIMIT_S = 60.0
"""How long a request's body may take: until it is there, the request takes the place of another one."""


class Gateway:
    """ASGI middleware.

    Every response carries `x-request-id`, unless the request came with one: whoever set it (Serve's proxy) returns it.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, body_bytes: int) -> None:
        """`api_key` guards what is in GUARDED; None: everyone may ask. A body may hold `body_bytes`."""
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = None if "x-request-id" in headers else f"req_{secrets.token_hex(16)}"
        begun = False

        async def sender(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if request_id is not None:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))  # the application may be mounted below a prefix
        refusal = self._refusal(path, headers)
        if refusal is None:
            try:
                await self._app(scope, self._limited(receive), sender)
            except Exception as error:
                if begun:
                    raise
                refusal = as_api_error(error)
        if refusal is not None:
            await refusal.response()(scope, receive, sender)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._api_key is not None and path.startswith(GUARDED):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.encode(), self._api_key)  # takes as long for any key
            if not right or scheme.lower() != "bearer":
                problem = "is wrong" if given else "is missing"
                return ApiError(
                    401,
                    f"the API key {problem}: send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")[:18]  # int() refuses thousands of digits
        return self._too_large() if length.isdecimal() and int(length) > self._body_bytes else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than this server's limit of {self._body_bytes} bytes")

    def _limited(self, receive: Receive) -> Receive:
        """A body that states no length, or a wrong one, is counted as it comes, and it must come in time."""
        taken, complete = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_LIMIT_S

        async def counted() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()  # to learn that the client is gone
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                words = f"the body was not complete within {BODY_LIMIT_S:g} s"
                raise ApiError(408, words, code="timeout", headers={"Connection": "close"}) from None
            taken += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if taken > self._body_bytes:
                raise self._too_large()
            return message

        return counted
