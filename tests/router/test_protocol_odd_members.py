"""Whatever type a member of a request has, the answer is the API's own, or an error that names what is wrong."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import msgspec
import pytest

from baton.errors import BatonError
from router.frontend.api.anthropic_messages import MessagesRequest, chat_of_messages
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.openai_responses import ResponsesRequest, ResponseTools, chat_of_response, echoed
from router.frontend.api.prompts import normalized, rendering
from router.frontend.api.protocol import decode, refuse_unserved, structured_output
from router.frontend.api.tools import constraint, planned
from router.frontend.chat.formats import ChatFormat
from router.frontend.chat.repairs import Repairs

ODD: list[Any] = [None, True, 5, 1.5, "x", [], {}, [None], [{}], {"type": ["x"]}, {"type": {}}, {"name": []}]
TEXT = {"type": "text", "text": "a"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
LARK = {"syntax": "lark", "definition": "start: /a/"}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [TEXT]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "2", "type": "custom", "custom": {"name": "g", "input": "x"}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
    ],
    "tools": [
        {"type": "function", "function": FUNCTION},
        {"type": "custom", "custom": {"name": "g", "format": {"type": "grammar", "grammar": LARK}}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": FORM, "stop": ["a"], "logit_bias": {"1": 1}, "chat_template_kwargs": {"a": 1},
    "stream_options": {"include_usage": True},
}  # fmt: skip
RESPONSE = {
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [FUNCTION | {"type": "function", "name": "h"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "web_search_call", "id": "w", "action": {}},
    ],
    "tools": [
        FUNCTION | {"type": "function"},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
        {"type": "namespace", "name": "n", "tools": [FUNCTION | {"type": "function"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "n"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
}  # fmt: skip
MESSAGE = {
    "max_tokens": 5, "system": [TEXT], "thinking": {"type": "enabled", "budget_tokens": 1024},
    "messages": [
        {"role": "user", "content": [
            TEXT, {"type": "document", "source": {"type": "content", "content": [TEXT]}, "title": "t"},
            {"type": "search_result", "content": [TEXT], "source": "s"},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": [TEXT]}, TEXT]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}, {"type": "web_search_20250305", "name": "w"}],
    "tool_choice": {"type": "tool", "name": "f"}, "stop_sequences": ["a"],
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
}  # fmt: skip


def variants(body: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each body that differs from this one in a single member, and where."""
    stack: list[tuple[Any, ...]] = [()]
    while stack:
        path = stack.pop()
        inner = body
        for step in path:
            inner = inner[step]
        stack += [
            (*path, key)
            for key in (inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ())
        ]
        for odd in ODD if path else ():
            changed = deepcopy(body)
            place = changed
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = odd
            yield path, changed


def handle(kind: Any, chat_of: Callable[[Any, Repairs], ChatCompletionRequest], body: Any) -> None:
    """Do what the doors do with a body before the template and the grammar get it."""
    repairs = Repairs()
    request = decode(json.dumps(body).encode(), kind)
    fields = chat_of(request, repairs)
    refuse_unserved(fields)
    fields, plan = planned(fields, ChatFormat("hermes", "qwen3"))
    structured_output(fields)
    if plan.forced and not plan.plain:
        constraint(plan, plan.schemas)
    rendering("", {"messages": normalized(fields.messages, "'user'", repairs), "tools": fields.tools})
    if isinstance(request, ResponsesRequest):
        msgspec.json.encode([echoed(request.tools or ()), ResponseTools(request, Repairs()).chat])


@pytest.mark.parametrize(
    ("kind", "chat_of", "body"),
    [
        (ChatCompletionRequest, lambda fields, repairs: fields, CHAT),
        (ResponsesRequest, chat_of_response, RESPONSE),
        (MessagesRequest, chat_of_messages, MESSAGE),
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_member_of_another_type_is_no_internal_error(kind: Any, chat_of: Any, body: Any) -> None:
    handle(kind, chat_of, body)
    for path, changed in variants(body):
        try:
            handle(kind, chat_of, changed)
        except BatonError:
            pass
        except Exception as error:
            raise AssertionError(f"{path}: {error!r}") from error
