"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with the status a client expects."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from deployments.schema import json_like
from duo_ray.models.tokenizer import TokenizerError
from duo_ray.types import ContextOverflow, DuoRayError, InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that did not wait; nobody reads it."""


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """What every answer with a status from 400 on holds."""

    error: ErrorDetails


class ApiError(HTTPException):
    """A refusal with its HTTP status. `parameter` is the name of the request's field that is to be changed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self._parameter = parameter
        self._code = code

    def as_dict(self) -> ErrorReply:
        details: ErrorDetails = {
            "message": self.detail,
            "type": self._kind,
            "param": self._parameter,
            "code": self._code,
        }
        return {"error": details}

    @property
    def _kind(self) -> str:
        match self.status_code:
            case HTTPStatus.UNAUTHORIZED:
                return "authentication_error"
            case HTTPStatus.TOO_MANY_REQUESTS:
                return "rate_limit_error"
            case HTTPStatus.REQUEST_TIMEOUT:
                return "timeout_error"
            case status if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                return "server_error"
        return "invalid_request_error"

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_dict(), self.status_code, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error raised while its request was served; never a traceback."""
    cause = getattr(error, "cause", None)  # Ray raises an actor's error with the traceback in its text
    match cause if isinstance(cause, DuoRayError) else error:
        case ApiError() as answer:
            return answer
        case ContextOverflow() as overflow:
            return ApiError(400, str(overflow), code="context_length_exceeded")
        case InvalidRequest() | TokenizerError() as refusal:
            return ApiError(400, str(refusal))
        case Overloaded() as full:
            return ApiError(503, str(full), code="overloaded", headers={"Retry-After": str(full.retry_after_s)})
        case DuoRayError() as known:
            logger.error("a request failed: %s", known)
            return ApiError(500, str(known), code="generation_failed")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed on this request: {type(error).__name__}; its log has the details")


def handle_errors(api: FastAPI) -> None:
    """Answer what FastAPI refuses in OpenAI's shape; the gateway does it for what fails."""

    @api.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Response:
        return _of_validation(request, error).response()

    @api.exception_handler(HTTPException)
    async def answer(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        message = {
            400: "the body is not JSON: it is no valid UTF-8, nests too deeply or has a number of thousands of digits",
            404: f"there is no {request.method} {request.url.path} here; /docs lists what there is",
            405: f"{request.url.path} does not take {request.method}",
        }.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response()

    @api.exception_handler(ClientDisconnect)
    async def close(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _of_validation(request: Request, error: RequestValidationError) -> ApiError:
    """The first complaint about a body, as one sentence that names the parameter, its value and what is allowed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json" and not kind.endswith("+json"):
        given = kind or "none"
        return ApiError(415, f"the body must be JSON: send Content-Type: application/json (got {given})")
    first = error.errors()[0]
    place, context = first["loc"][1:], first.get("ctx", {})
    parameter = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
    code = "invalid_value"
    match first["type"]:
        case "json_invalid":
            parameter, complaint = "", f"the body is not JSON: {context['error']} at character {place[0]}"
        case "missing":
            complaint, code = f"{parameter or 'the body'} is missing", "missing_required_parameter"
        case "model_attributes_type" if not place:
            complaint = f"the body must be a JSON object, got {json_like(first['input'])}"
        case "unknown_parameter":
            parameter, code = f"{parameter}.{context['name']}".lstrip("."), "unknown_parameter"
            complaint = f"{parameter} is not a parameter; {context['hint']}"
        case "inconsistent":
            parameter = context["name"]
            complaint = f"{parameter} {context['complaint']}"
        case "value_error":
            complaint = f"{parameter} {context['error']}"
        case _:
            said = first["msg"].removeprefix("Input ")
            complaint = f"{parameter}: {said}, got {json_like(first['input'])}"
    return ApiError(400, complaint, parameter=parameter or None, code=code)
