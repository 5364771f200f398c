"""Anthropic's Messages API: its requests as chats, its answers in blocks of text, thinking and tool use, its errors."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from baton.errors import BatonError, shown
from router.frontend.api import errors
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.protocol import unsupported
from router.frontend.api.response_builder import Answer, AnswerOptions, Json, Sample
from router.frontend.api.tools import switch, wrong
from router.frontend.chat.deltas import Content, Item, ItemBegins, ItemEnds, ItemGrows, ItemStep, ItemStream, ToolCall
from router.frontend.chat.json_calls import decoded
from router.frontend.output_stream import Output


class MessagesRequest(Struct, kw_only=True):
    """The body of POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class CountTokensRequest(Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def as_message(self) -> MessagesRequest:
        """The request whose prompt is counted."""
        return MessagesRequest(max_tokens=1, **asdict(self))


def chat_of_messages(request: MessagesRequest) -> ChatCompletionRequest:
    """The same request as a chat. Raises InvalidRequest."""
    messages: list[Json] = [{"role": "system", "content": request.system}] if request.system else []
    called: dict[str, str] = {}
    for number, message in enumerate(request.messages):
        messages += _messages(f"messages[{number}].content", message, called)
    continued = bool(request.messages) and request.messages[-1].get("role") == "assistant"
    choice, parallel = _choice(request.tool_choice)
    shows, variables = _thinking(request.thinking)
    return ChatCompletionRequest(
        messages=messages,
        model=request.model,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        tools=[_tool(number, tool) for number, tool in enumerate(request.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        include_reasoning=shows,
        chat_template_kwargs=variables,
        continue_final_message=continued,
        add_generation_prompt=not continued,
    )


def _messages(at: str, message: Json, called: dict[str, str]) -> list[Json]:
    """The messages that one with blocks is as a chat. `called` has the names of calls by their ids."""
    blocks: Any = message.get("content")
    if not isinstance(blocks, list):
        return [message]
    results: list[Json] = []
    rest: list[Any] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for number, block in enumerate(cast("list[Any]", blocks)):
        match block:
            case {"type": "tool_result", "tool_use_id": str(name)}:
                result: Json = {"role": "tool", "tool_call_id": name, "content": block.get("content")}
                results.append(result | ({"name": called[name]} if name in called else {}))
            case {"type": "tool_use", "id": str(id_), "name": str(name), "input": dict()}:
                called[id_] = name
                function = {"name": name, "arguments": block["input"]}
                calls.append({"id": id_, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_result" | "tool_use" | "thinking" as kind}:
                raise wrong(f"{at}[{number}]", f"it is {shown(repr(block))}, which is no {kind}")
            case _:
                rest.append(block)
    if results and not rest and message.get("role") == "user":
        return results
    made: Json = message | {"content": rest if rest or not (calls or thoughts) else ""}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    return [*results, made]


def _tool(number: int, tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"tools[{number}].type", tool["type"], "send tools with an input_schema alone")
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(
            f"tools[{number}].input_schema", f"it is {shown(repr(tool.get('input_schema')))}; send a JSON schema"
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _choice(given: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """The choice as chats have it, and whether several calls may come."""
    if given is None:
        return None, True
    parallel = given.get("disable_parallel_tool_use") is not True
    match given:
        case {"type": "auto" | "none" as mode}:
            return mode, parallel
        case {"type": "any"}:
            return "required", parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
        case _:
            raise wrong("tool_choice", f"it is {shown(repr(given))}; its type must be auto, any, tool or none")


def _thinking(given: Mapping[str, Any] | None) -> tuple[bool, Json | None]:
    """Whether reasoning is shown, and what the template is told. A model that always thinks does so unseen."""
    match given:
        case None:
            return False, None
        case {"type": "enabled"}:
            return given.get("display") != "omitted", switch(None, on=True)
        case {"type": "adaptive"}:
            return given.get("display") != "omitted", None
        case {"type": "disabled"}:
            return False, switch(None, on=False)
        case _:
            raise wrong("thinking", f"it is {shown(repr(given))}; its type must be enabled, adaptive or disabled")


_NO_TEXT: Json = {"type": "text", "text": ""}


class AnthropicMessage(Answer):
    """The answer of POST /v1/messages."""

    end_of_stream = b""

    def __init__(self, wanted: AnswerOptions, samples: Sequence[Sample]) -> None:
        super().__init__(wanted, samples)
        self._items = ItemStream()
        self._empty = True

    def event(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json:
        return anthropic_body(error)

    def opening(self) -> Iterator[Json]:
        (sample,) = self.samples
        usage = {"input_tokens": len(sample.prompt), "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def chunks(self, sample: Sample, piece: Output) -> Iterator[Json]:
        sample.tokens += piece.tokens
        yield from self._events(self._items.steps(sample.chat.feed(piece.text)))

    def ending(self, sample: Sample) -> Iterator[Json]:
        yield from self._events(self._items.steps(sample.chat.finish()))
        yield from self._events(self._items.end())
        if self._empty:
            yield {"type": "content_block_start", "index": 0, "content_block": _NO_TEXT}
            yield {"type": "content_block_stop", "index": 0}
        reason, sequence = _stop(sample)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": self.usage()}
        yield {"type": "message_stop"}

    def _events(self, steps: Iterable[ItemStep]) -> Iterator[Json]:
        for step in steps:
            self._empty = False
            match step:
                case ItemBegins(number, item):
                    yield {"type": "content_block_start", "index": number, "content_block": _begun(item)}
                case ItemGrows(number, item, text):
                    yield {"type": "content_block_delta", "index": number, "delta": _delta(item, text)}
                case ItemEnds(number):
                    yield {"type": "content_block_stop", "index": number}

    def closing(self) -> Iterator[Json]:
        yield from ()

    def whole(self) -> Json:
        (sample,) = self.samples
        content = [_block(item) for item in sample.chat.output.items] or [_NO_TEXT]
        return self._message(content, *_stop(sample), self.usage())

    def usage(self) -> Json:
        """Tokens. Anthropic counts those that were cached apart from the others."""
        counted = super().usage()
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counted["completion_tokens"],
        }

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        return {
            "id": self.wanted.id,
            "type": "message",
            "role": "assistant",
            "model": self.wanted.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


def _begun(item: Item) -> Json:
    if isinstance(item, ToolCall):
        return {"type": "tool_use", "id": item.id, "name": item.name, "input": {}}
    return _NO_TEXT if item.kind is Content else {"type": "thinking", "thinking": "", "signature": ""}


def _delta(item: Item, text: str) -> Json:
    if isinstance(item, ToolCall):
        return {"type": "input_json_delta", "partial_json": text}
    if item.kind is Content:
        return {"type": "text_delta", "text": text}
    return {"type": "thinking_delta", "thinking": text}


def _block(item: Item) -> Json:
    if isinstance(item, ToolCall):
        given: Any = decoded(item.arguments or "{}")
        # Anthropic's own way to tell of arguments that were cut.
        return _begun(item) | {"input": given if isinstance(given, dict) else {"INVALID_JSON": item.arguments}}
    return _begun(item) | {"text" if item.kind is Content else "thinking": item.text}


def _stop(sample: Sample) -> tuple[str, str | None]:
    match sample.finish_reason:
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
        case _:
            sequence = sample.stop_reason
            return ("stop_sequence", sequence) if isinstance(sequence, str) else ("end_turn", None)


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: BatonError) -> dict[str, Any]:
    """The JSON of an error, as Anthropic's API has it."""
    return anthropic_described(errors.status_of(error), str(error))


def anthropic_described(status: int, message: str) -> dict[str, Any]:
    """The JSON of an error with that status, as Anthropic's API has it."""
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC.get(status, "api_error"), "message": errors.shortened(message)},
    }
