"""Anthropic's Messages API: its requests as chats."""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import asdict

from baton.errors import shown
from router.frontend.api.protocol import ChatCompletionRequest, unsupported
from router.frontend.api.tools import switch, wrong

Json = dict[str, Any]


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
