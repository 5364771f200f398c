"""The `response_template` of a tokenizer's settings, by which transformers describes a model's answers, as a format.

It has fields with a beginning and an end each: the reasoning, the content and the calls. Calls may be JSON, or
parameters in tags.
"""

# pyright: strict

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

import msgspec
from msgspec import Struct

from router.frontend.chat.parser import Sink, State, Terminals

_REASONING = ("reasoning_content", "thinking", "reasoning")
_SERVED = (*_REASONING, "content", "tool_calls")
_VALUE = "(?P<value>.*?)"
_LEADING_SPACE = re.compile(r"^(?:\\s[*+])+")
_OF_CALLS = {"object", "arguments", "parameters", "draft"}
_OBJECT = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_EACH = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}


class _Field(Struct):
    open: str | list[str] = []
    open_pattern: str = ""
    close: str | list[str] = []
    close_pattern: str = ""
    content: str = "text"
    content_args: dict[str, Any] = {}
    transform: Any = None
    transform_each: bool = False

    @property
    def opens(self) -> list[str]:
        return _patterns(self.open, self.open_pattern)

    @property
    def closes(self) -> list[str]:
        return _patterns(self.close, self.close_pattern)


class _Spec(Struct):
    fields: dict[str, _Field]
    version: int = 1
    start_anchor: str | list[str] = []
    start_anchor_pattern: str = ""


@dataclass(frozen=True)
class ResponseTemplate:
    """A template that has been read."""

    states: Mapping[str, State]
    anchor: re.Pattern[str]  # what stands before the answer
    reasoning: tuple[str, str] | None = None  # texts around it
    has_calls: bool = False

    def without_calls(self) -> dict[str, State]:
        """Return the states for an output that has none."""
        return {
            name: replaced(state, terminals=tuple(one for one in state.terminals if one[1] not in _OF_CALLS))
            for name, state in self.states.items()
        }

    def begun(self, prompt: str) -> str:
        """Return how much of the answer the end of a prompt has already."""
        ends = [match.end() for match in self.anchor.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""


def response_template(tree: object, objects: Mapping[str, State]) -> ResponseTemplate:
    """Read a template. `objects` are the states that read a call as an object. Raises ValueError for one with fields or
    patterns that are not served."""
    try:
        spec = msgspec.convert(tree, _Spec)
        anchor = re.compile("|".join(_patterns(spec.start_anchor, spec.start_anchor_pattern)) or "(?!)", re.DOTALL)
    except (msgspec.ValidationError, re.error) as error:
        raise ValueError(str(error)) from None
    if spec.version != 1:
        raise ValueError(f"version {spec.version} is not served")
    if odd := [name for name in spec.fields if name not in _SERVED]:
        raise ValueError(f"field {odd[0]!r} is not served")
    content, calls = spec.fields.get("content", _Field()), spec.fields.get("tool_calls")
    thought = next((spec.fields[name] for name in _REASONING if name in spec.fields), _Field())
    home = "outside" if content.opens else "content"
    states, begins = _calls(calls, home, objects) if calls else ({}, ())
    closes = tuple((one, home) for one in thought.closes)
    opens: Terminals = (
        *((one, "content") for one in content.opens), *((one, "reasoning") for one in thought.opens), *begins
    )  # fmt: skip
    states |= {
        "content": State(Sink.CONTENT, (*opens, *((one, home) for one in content.closes))),
        "reasoning": State(Sink.REASONING, (*closes, *((pattern, "draft") for pattern, _ in begins))),
        "draft": State(Sink.DRAFT, closes),
    }
    if home == "outside":
        states[home] = State(Sink.NOWHERE, opens)
    begin, end = thought.open, thought.close
    around = (begin, end) if isinstance(begin, str) and isinstance(end, str) else None
    return ResponseTemplate(states, anchor, around, calls is not None)


def _calls(field: _Field, home: str, objects: Mapping[str, State]) -> tuple[dict[str, State], Terminals]:
    """Return the states of calls, and the terminals that lead to them."""
    closes = tuple((rf"\s*{one}", home) for one in field.closes)
    after = State(Sink.NOTHING, closes, otherwise=home)
    shape = (field.content, field.transform, field.transform_each)
    if shape in (("json", _OBJECT, False), ("json", None, False)) and not field.content_args:
        return {**objects, "next": after}, tuple((rf"{one}\s*(?=\{{)", "object") for one in field.opens)
    if shape == ("json", _EACH, True) and not field.content_args:
        among = State(Sink.NOTHING, ((r"[\s,]*(?=\{)", "object"), (r"[\s,]*\]", "after")), otherwise=home)
        states = {**objects, "next": among, "after": after}
        return states, tuple((rf"{one}\s*\[\s*(?=\{{)", "object") for one in field.opens)
    if shape == ("json", _NAMED, False) and not field.content_args:
        states = {"arguments": State(Sink.JSON, then="next"), "next": after}
        return states, tuple((rf"{one}\s*", "arguments") for one in field.opens)
    if shape == ("xml-inline", _NAMED, False) and field.content_args.keys() == {"tag_pattern"}:
        key, value, end = str(field.content_args["tag_pattern"]).partition(_VALUE)
        if value:
            parameters = State(Sink.NOTHING, ((rf"\s*{key}", "value"), *closes), otherwise=home)
            states = {"parameters": parameters, "value": State(Sink.VALUE, ((end, "parameters"),))}
            return states, tuple((one, "parameters") for one in field.opens)
    raise ValueError(f"tool_calls of content {field.content!r} with that transform and content_args are not served")


def _patterns(texts: str | list[str], pattern: str) -> list[str]:
    """Return patterns for texts, or a pattern. White space before a call is layout in any case."""
    several = [texts] if isinstance(texts, str) else texts
    return [_LEADING_SPACE.sub("", pattern)] if pattern else [re.escape(one) for one in several]
