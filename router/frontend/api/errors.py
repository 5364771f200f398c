"""Errors as the OpenAI APIs have them, and the answers that have one."""

# pyright: strict

from __future__ import annotations

import math
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from starlette.responses import Response

from baton.errors import (
    BatonError,
    BodyTimeout,
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    Unauthenticated,
    UnsupportedEncoding,
    shown,
)

ErrorBody: TypeAlias = Callable[[BatonError], Struct | dict[str, Any]]


class ErrorDetail(Struct):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: int | str


class Error(Struct):
    """An error."""

    error: ErrorDetail


_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "FAILED_PRECONDITION": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


_JSON = "application/json"
_MOST = 2_000  # characters of an error
_LONG_WORD = re.compile(r"\S{161,}")  # such as a number of 4,000 digits, which a client sent

_STATUS_OF_CLASS: dict[type[BatonError], int] = {
    PayloadTooLarge: 413, UnsupportedEncoding: 415, BodyTimeout: 408,
}  # fmt: skip


def status_of(error: BatonError) -> int:
    return _STATUS_OF_CLASS.get(type(error)) or _STATUS.get(error.status, 500)


def headers_of(error: BatonError) -> dict[str, str]:
    """The headers of an error's answer: when another try is worth it, and the reason as a label."""
    headers = {"baton-reason": error.reason}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1_000)))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return headers


def body_of(error: BatonError) -> Error:
    body = described(status_of(error), str(error), (error.field or None) if isinstance(error, InvalidRequest) else None)
    if isinstance(error, Unauthenticated | ContextTooLong):  # OpenAI's words for it
        code = error.reason if isinstance(error, Unauthenticated) else "context_length_exceeded"
        body.error.type, body.error.code = "invalid_request_error", code
    return body


def described(status: int, message: str, param: str | None = None) -> Error:
    name = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
    kind = name.title().replace(" ", "") + ("" if name.endswith("Error") else "Error")
    return Error(ErrorDetail(shortened(message), kind, param, status))


def shortened(message: str) -> str:
    """The message without most of what is too long to be read."""
    return shown(_LONG_WORD.sub(lambda word: shown(word[0]), message), _MOST)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def error_response(error: BatonError, failed: ErrorBody = body_of) -> Response:
    """Return the answer for an error, in the form of its API."""
    return Response(msgspec.json.encode(failed(error)), status_of(error), headers_of(error), _JSON)
