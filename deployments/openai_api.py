"""The HTTP API: OpenAI's endpoints over one engine, and what operators ask of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from deployments.engine import Engine
from deployments.errors import ApiError, ErrorReply, as_api_error, handle_errors
from deployments.gateway import Gateway
from deployments.page import mount_page
from deployments.replies import ChatCompletion, ChatReply, Reply, TextCompletion, TextReply
from deployments.runner import Runner, while_connected
from deployments.schema import ChatRequest, CompletionRequest
from deployments.translate import Job, translate
from duo_ray.metrics import prometheus, snapshot


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of prompt and answer one request may hold."""


class ModelList(TypedDict):
    object: str
    data: list[Model]


class Health(TypedDict):
    status: str


class Version(TypedDict):
    version: str


def create_api(engine: Engine) -> FastAPI:
    """The application that serves `engine`; limits and key come from its configuration's `serving` section."""
    serving = engine.config.serving
    api = FastAPIOffline(
        title="duo_ray",
        version=version("duo-ray"),
        description="An OpenAI-compatible server that decodes speculatively: draft and target work in parallel.",
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": ErrorReply, "description": "What went wrong, in OpenAI's shape"}},
    )
    api.add_middleware(Gateway, api_key=serving.api_key, body_bytes=serving.limits.body_bytes)
    handle_errors(api)
    runner = Runner(engine, timeout_s=serving.limits.timeout_s)
    model: Model = {
        "id": engine.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "duo_ray",
        "max_model_len": engine.max_context,
    }

    @api.post("/v1/chat/completions", responses=_answers(ChatCompletion), dependencies=[_KEY])
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        return await complete(body, http, ChatReply)

    @api.post("/v1/completions", responses=_answers(TextCompletion), dependencies=[_KEY])
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue a text."""
        return await complete(body, http, TextReply)

    async def complete(body: ChatRequest | CompletionRequest, http: Request, shape: type[Reply]) -> Response:
        job = await asyncio.to_thread(translate, engine, body)
        reply = shape(job, model=engine.model_name, tokenizer=engine.tokenizer)
        if job.stream:
            return EventStream(_events(runner, job, reply))
        return JSONResponse(await while_connected(http.receive, _whole(runner, job, reply)))

    @api.get("/v1/models", dependencies=[_KEY])
    async def models() -> ModelList:
        """The one model served here."""
        return {"object": "list", "data": [model]}

    @api.get("/v1/models/{name:path}", dependencies=[_KEY])
    async def retrieve_model(name: str) -> Model:
        """That model, by name."""
        if name != engine.model_name:
            raise ApiError(404, f"the model {name!r} is not served here", parameter="model", code="model_not_found")
        return model

    @api.get("/health")
    async def health() -> Health:
        """200 when a token was generated in the last seconds, if need be for this call; else 503 with the reason."""
        await runner.check_health()
        return {"status": "ok"}

    @api.get("/version")
    async def running_version() -> Version:
        """The version of duo_ray."""
        return {"version": version("duo-ray")}

    @api.get("/metrics", response_class=PlainTextResponse, dependencies=[_KEY])
    async def metrics() -> Response:
        """All replicas in Prometheus' text exposition format."""
        text = await asyncio.to_thread(prometheus, await engine.figures())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/stats", dependencies=[_KEY])
    async def stats() -> dict[str, Any]:
        """Live figures of the running system, all replicas together."""
        return await asyncio.to_thread(snapshot, await engine.figures())

    mount_page(api)
    return api


_bearer = HTTPBearer(auto_error=False, description="The configuration's serving.api_key, if it has one")


def _documented_key(_: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]) -> None:
    """For /docs only: the gateway has checked the key before the body was read."""


_KEY = Depends(_documented_key)


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    description = "The answer. With `stream`: server-sent events, each a chunk of it, the last one `[DONE]`."
    return {200: {"model": model, "description": description, "content": {"text/event-stream": {"schema": {}}}}}


async def _whole(runner: Runner, job: Job, reply: Reply) -> dict[str, Any]:
    async with aclosing(runner.run(job.requests)) as items:
        async for index, item in items:
            reply.add(index, item)
    return reply.whole()


async def _events(runner: Runner, job: Job, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The chunks as server-sent events; what fails after the first one is the last."""
    begun = False
    try:
        async with aclosing(runner.run(job.requests)) as items:
            async for index, item in items:
                for chunk in reply.chunks(index, item):
                    begun = True
                    yield _event(chunk)
    except Exception as error:
        if not begun:
            raise
        yield b"event: error\n" + _event(as_api_error(error).as_dict())
    yield b"data: [DONE]\n\n"


def _event(data: object) -> bytes:
    # ASCII: there are clients that take U+2028 for the end of a line.
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


class EventStream(Response):
    """Server-sent events, ended when the client leaves.

    Status and headers go out with the first event: what fails before it is an ordinary error response.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        begun = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
