"""The OpenAPI document of the HTTP doors, made of the requests' classes."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import baton
from router.frontend.api.messages import MessagesRequest
from router.frontend.api.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.frontend.api.responses import ResponsesRequest

_BODIES: dict[str, tuple[str, Any, bool]] = {
    "/v1/completions": ("Complete a prompt.", CompletionRequest, True),
    "/v1/chat/completions": ("Continue a chat.", ChatCompletionRequest, True),
    "/v1/messages": ("Continue a chat, as Anthropic's API does.", MessagesRequest, True),
    "/v1/responses": ("Answer an input, as OpenAI's Responses API does, without state.", ResponsesRequest, True),
    "/tokenize": ("Return the tokens of a prompt or a chat.", TokenizeRequest, False),
    "/detokenize": ("Return the text of tokens.", DetokenizeRequest, False),
}
_PAGES = {
    "/v1/models": "List the served model.",
    "/version": "Return Baton's version.",
    "/live": "Tell whether the process answers.",
    "/health": "Tell whether a request that comes now can be served.",
    "/ready": "The same as /health.",
    "/health/ready": "The same as /health.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_ERRORS = {
    "400": "a field is wrong",
    "401": "no API key, or an unknown one",
    "404": "another model",
    "429": "overloaded",
    "503": "no worker",
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON object."""
    kinds = [kind for _, kind, _ in _BODIES.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        path: {"post": _post(*told, schema)} for (path, told), schema in zip(_BODIES.items(), schemas, strict=True)
    }
    paths |= {path: {"get": _get(summary)} for path, summary in _PAGES.items()}
    text = {
        "200": {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }
    paths["/metrics"] = {"get": {"summary": "Return this process's metrics.", "responses": text}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton.__version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _post(summary: str, _: Any, streams: bool, schema: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = dict(_OBJECT)
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors()},
    }


def _get(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": _OBJECT}, "503": _errors()["503"]},
    }


def _errors() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
