"""OpenAI's Responses API, without state: its requests as chats.

No response is kept, so `store: true` and `previous_response_id` are refused. A client sends the whole conversation.
"""

# pyright: strict

from __future__ import annotations

from typing import Any

from msgspec import Struct

from baton.errors import shown
from router.frontend.api.protocol import ChatCompletionRequest, unsupported
from router.frontend.api.tools import wrong

Json = dict[str, Any]


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
        tools=[_tool(number, tool) for number, tool in enumerate(request.tools or ())],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=effort if isinstance(effort := (request.reasoning or {}).get("effort"), str) else None,
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


def _messages(request: ResponsesRequest) -> list[Json]:
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    called: dict[str, str] = {}
    turn: Json | None = None  # the assistant's, which several items make up
    for number, item in enumerate(request.input):
        match item:
            case {"type": "function_call", "call_id": str(id_), "name": str(name), "arguments": str(arguments)}:
                called[id_] = name
                turn = turn or _turn(messages)
                function = {"name": name, "arguments": arguments}
                turn.setdefault("tool_calls", []).append({"id": id_, "type": "function", "function": function})
            case {"type": "reasoning"}:
                turn = turn or _turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _thought(item)
            case {"type": "function_call_output", "call_id": str(id_), "output": output}:
                turn = None
                result: Json = {"role": "tool", "tool_call_id": id_, "content": output}
                messages.append(result | ({"name": called[id_]} if id_ in called else {}))
            case {"type": "function_call" | "function_call_output" as kind}:
                raise wrong(f"input[{number}]", f"it is {shown(repr(item))}, which is no {kind}")
            case {"role": "assistant"} if item.get("type", "message") == "message":
                if turn is None or turn["content"] or "tool_calls" in turn:
                    turn = _turn(messages)
                turn["content"] = item.get("content")
            case _ if item.get("type", "message") == "message":
                turn = None
                role = "system" if item.get("role") == "developer" else item.get("role")
                messages.append({"role": role, "content": item.get("content")})
            case _:
                raise unsupported(f"input[{number}].type", item["type"], "send messages, reasoning and function calls")
    return messages


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


def _tool(number: int, tool: Json) -> Json:
    if tool.get("type") != "function":
        raise unsupported(f"tools[{number}].type", tool.get("type"), "send functions alone")
    return {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}


def _choice(given: Any) -> Any:
    """The choice as chats have it."""
    match given:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_choice(one) for one in tools]}}
        case _:
            return given
