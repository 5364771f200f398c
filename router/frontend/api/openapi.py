"""The OpenAPI document of the HTTP doors, derived from the structs of requests and responses.

Answers that belong to no API stand here.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

import baton
from router.frontend.api.anthropic_messages import (
    AnthropicError,
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
    MessageTokensCount,
)
from router.frontend.api.batch_store import Batch, File
from router.frontend.api.batches import BatchList, CreateBatch, Deleted, FileList
from router.frontend.api.errors import Error
from router.frontend.api.model_cards import AnthropicModel, AnthropicModelList, Model, ModelList
from router.frontend.api.openai_chat import ChatCompletion, ChatCompletionRequest
from router.frontend.api.openai_completions import Completion, CompletionRequest
from router.frontend.api.openai_responses import Response, ResponsesRequest
from router.frontend.api.protocol import DetokenizeRequest, TokenizeRequest
from router.frontend.api.response_builder import Count

Schema: TypeAlias = dict[str, Any]


class Tokens(Struct, kw_only=True):
    """The answer of POST /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizedText(Struct):
    """The answer of POST /detokenize."""

    prompt: str


class Version(Struct):
    """The answer of GET /version."""

    version: str


class Status(Struct):
    """The answer of GET /live, and of GET /ready while requests can be served."""

    status: Literal["live", "ready"]


@dataclass(frozen=True)
class _Call:
    """A POST: its summary, its body and its answer."""

    summary: str
    body: type
    answer: type
    streams: bool = False
    error: type = Error


_CALLS = {
    "/v1/completions": _Call("Complete a prompt.", CompletionRequest, Completion, streams=True),
    "/v1/chat/completions": _Call("Continue a chat.", ChatCompletionRequest, ChatCompletion, streams=True),
    "/v1/messages": _Call(
        "Continue a chat, as Anthropic's API does.", MessagesRequest, AnthropicMessage, True, AnthropicError
    ),
    "/v1/messages/count_tokens": _Call(
        "Count a chat's tokens, as Anthropic's API does.", CountTokensRequest, MessageTokensCount, error=AnthropicError
    ),
    "/v1/responses": _Call(
        "Answer an input, as OpenAI's Responses API does, without state.", ResponsesRequest, Response, streams=True
    ),
    "/v1/batches": _Call("Have the requests of a file served in gaps.", CreateBatch, Batch),
    "/tokenize": _Call("Return the tokens of a prompt or a chat.", TokenizeRequest, Tokens),
    "/detokenize": _Call("Return the text of tokens.", DetokenizeRequest, DetokenizedText),
}
_ERRORS = {
    "400": "a field is wrong, or has a value that this server does not serve",
    "401": "no API key, or an unknown one",
    "403": "this API key may not",
    "404": "the model is not served here, or there is no such file or batch",
    "408": "the body did not come in time",
    "413": "the body is larger than any prompt",
    "429": "overloaded, over a quota, or too late for the request's objective",
    "500": "a failure of the server",
    "503": "no worker can serve the request now",
    "504": "the request did not end in time",
}
_KEYS = ("401", "403")


@dataclass(frozen=True)
class _Operation:
    """A call without a body in JSON: its name, its summary, what it may answer, and statuses of its errors."""

    name: str
    summary: str
    answers: tuple[type, ...]
    errors: Collection[str] = tuple(_ERRORS)
    method: str = "get"


_SERVES = "Tell whether a request that comes now can be served."
_OPERATIONS = {
    "/v1/models": [_Operation("models", "List the names of the served model.", (ModelList, AnthropicModelList), _KEYS)],
    "/v1/models/{model}": [
        _Operation("model", "Return one name of the served model.", (Model, AnthropicModel), (*_KEYS, "404"))
    ],
    "/version": [_Operation("version", "Return Baton's version.", (Version,), ())],
    "/live": [_Operation("live", "Tell whether the process answers.", (Status,), ())],
    "/health": [_Operation("health", _SERVES, (Status,), ("503",))],
    "/ready": [_Operation("ready", "The same as /health.", (Status,), ("503",))],
    "/health/ready": [_Operation("health_ready", "The same as /health.", (Status,), ("503",))],
    "/v1/files": [
        _Operation("list_v1_files", "List the files of this tenant, the newest first.", (FileList,)),
        _Operation("upload_file", "Take a file of requests.", (File,), method="post"),
    ],
    "/v1/files/{file}": [
        _Operation("get_v1_files_file", "Return what is known of a file.", (File,)),
        _Operation("delete_v1_files_file", "Remove a file.", (Deleted,), method="delete"),
    ],
    "/v1/files/{file}/content": [_Operation("file_content", "Return a file as it came.", (File,))],
    "/v1/batches": [_Operation("list_v1_batches", "List the batches of this tenant, the newest first.", (BatchList,))],
    "/v1/batches/{batch}": [_Operation("get_v1_batches_batch", "Return how far a batch is.", (Batch,))],
    "/v1/batches/{batch}/cancel": [_Operation("post_v1_batches_batch_cancel", "End a batch.", (Batch,), method="post")],
}
_RETRY: Schema = {
    "Retry-After": {"description": "seconds after which another try is worth it", "schema": {"type": "integer"}},
    "retry-after-ms": {"description": "the same in milliseconds", "schema": {"type": "integer"}},
}
_TEXT: Schema = {"type": "string"}
_FORM: Schema = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {"file": _TEXT | {"format": "binary"}, "purpose": {"const": "batch"}},
            }
        }
    },
}
_EVENT: Schema = {
    "description": "one server-sent event; its data is a chunk as JSON, or [DONE]",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_REASON: Schema = {"baton-reason": {"description": "the reason as a label", "schema": {"type": "string"}}}


def ref(kind: type) -> Schema:
    """Return a reference to the schema of a struct."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON object."""
    operations = [(path, one) for path, several in _OPERATIONS.items() for one in several]
    kinds = [kind for call in _CALLS.values() for kind in (call.body, call.answer, call.error)]
    kinds += [kind for _, operation in operations for kind in operation.answers]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"post": _post(path, call)} for path, call in _CALLS.items()}
    for path, operation in operations:
        paths.setdefault(path, {})[operation.method] = _described(path, operation)
    either = {"anyOf": [ref(Error), ref(AnthropicError)]}
    paths["/v1/models/{model}"]["get"]["responses"]["404"] = _error("404", either)
    paths["/v1/files"]["post"]["requestBody"] = _FORM
    content: Schema = {"description": "the file", "content": {"application/jsonl": {"schema": {}}}}
    paths["/v1/files/{file}/content"]["get"]["responses"]["200"] = content
    page = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": _TEXT}}}
    metrics = {"operationId": "metrics", "summary": "Return this process's metrics."}
    paths["/metrics"] = {"get": metrics | {"responses": {"200": page, **_errors(Error, _KEYS)}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _post(path: str, call: _Call) -> Schema:
    content: dict[str, Any] = _json(ref(call.answer))
    if call.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return {
        "operationId": "_".join(part for part in path.split("/") if part not in ("", "v1")),
        "summary": call.summary,
        "requestBody": {"required": True, "content": _json(ref(call.body))},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(call.error, _ERRORS)},
    }


def _described(path: str, operation: _Operation) -> Schema:
    schemas = [ref(kind) for kind in operation.answers]
    content = _json({"anyOf": schemas} if len(schemas) > 1 else schemas[0])
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(Error, operation.errors)},
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    return described | ({"parameters": parameters} if parameters else {})


def _errors(kind: type, statuses: Iterable[str]) -> Schema:
    return {status: _error(status, ref(kind)) for status in statuses}


def _error(status: str, schema: Schema) -> Schema:
    return {
        "description": _ERRORS[status],
        "headers": _REASON | (_RETRY if status == "429" else {}),
        "content": _json(schema),
    }


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}
