"""OpenAI's Responses API, without state: its requests as chats, its answers in items of text, reasoning and calls.

No response is kept, so `store: true` and `previous_response_id` are refused. A client sends the whole conversation.

A tool of a namespace is offered as `NAMESPACE__NAME`, and its call comes back with both names. Tools that OpenAI runs
itself are left out, because nothing runs them here.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from baton.errors import BatonError, shown
from router.frontend.api import errors
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.protocol import SharedFields, refuse_fields, unsupported
from router.frontend.api.response_builder import (
    Choice,
    Count,
    Metrics,
    PromptTokensDetails,
    ResponseBuilder,
    ResponseOptions,
)
from router.frontend.api.token_logprobs import Json
from router.frontend.api.tools import checked_custom, checked_function, effort_of, is_hosted, is_left_out, wrong
from router.frontend.chat import deltas
from router.frontend.chat.repairs import Repairs, arguments_of, content_of, placeholder, source_of
from router.frontend.output_stream import Output

_MEMBERS = {"function": ("name", "description", "parameters", "strict"), "custom": ("name", "description", "format")}


class ResponsesRequest(SharedFields, kw_only=True):
    """The body of POST /v1/responses."""

    OWN_NAMES: ClassVar = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    previous_input_messages: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_SAME = (*SharedFields.__struct_fields__, "chat_template_kwargs", "parallel_tool_calls")
"""Fields that mean the same in a chat."""
_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_OF_SERVERS = (
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction", "compaction_summary"),
    *("context_compaction", "tool_search_output", "ghost_snapshot", "program", "program_output"),
)


def chat_of_response(request: ResponsesRequest, repairs: Repairs) -> ChatCompletionRequest:
    """The same request as a chat. Raises InvalidRequest for what needs state or is no text."""
    refuse_fields(
        request, "store", "previous_response_id", "conversation", "background", "prompt", "context_management",
        "top_logprobs", "moderation", "previous_input_messages",
    )  # fmt: skip
    if _LOGPROBS in (request.include or ()):
        raise unsupported("include", request.include, f"leave {_LOGPROBS} out")
    tools = ResponseTools(request, repairs)
    return ChatCompletionRequest(
        messages=_messages(request, tools, repairs),
        max_completion_tokens=request.max_output_tokens,
        tools=tools.chat,
        tool_choice=tools.choice_of(request.tool_choice),
        reasoning_effort=effort_of("reasoning", request.reasoning),
        response_format=_response_format(request),
        **{name: getattr(request, name) for name in _SAME},
    )


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` as chats have it: there a schema and its name are members of `json_schema`."""
    form: Any = (request.text or {}).get("format")
    match form:
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case None | {"type": "text" | "json_object"}:
            return form
        case _:
            raise unsupported("text.format", form, "its type must be text, json_object or json_schema with a schema")


_CALL_ITEMS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")


def _messages(request: ResponsesRequest, tools: ResponseTools, repairs: Repairs) -> list[Json]:
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    called: dict[str, str] = {}
    turn: Json | None = None  # the assistant's, which several items make up
    for number, item in enumerate(request.input):
        at = f"input[{number}]"
        match item:
            case _ if _is_reference(item):
                raise unsupported(
                    f"{at}.type", "item_reference",
                    "no item is stored here: set store to false, so that the client sends whole items",
                )  # fmt: skip
            case {"type": "function_call", "call_id": str(id_), "name": str(name)}:
                called[id_] = name = tools.name_of(item.get("namespace"), name)
                arguments = arguments_of(f"{at}.arguments", item.get("arguments"), repairs)
                turn = turn or _turn(messages)
                function = {"name": name, "arguments": arguments}
                turn.setdefault("tool_calls", []).append({"id": id_, "type": "function", "function": function})
            case {"type": "custom_tool_call", "call_id": str(id_), "name": str(name), "input": str(text)}:
                called[id_] = name = tools.name_of(item.get("namespace"), name)
                turn = turn or _turn(messages)
                custom = {"name": name, "input": text}
                turn.setdefault("tool_calls", []).append({"id": id_, "type": "custom", "custom": custom})
            case {"type": "reasoning"}:
                turn = turn or _turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _thought(item)
            case {
                "type": "function_call_output" | "custom_tool_call_output", "call_id": str(id_), "output": output
            }:  # fmt: skip
                turn = None
                content = content_of(f"{at}.output", output, "tool", repairs)
                result: Json = {"role": "tool", "tool_call_id": id_, "content": content}
                messages.append(result | ({"name": called[id_]} if id_ in called else {}))
            case {"type": "additional_tools"}:
                pass  # `ResponseTools` has them
            case {"type": str(kind)} if kind in _CALL_ITEMS:
                raise wrong(at, f"it is {shown(repr(item))}, which is no {kind}")
            case {"role": "assistant"} if item.get("type", "message") == "message":
                if turn is None or turn["content"] or "tool_calls" in turn:
                    turn = _turn(messages)
                turn["content"] = content_of(f"{at}.content", item.get("content"), "assistant", repairs)
            case _ if item.get("type", "message") == "message":
                turn, role = None, item.get("role")
                if role not in _ROLES:
                    raise wrong(f"{at}.role", f"it is {shown(repr(role))}; it must be one of {', '.join(_ROLES)}")
                content = content_of(f"{at}.content", item.get("content"), source_of(role, messages), repairs)
                messages.append({"role": role, "content": content})
            case {"type": str(kind)} if _is_hosted(kind) and repairs.make("placeholder"):
                turn = turn or _turn(messages)
                if "tool_calls" in turn:
                    turn = _turn(messages)
                turn["content"] = "\n".join(filter(None, [turn["content"], placeholder(kind)]))
            case _:
                raise unsupported(f"{at}.type", item["type"], "send messages, reasoning and function calls")
    return messages


def _is_reference(item: Json) -> bool:
    """Whether an item stands for one that a server has stored. The published schema lets its type be left out."""
    return item.get("type") == "item_reference" or ("id" in item and not item.get("type") and "role" not in item)


def _is_hosted(kind: str) -> bool:
    """Whether an item of a history tells of a tool that OpenAI's servers run, or of what these keep."""
    return kind.endswith(("_call", "_call_output")) or kind in _OF_SERVERS


def _turn(messages: list[Json]) -> Json:
    turn: Json = {"role": "assistant", "content": ""}
    messages.append(turn)
    return turn


def _thought(item: Json) -> str:
    parts: Any = item.get("content")
    if not isinstance(parts, list):
        return ""
    texts: list[Any] = [part.get("text") for part in parts if isinstance(part, dict)]  # pyright: ignore
    return "".join(text for text in texts if isinstance(text, str))


_NO_TEXT = deltas.Text(deltas.Content)
_EVENTS = {deltas.Content: "output_text", deltas.Reasoning: "reasoning_text"}
_CALLS = ("function_call_arguments", "custom_tool_call_input")


Status: TypeAlias = Literal["completed", "incomplete", "in_progress"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text for the client."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class _Item(Struct, kw_only=True, tag_field="type"):
    """What all items have."""

    id: str
    status: Status


class OutputMessage(_Item, kw_only=True, tag="message"):
    """A text for the client."""

    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(_Item, kw_only=True, tag="reasoning"):
    """What the model thinks before it answers."""

    content: list[ReasoningText]
    summary: list[Any] = []


class OutputCall(_Item, kw_only=True, tag="function_call"):
    """A call that the model makes."""

    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(_Item, kw_only=True, tag="custom_tool_call"):
    """A call of a tool that takes a text."""

    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(PromptTokensDetails, kw_only=True):
    """What is told of input tokens."""

    cache_write_tokens: Count = 0


class ResponseUsage(Struct, kw_only=True):
    """Tokens."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: dict[Literal["reasoning_tokens"], Count]
    total_tokens: Count


class Response(Struct, kw_only=True, tag_field="object", tag="response"):
    """The answer of POST /v1/responses."""

    id: str
    created_at: float
    status: Status
    error: None = None
    incomplete_details: dict[Literal["reason"], str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    metadata: dict[str, Any]
    metrics: Metrics | UnsetType = UNSET


class ResponsesBuilder(ResponseBuilder):
    """Builds the response of POST /v1/responses."""

    prefix = "resp_"
    end_of_stream = b""

    def __init__(self, options: ResponseOptions, choices: Sequence[Choice]) -> None:
        super().__init__(options, choices)
        self._name = options.id.removeprefix("resp_")
        self._items = deltas.ItemStream()
        self._events = 0
        self._tools = ResponseTools(options.request, Repairs())

    def event(self, chunk: Json) -> bytes:
        chunk |= {"sequence_number": self._events}
        self._events += 1
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json | Struct:
        if not self._events:
            return errors.body_of(error)
        return {"type": "error", "code": error.reason, "message": str(error), "param": None}

    def opening(self) -> Iterator[Json]:
        begun = self._response("in_progress", [])
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}

    def output(self, choice: Choice, piece: Output) -> Sequence[bytes]:
        choice.tokens += piece.tokens
        return [*map(self.event, self._item_events(self._items.steps(choice.chat.feed(piece.text))))]

    def ending(self, choice: Choice) -> Iterator[Json]:
        yield from self._item_events(self._items.steps(choice.finish_chat()))
        whole = self.whole()
        yield from self._item_events(self._items.end(), whole.status)
        if not choice.chat.output.items:
            yield from self._item_events([deltas.ItemBegins(0, _NO_TEXT), deltas.ItemEnds(0, _NO_TEXT)], whole.status)
        yield {"type": f"response.{whole.status}", "response": whole}

    def _item_events(self, steps: Iterable[deltas.ItemStep], status: Status = "completed") -> Iterator[Json]:
        """Yield the events of some steps. `status` is that of an item that ends."""
        for step in steps:
            number, item = step.number, step.item
            place: Json = {"item_id": self._id_of(number, item), "output_index": number}
            part = place | {"content_index": 0}
            kind = _CALLS[item.takes_text] if isinstance(item, deltas.ToolCall) else _EVENTS[item.kind]
            extra: Json = {"logprobs": []} if kind == "output_text" else {}
            match step:
                case deltas.ItemBegins():
                    begun = self._output_item(number, item, "in_progress", begun=True)
                    yield {"type": "response.output_item.added", "output_index": number, "item": begun}
                    if isinstance(item, deltas.Text):
                        yield {"type": "response.content_part.added", **part, "part": _part(item, "")}
                case deltas.ItemGrows(text=text):
                    where = place if isinstance(item, deltas.ToolCall) else part
                    yield {"type": f"response.{kind}.delta", **where, "delta": text, **extra}
                case deltas.ItemEnds():
                    if isinstance(item, deltas.ToolCall) and item.takes_text:
                        yield {"type": f"response.{kind}.done", **place, "input": item.arguments}
                    elif isinstance(item, deltas.ToolCall):
                        yield {
                            "type": f"response.{kind}.done",
                            **place,
                            "name": self._tools.origin_of(item.name)[1],
                            "arguments": item.arguments,
                        }
                    else:
                        yield {"type": f"response.{kind}.done", **part, "text": item.text, **extra}
                        yield {"type": "response.content_part.done", **part, "part": _part(item, item.text)}
                    done = self._output_item(number, item, status)
                    yield {"type": "response.output_item.done", "output_index": number, "item": done}

    def whole(self) -> Response:
        (choice,) = self.choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        items = choice.chat.output.items or [_NO_TEXT]
        last = len(items) - 1  # it is the one that was cut
        output = [
            self._output_item(number, item, status if number == last else "completed")
            for number, item in enumerate(items)
        ]
        whole, counted = self._response(status, output), self.usage()
        details = counted.completion_tokens_details
        whole.metrics = self.metrics()
        whole.usage = ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=InputTokensDetails(**asdict(counted.prompt_tokens_details)),
            output_tokens=counted.completion_tokens,
            output_tokens_details={"reasoning_tokens": 0} if details is UNSET else details,
            total_tokens=counted.total_tokens,
        )
        return whole

    def _id_of(self, number: int, item: deltas.Item) -> str:
        prefix = (
            ("ctc" if item.takes_text else "fc")
            if isinstance(item, deltas.ToolCall)
            else "msg"
            if item.kind is deltas.Content
            else "rs"
        )
        return f"{prefix}_{self._name}" + (f"_{number}" if number else "")

    def _output_item(self, number: int, item: deltas.Item, status: Status, *, begun: bool = False) -> OutputItem:
        """An item with its text, or as it is when it has begun."""
        name = self._id_of(number, item)
        if isinstance(item, deltas.ToolCall):
            arguments = "" if begun else item.arguments
            namespace, own = self._tools.origin_of(item.name)
            known: Json = {"id": name, "status": status, "call_id": item.id, "name": own}
            known |= {} if namespace is None else {"namespace": namespace}
            if item.takes_text:
                return OutputCustomCall(**known, input=arguments)
            return OutputCall(**known, arguments=arguments)
        if item.kind is deltas.Content:
            texts = [] if begun else [OutputText(item.text)]
            return OutputMessage(id=name, status=status, content=texts)
        thoughts = [] if begun else [ReasoningText(item.text)]
        return OutputReasoning(id=name, status=status, content=thoughts)

    def _response(self, status: Status, output: list[OutputItem]) -> Response:
        request: ResponsesRequest = self.options.request
        return Response(
            id=self.options.id, created_at=self.options.created, model=self.options.model, status=status, output=output,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=request.instructions, max_output_tokens=request.max_output_tokens,
            parallel_tool_calls=request.parallel_tool_calls is not False, store=False, temperature=request.temperature,
            text=request.text or {"format": {"type": "text"}}, tool_choice=request.tool_choice or "auto",
            tools=echoed(request.tools or ()), top_p=request.top_p, usage=None, metadata=request.metadata or {},
        )  # fmt: skip


def _part(item: deltas.Text, text: str) -> OutputText | ReasoningText:
    return (OutputText if item.kind is deltas.Content else ReasoningText)(text)


class ResponseTools:
    """The tools of one request. `chat` has them as a chat's.

    Codex sends them as an item of the input (`additional_tools`). There a tool may come again, and the last one
    counts."""

    def __init__(self, request: ResponsesRequest, repairs: Repairs) -> None:
        """Raises InvalidRequest with the path of what is wrong."""
        self._chat: dict[str, Json] = {}  # by the names that the model sees
        self._origins: dict[str, tuple[str | None, str]] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        self._add_all("tools", request.tools or (), repairs)
        for number, item in enumerate(request.input if isinstance(request.input, list) else ()):
            if item.get("type") == "additional_tools":
                self._add_all(f"input[{number}].tools", item.get("tools"), repairs, again=True)

    @property
    def chat(self) -> list[Json]:
        return list(self._chat.values())

    def _add_all(self, where: str, tools: Any, repairs: Repairs, *, again: bool = False) -> None:
        if not isinstance(tools, list | tuple):
            raise wrong(where, f"it is {shown(repr(tools))}; it must be a list of tools")
        for number, tool in enumerate(cast("Sequence[Any]", tools)):
            at = f"{where}[{number}]"
            match tool:
                case {"type": "namespace", "name": str(namespace), "tools": [*members]}:
                    for place, member in enumerate(members):
                        self._add(f"{at}.tools[{place}]", namespace, member, repairs, again=again)
                case {"type": "namespace"}:
                    raise wrong(at, f"it is {shown(repr(tool))}; a namespace needs a name and a list of tools")
                case _:
                    self._add(at, None, tool, repairs, again=again)

    def _add(self, at: str, namespace: str | None, tool: Any, repairs: Repairs, *, again: bool) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None  # pyright: ignore
        if is_left_out(kind, repairs):
            return
        if not isinstance(kind, str) or kind not in _MEMBERS:
            raise unsupported(f"{at}.type", kind, "send functions, custom tools and namespaces of them")
        members: Json = {member: tool[member] for member in _MEMBERS[kind] if member in tool}
        name: str = (checked_custom if kind == "custom" else checked_function)(at, members)["name"]
        offered = self._names.get((namespace, name))
        if offered is not None and not again:
            raise wrong(f"{at}.name", f"it is {name!r} again; each tool needs a name of its own")
        if offered is None:
            offered = joined(namespace, name)
            while offered in self._origins:
                offered += "_"
        self._origins[offered] = (namespace, name)
        self._names[namespace, name] = offered
        self._chat[offered] = {"type": kind, kind: members | {"name": offered}}

    def name_of(self, namespace: Any, name: str) -> str:
        """Return the name in a chat of a tool that an item of the conversation names."""
        if not isinstance(namespace, str):
            namespace = None
        return self._names.get((namespace, name)) or joined(namespace, name)

    def origin_of(self, offered: str) -> tuple[str | None, str]:
        """Return the namespace, if any, and the name of a tool that was offered."""
        return self._origins.get(offered, (None, offered))

    def choice_of(self, tool_choice: Any) -> Any:
        """Return a `tool_choice` as chats have it."""
        match tool_choice:
            case {"type": "function" | "custom", "name": str(name)}:
                return _function(self.name_of(tool_choice.get("namespace"), name))
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
                allowed: list[Any] = [choice for one in tools for choice in self._allowed(one)]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
            case _:
                return tool_choice

    def _allowed(self, tool: Any) -> list[Any]:
        match tool:
            case {"type": "namespace", "name": str(namespace)}:
                return [_function(offered) for offered, origin in self._origins.items() if origin[0] == namespace]
            case {"type": str(kind)} if is_hosted(kind):
                return []
            case _:
                return [self.choice_of(tool)]


def echoed(tools: Iterable[Json]) -> list[Json]:
    """Return tools as a response repeats them: with the members that the published schema wants of a function."""
    return [
        tool | {"tools": echoed(tool["tools"])}
        if tool.get("type") == "namespace"
        else {"parameters": None, "strict": False} | tool
        if tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def joined(namespace: str | None, name: str) -> str:
    """Return the name under which a model sees a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def _function(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}
