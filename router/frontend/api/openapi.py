"""The OpenAPI document of the HTTP doors, made of the requests' classes and the answers' schemas."""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

import baton
from router.frontend.api.answer_schemas import SCHEMAS, Schema, ref
from router.frontend.api.anthropic_messages import CountTokensRequest, MessagesRequest
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.openai_completions import CompletionRequest
from router.frontend.api.openai_responses import ResponsesRequest
from router.frontend.api.protocol import DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True)
class _Call:
    """A POST: its summary, and the schemas of its body and its answer."""

    summary: str
    body: type
    answer: str
    streams: bool = False
    error: str = "Error"


_CALLS = {
    "/v1/completions": _Call("Complete a prompt.", CompletionRequest, "Completion", streams=True),
    "/v1/chat/completions": _Call("Continue a chat.", ChatCompletionRequest, "ChatCompletion", streams=True),
    "/v1/messages": _Call(
        "Continue a chat, as Anthropic's API does.", MessagesRequest, "Message", streams=True, error="AnthropicError"
    ),
    "/v1/messages/count_tokens": _Call(
        "Count the tokens of a chat, as Anthropic's API does.",
        CountTokensRequest,
        "MessageTokensCount",
        error="AnthropicError",
    ),
    "/v1/responses": _Call(
        "Answer an input, as OpenAI's Responses API does, without state.", ResponsesRequest, "Response", streams=True
    ),
    "/tokenize": _Call("Return the tokens of a prompt or a chat.", TokenizeRequest, "Tokens"),
    "/detokenize": _Call("Return the text of tokens.", DetokenizeRequest, "Text"),
}
_PAGES: dict[str, tuple[str, list[str], bool]] = {
    "/v1/models": ("List the names of the served model.", ["ModelList", "AnthropicModelList"], False),
    "/version": ("Return Baton's version.", ["Version"], False),
    "/live": ("Tell whether the process answers.", ["Live"], False),
    "/health": ("Tell whether a request that comes now can be served.", ["Ready"], True),
    "/ready": ("The same as /health.", ["Ready"], True),
    "/health/ready": ("The same as /health.", ["Ready"], True),
}
"""Summary, schemas of the answer, and whether 503 is another one."""
_ERRORS = {
    "400": "a field is wrong, or has a value that this server does not serve",
    "401": "no API key, or an unknown one",
    "403": "this API key may not",
    "404": "the model is not served here",
    "408": "the body did not come in time",
    "413": "the body is larger than any prompt",
    "429": "overloaded, over a quota, or too late for the request's objective",
    "500": "a failure of the server",
    "503": "no worker can serve the request now",
    "504": "the request did not end in time",
}
_KEYS = ("401", "403")
_RETRY: Schema = {
    "Retry-After": {"description": "seconds after which another try is worth it", "schema": {"type": "integer"}},
    "retry-after-ms": {"description": "the same in milliseconds", "schema": {"type": "integer"}},
}
_EVENT: Schema = {
    "description": "one server-sent event; its data is a chunk as JSON, or [DONE]",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_REASON: Schema = {"baton-reason": {"description": "the reason as a label", "schema": {"type": "string"}}}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON object."""
    bodies, components = msgspec.json.schema_components(
        [call.body for call in _CALLS.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {
        path: {"post": _post(path, call, body)} for (path, call), body in zip(_CALLS.items(), bodies, strict=True)
    }
    paths |= {path: {"get": _get(path, *told)} for path, told in _PAGES.items()}
    paths["/v1/models/{model}"] = {"get": _model()}
    page = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    paths["/metrics"] = {
        "get": {
            "operationId": "metrics",
            "summary": "Return this process's metrics.",
            "responses": {"200": page, **_errors("Error", *_KEYS)},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton.__version__},
        "paths": paths,
        "components": {"schemas": {**components, **SCHEMAS}},
    }


def _post(path: str, call: _Call, body: Schema) -> Schema:
    content: dict[str, Any] = _json(ref(call.answer))
    if call.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return {
        "operationId": _name(path),
        "summary": call.summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(call.error, *_ERRORS)},
    }


def _get(path: str, summary: str, answers: list[str], may_fail: bool) -> Schema:
    schema = {"anyOf": [ref(name) for name in answers]} if len(answers) > 1 else ref(answers[0])
    return {
        "operationId": _name(path),
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": _json(schema)},
            **_errors("Error", *(["503"] if may_fail else []), *(_KEYS if path.startswith("/v1") else ())),
        },
    }


def _model() -> Schema:
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return _get("/v1/model", "Return one name of the served model.", ["Model", "AnthropicModel"], False) | {
        "parameters": [parameter],
        "responses": {
            "200": {"description": "the model", "content": _json({"anyOf": [ref("Model"), ref("AnthropicModel")]})},
            **_errors("Error", *_KEYS),
            "404": _error("404", {"anyOf": [ref("Error"), ref("AnthropicError")]}),
        },
    }


def _errors(schema: str, *statuses: str) -> Schema:
    return {status: _error(status, ref(schema)) for status in statuses}


def _error(status: str, schema: Schema) -> Schema:
    return {
        "description": _ERRORS[status],
        "headers": _REASON | (_RETRY if status == "429" else {}),
        "content": _json(schema),
    }


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _name(path: str) -> str:
    return "_".join(part for part in path.split("/") if part not in ("", "v1"))
