"""OpenAI's Responses API, without state: its requests as chats, and its answers.

No response is kept, so `store: true` and `previous_response_id` are refused. A client sends the whole conversation.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from baton.errors import BatonError, InvalidRequest, shown
from router.frontend.api import errors
from router.frontend.api.answers import Answer, Json, Sample, Wanted
from router.frontend.api.protocol import ChatCompletionRequest, unsupported
from router.frontend.output_stream import Output


class ResponsesRequest(Struct, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: str | None = None
    include: list[str] | None = None
    # vLLM's and Baton's.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    request_id: str | None = None
    ignore_eos: bool | None = None
    ttft_ms: int | None = None
    tpot_ms: int | None = None
    cache_salt: str | None = None


def chat_of_response(request: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat. Raises InvalidRequest for what needs state or is no text."""
    for field in ("store", "previous_response_id", "conversation", "background"):
        if value := getattr(request, field):
            raise unsupported(field, value)
    if request.top_logprobs:
        raise unsupported("top_logprobs", request.top_logprobs)
    return ChatCompletionRequest(
        messages=_messages(request),
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        priority=request.priority,
        request_id=request.request_id,
        ignore_eos=request.ignore_eos,
        ttft_ms=request.ttft_ms,
        tpot_ms=request.tpot_ms,
        cache_salt=request.cache_salt,
        stream=request.stream,
        tools=request.tools,
        response_format=_response_format(request),
    )


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` as chats have it: there a schema and its name are members of `json_schema`."""
    form: Any = (request.text or {}).get("format")
    match form:
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case _:
            return form


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for number, item in enumerate(request.input):
        kind = item.get("type", "message")
        if kind != "message":
            raise InvalidRequest(f"input[{number}] is of type {shown(repr(kind))}; this server takes messages alone")
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": item.get("content")})
    return messages


class ModelResponse(Answer):
    """The answer of POST /v1/responses: one message with one text."""

    end_of_stream = b""

    def __init__(self, request: ResponsesRequest, wanted: Wanted, samples: Sequence[Sample]) -> None:
        super().__init__(wanted, samples)
        self._request = request
        self._item = f"msg_{wanted.id.removeprefix('resp_')}"
        self._events = 0

    def event(self, chunk: Json) -> bytes:
        chunk |= {"sequence_number": self._events}
        self._events += 1
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json:
        if not self._events:
            return errors.body_of(error)
        return {"type": "error", "code": error.reason, "message": str(error), "param": None}

    def opening(self) -> Iterator[Json]:
        begun = self._response("in_progress", [])
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        yield {"type": "response.output_item.added", "output_index": 0, "item": self._message("in_progress", [])}
        yield {"type": "response.content_part.added", **self._place(), "part": _part("")}

    def chunk(self, sample: Sample, piece: Output) -> Json | None:
        sample.tokens += piece.tokens
        if not piece.text:
            return None
        sample.text.append(piece.text)
        return {"type": "response.output_text.delta", **self._place(), "delta": piece.text, "logprobs": []}

    def ending(self, sample: Sample) -> Iterator[Json]:
        text = "".join(sample.text)
        yield {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **self._place(), "part": _part(text)}
        whole = self.whole()
        yield {"type": "response.output_item.done", "output_index": 0, "item": whole["output"][0]}
        yield {"type": f"response.{whole['status']}", "response": whole}

    def closing(self) -> Iterator[Json]:
        yield from ()

    def whole(self) -> Json:
        (sample,) = self.samples
        status = "incomplete" if sample.finish_reason == "length" else "completed"
        message = self._message(status, [_part("".join(sample.text))])
        return self._response(status, [message]) | {"usage": self.usage(), "metrics": self.metrics()}

    def usage(self) -> Json:
        counted = super().usage()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }

    def _place(self) -> Json:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _message(self, status: str, content: list[Json]) -> Json:
        return {"type": "message", "id": self._item, "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[Json]) -> Json:
        asked = self._request
        return {
            "id": self.wanted.id,
            "object": "response",
            "created_at": self.wanted.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.wanted.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": asked.metadata or {},
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
