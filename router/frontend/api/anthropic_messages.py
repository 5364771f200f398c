"""Anthropic's Messages API: its requests as chats, its answers in blocks of text, thinking and tool use, its errors."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from baton.errors import BatonError, ContextTooLong, shown
from router.frontend.api import errors
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.prompts import text_of
from router.frontend.api.protocol import refuse_fields, unsupported
from router.frontend.api.response_builder import Choice, Count, NotCachedTokens, ResponseBuilder, ResponseOptions
from router.frontend.api.token_logprobs import Json
from router.frontend.api.tools import checked_function, effort_of, is_left_out, switch, wrong
from router.frontend.chat.deltas import Content, Item, ItemBegins, ItemEnds, ItemGrows, ItemStep, ItemStream, ToolCall
from router.frontend.chat.repairs import Repairs, arguments_of, content_of, part_of, source_of
from router.frontend.chat.scanning import decoded
from router.frontend.output_stream import Output

_BEGINNING = 80  # characters


class CountTokensRequest(Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens: a chat whose prompt is counted."""

    OWN_NAMES: ClassVar = {"stop": "stop_sequences", "response_format": "output_config.format"}
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # its older name
    mcp_servers: Any = None  # known, and not served
    container: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    kv_compression: dict[str, Any] | None = None  # Baton's
    metadata: dict[str, Any] | None = None
    thread: Any = None  # known, and not served
    compaction: Any = None


def chat_of_messages(request: CountTokensRequest, repairs: Repairs) -> ChatCompletionRequest:
    """The same request as a chat. Raises InvalidRequest."""
    if not isinstance(request, MessagesRequest):
        request = MessagesRequest(max_tokens=1, **asdict(request))
    refuse_fields(request, "mcp_servers", "container", "thread", "compaction")
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": content_of("system", request.system, "system", repairs)})
    called: dict[str, str] = {}
    for number, message in enumerate(request.messages):
        messages += _messages(f"messages[{number}]", message, messages, called, repairs)
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    continued = last is not None and "tool_calls" not in last and bool(text_of(last).strip())
    if last is not None and not (continued or "tool_calls" in last or "reasoning_content" in last):
        messages.pop()  # an empty last turn is allowed, and says nothing
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
        kv_compression=request.kv_compression,
        tools=list(_tools(request.tools or (), repairs)),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        include_reasoning=shows,
        reasoning_effort=effort_of("output_config", request.output_config),
        chat_template_kwargs=variables,
        continue_final_message=continued,
        add_generation_prompt=not continued,
        response_format=_response_format(request),
    )


def _response_format(request: CountTokensRequest) -> Json | None:
    """The schema of the answer, as chats have it."""
    at, form = "output_config.format", (request.output_config or {}).get("format")
    if form is None:
        at, form = "output_format", request.output_format
    match form:
        case None:
            return None
        case {"type": "json_schema", "schema": dict()}:
            return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
        case _:
            raise wrong(at, f"it is {shown(repr(form))}; send a JSON schema, as {{type: json_schema, schema: …}}")


def _messages(at: str, message: Json, before: list[Json], called: dict[str, str], repairs: Repairs) -> list[Json]:
    """The messages that one with blocks is as a chat. `called` has the names of calls by their ids."""
    role, blocks = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{at}.role", f"it is {shown(repr(role))}; it must be user, assistant or system")
    at += ".content"
    if not isinstance(blocks, list):
        return [message | {"content": content_of(at, blocks, role, repairs)}]
    results: list[Json] = []
    rest: list[Any] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for number, block in enumerate(cast("list[Any]", blocks)):
        match block:
            case {"type": "tool_result", "tool_use_id": str(name)}:
                content = content_of(f"{at}[{number}].content", block.get("content"), "tool", repairs)
                content = _as_error(content) if block.get("is_error") is True else content
                result: Json = {"role": "tool", "tool_call_id": name, "content": content}
                results.append(result | ({"name": called[name]} if name in called else {}))
            case {"type": "tool_use", "id": str(id_), "name": str(name)}:
                called[id_] = name
                arguments = arguments_of(f"{at}[{number}].input", block.get("input"), repairs)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": id_, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_result" | "tool_use" | "thinking" as kind}:
                raise wrong(f"{at}[{number}]", f"it is {shown(repr(block))}, which is no {kind}")
            case _:
                rest.append(part_of(f"{at}[{number}]", block, source_of(role, results or before), repairs))
    if results and not rest and message.get("role") == "user":
        return results
    turn: Json = message | {"content": rest if rest or not (calls or thoughts) else ""}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return [*results, turn]


def _as_error(content: str | list[Json]) -> str | list[Json]:
    """Return the content of a tool's result that is an error. Chats have no mark for it, so the text begins with it."""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    if "error" in "".join(texts)[:_BEGINNING].lower():
        return content
    return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]


def _tools(tools: Sequence[Json], repairs: Repairs) -> Iterator[Json]:
    """The tools as chats have them, without those that Anthropic runs or that only its models know."""
    names = set[str]()
    for number, tool in enumerate(tools):
        at, kind = f"tools[{number}]", tool.get("type")
        if is_left_out(kind, repairs):
            continue
        if kind not in (None, "custom"):
            raise unsupported(f"{at}.type", kind, "send tools with an input_schema alone")
        if not isinstance(tool.get("input_schema"), dict):
            raise wrong(f"{at}.input_schema", f"it is {shown(repr(tool.get('input_schema')))}; send a JSON schema")
        function = checked_function(at, tool, schema="input_schema")
        if function["name"] in names:
            raise wrong(f"{at}.name", f"it is {function['name']!r} again; each tool needs a name of its own")
        names.add(function["name"])
        yield {"type": "function", "function": function | {"strict": tool.get("strict")}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """The choice as chats have it, and whether several calls may come."""
    if choice is None:
        return None, True
    parallel = choice.get("disable_parallel_tool_use") is not True
    match choice:
        case {"type": "auto" | "none" as mode}:
            return mode, parallel
        case {"type": "any"}:
            return "required", parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
        case _:
            raise wrong("tool_choice", f"it is {shown(repr(choice))}; its type must be auto, any, tool or none")


def _thinking(setting: Mapping[str, Any] | None) -> tuple[bool, Json | None]:
    """Whether reasoning is shown, and what the template is told. A model that always thinks does so unseen."""
    match setting:
        case None:
            return False, None
        case {"type": "enabled"}:
            return setting.get("display") != "omitted", switch(None, on=True)
        case {"type": "adaptive" | "between_tools"}:
            return setting.get("display") != "omitted", None
        case {"type": "disabled"}:
            return False, switch(None, on=False)
        case _:
            raise wrong(
                "thinking",
                f"it is {shown(repr(setting))}; its type must be enabled, adaptive, between_tools or disabled",
            )


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text for the client."""

    text: str = ""


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning. There is no signature."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call that the model makes."""

    id: str
    name: str
    input: dict[str, Any]


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct, kw_only=True):
    """Tokens. Anthropic counts those that were cached apart from the others."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    not_cached: NotCachedTokens | UnsetType = UNSET


class AnthropicMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer of POST /v1/messages."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokensCount(Struct):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: Count


class MessageBuilder(ResponseBuilder):
    """Builds the response of POST /v1/messages."""

    prefix = "msg_"
    end_of_stream = b""

    def __init__(self, options: ResponseOptions, choices: Sequence[Choice]) -> None:
        super().__init__(options, choices)
        self._items = ItemStream()
        self._empty = True

    def event(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def sign_of_life(self) -> bytes:
        return self.event({"type": "ping"})

    def failed(self, error: BatonError) -> AnthropicError:
        return anthropic_body(error)

    def opening(self) -> Iterator[Json]:
        (choice,) = self.choices
        yield {"type": "message_start", "message": self._message([], None, len(choice.prompt), 0, 0)}
        yield {"type": "ping"}

    def output(self, choice: Choice, piece: Output) -> Sequence[bytes]:
        choice.tokens += piece.tokens
        return [*map(self.event, self._events(self._items.steps(choice.chat.feed(piece.text))))]

    def ending(self, choice: Choice) -> Iterator[Json]:
        yield from self._events(self._items.steps(choice.finish_chat()))
        yield from self._events(self._items.end())
        if self._empty:
            yield {"type": "content_block_start", "index": 0, "content_block": TextBlock()}
            yield {"type": "content_block_stop", "index": 0}
        whole = self.whole()
        delta = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": whole.usage}
        yield {"type": "message_stop"}

    def _events(self, steps: Iterable[ItemStep]) -> Iterator[Json]:
        for step in steps:
            self._empty = False
            match step:
                case ItemBegins(number, item):
                    yield {"type": "content_block_start", "index": number, "content_block": _block(item, begun=True)}
                case ItemGrows(number, item, text):
                    yield {"type": "content_block_delta", "index": number, "delta": _delta(item, text)}
                case ItemEnds(number):
                    yield {"type": "content_block_stop", "index": number}

    def whole(self) -> AnthropicMessage:
        (choice,) = self.choices
        content = [_block(item) for item in choice.chat.output.items] or [TextBlock()]
        counted = self.usage()
        details = counted.prompt_tokens_details
        prompt, cached = counted.prompt_tokens - details.cached_tokens, details.cached_tokens
        whole = self._message(content, choice, prompt, cached, counted.completion_tokens)
        whole.usage.not_cached = details.not_cached
        return whole

    def _message(
        self, content: list[Block], ended: Choice | None, prompt: int, cached: int, output: int
    ) -> AnthropicMessage:
        reason, sequence = _stop(ended) if ended is not None else (None, None)
        usage = MessageUsage(
            input_tokens=prompt, cache_creation_input_tokens=0, cache_read_input_tokens=cached, output_tokens=output
        )
        return AnthropicMessage(
            id=self.options.id, role="assistant", model=self.options.model, content=content, stop_reason=reason,
            stop_sequence=sequence, usage=usage,
        )  # fmt: skip


def _block(item: Item, *, begun: bool = False) -> Block:
    """An item with its text, or as it is when it has begun."""
    if not isinstance(item, ToolCall):
        return (TextBlock if item.kind is Content else ThinkingBlock)("" if begun else item.text)
    value: object = {} if begun else decoded(item.arguments or "{}")
    # Anthropic's own way to tell of arguments that were cut.
    whole = isinstance(value, dict)
    return ToolUseBlock(item.id, item.name, cast("Json", value) if whole else {"INVALID_JSON": item.arguments})


def _delta(item: Item, text: str) -> Json:
    if isinstance(item, ToolCall):
        return {"type": "input_json_delta", "partial_json": text}
    if item.kind is Content:
        return {"type": "text_delta", "text": text}
    return {"type": "thinking_delta", "thinking": text}


def _stop(choice: Choice) -> tuple[StopReason, str | None]:
    match choice.finish_reason:
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
        case _:
            sequence = choice.stop_reason
            return ("stop_sequence", sequence) if isinstance(sequence, str) else ("end_turn", None)


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(Struct, tag_field="type", tag="error"):
    """An error, as Anthropic's API has it."""

    error: dict[Literal["type", "message"], str]


def anthropic_body(error: BatonError) -> AnthropicError:
    message = str(error)
    if isinstance(error, ContextTooLong) and error.prompt:  # Anthropic's words for it, of which clients read the counts
        if error.output and error.prompt <= error.context:
            counts = f"{error.prompt} + {error.output} > {error.context}"
            message = f"input length and `max_tokens` exceed context limit: {counts}, decrease either and try again"
        else:
            message = f"prompt is too long: {error.prompt} tokens > {error.context} maximum"
    return anthropic_described(errors.status_of(error), message)


def anthropic_described(status: int, message: str) -> AnthropicError:
    """Return an error with that status, as Anthropic's API has it."""
    return AnthropicError({"type": _ANTHROPIC.get(status, "api_error"), "message": errors.shortened(message)})
