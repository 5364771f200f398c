"""Structured output as the HTTP APIs have it: OpenAI's `response_format` and vLLM's `structured_outputs`."""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton.errors import InvalidGrammar, shown
from router.frontend.api.protocol import GenerationFields, unsupported

Json = dict[str, Any]

FIELDS = ("structured_outputs", "response_format")
_MOST_CHOICES = 10_000
_IGNORED = {"disable_fallback", "backend", "_backend", "_backend_was_auto"}
"""Members that choose one of vLLM's libraries."""


def structured_output(fields: GenerationFields) -> Json | None:
    """Return the `structured_output` that a request's fields ask for; None without one. Raises InvalidRequest."""
    forms = {name: value for name in FIELDS if (value := getattr(fields, name))}
    if forms.get("response_format", {}).get("type") == "text":
        del forms["response_format"]
    if len(forms) > 1:
        raise _wrong("response_format", "it is set beside structured_outputs; choose one")
    if "structured_outputs" in forms:
        return _of_vllm(forms["structured_outputs"])
    return _of_openai(forms["response_format"]) if forms else None


def _of_openai(form: Json) -> Json:
    match form:
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": _json("response_format", schema)}
        case {"type": "json_schema"}:
            raise _wrong("response_format", "it has no schema; send it as json_schema.schema")
        case _:
            raise unsupported("response_format", form, "its type must be text, json_object or json_schema")


def _of_vllm(options: Json) -> Json | None:
    members = {name: value for name, value in options.items() if value is not None and value is not False}
    compact = members.pop("disable_any_whitespace", False) is True
    for name, value in members.items():
        if name not in _KINDS and name not in _IGNORED:
            raise unsupported(f"structured_outputs.{name}", value)
    kinds = [name for name in members if name in _KINDS]
    if len(kinds) > 1:
        raise _wrong("structured_outputs", f"it has {' and '.join(kinds)}; choose one")
    for name in kinds:
        return _KINDS[name](members[name]) | {"compact": compact}
    return None


def _json(field: str, schema: Any) -> str:
    """A schema comes as JSON within the request, or as its text."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict | bool):
        raise _wrong(field, f"the schema is {shown(repr(schema))}; it must be an object")
    return msgspec.json.encode(schema).decode()


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(f"structured_outputs.{name}", f"it is {shown(repr(value))}; it must be a text")
    return value


def _choices(value: Any) -> list[str]:
    field = "structured_outputs.choice"
    texts: list[Any] = value
    if not isinstance(value, list) or not texts:
        raise _wrong(field, "it must be a list of at least one text")
    if len(texts) > _MOST_CHOICES:
        raise _wrong(field, f"it has {len(texts)} texts; at most {_MOST_CHOICES} are allowed")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _wrong(field, f"it has {shown(repr(text))}; each must be a text of at least one character")
    return texts


_KINDS: Mapping[str, Callable[[Any], Json]] = {
    "json": lambda value: {"json_schema": _json("structured_outputs.json", value)},
    "json_object": lambda value: {"json_object": value is True},
    "regex": lambda value: {"regex": _text("regex", value)},
    "choice": lambda value: {"choice": {"texts": _choices(value)}},
    "grammar": lambda value: {"grammar": _text("grammar", value)},
}


def _wrong(field: str, reason: str) -> InvalidGrammar:
    error = InvalidGrammar(f"{field}: {reason}")
    error.field = field
    return error


def name_field(error: InvalidGrammar, fields: GenerationFields) -> InvalidGrammar:
    """Return the same error with the name of the field that holds the grammar."""
    if not error.field and (field := next((name for name in FIELDS if getattr(fields, name)), "")):
        return _wrong(field, str(error))
    return error
