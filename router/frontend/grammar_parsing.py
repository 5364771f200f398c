"""From a request's `structured_output` to the grammar that decode workers match.

What needs llguidance is checked later, by `grammar_checker`.
"""

# pyright: strict

from __future__ import annotations

import json
from typing import Any

import msgspec

from baton.errors import InvalidGrammar, UnsupportedField
from baton.messages import MAX_GRAMMAR, Grammar
from baton.v1 import generation_pb2 as pb
from router.frontend.served_model import ServedModel


def grammar_of(request: pb.GenerateRequest, model: ServedModel) -> Grammar | None:
    """Return the grammar of a request; None without one. Raises InvalidGrammar, and UnsupportedField where the
    checkpoint has no tokenizer or no end of sequence."""
    asked = request.structured_output
    kind = asked.WhichOneof("kind")
    if not request.HasField("structured_output") or (kind == "json_object" and not asked.json_object):
        return None
    if model.tokenizer_file is None or model.grammar_end is None:
        missing = "end-of-sequence token" if model.tokenizer_file else "tokenizer.json"
        raise UnsupportedField(f"{model.name} has no {missing}, so its output can't follow a grammar; leave it out")
    match kind:
        case "json_schema" | "json_object":
            text = _json(asked.json_schema if kind == "json_schema" else '{"type":"object"}', compact=asked.compact)
            return _made("json_schema", text, request, model.grammar_end)
        case "regex":
            return _made("regex", asked.regex, request, model.grammar_end)
        case "choice":
            return _made("lark", _choice(list(asked.choice.texts)), request, model.grammar_end)
        case "grammar":
            return _made("lark", asked.grammar, request, model.grammar_end)
        case _:
            raise InvalidGrammar("structured_output is empty; it needs a schema, a regex, a choice or a grammar")


def _made(kind: Any, text: str, request: pb.GenerateRequest, end: int) -> Grammar:
    if not 0 < len(text) <= MAX_GRAMMAR:
        raise InvalidGrammar(f"the grammar has {len(text)} characters; it must have 1 to {MAX_GRAMMAR}")
    return Grammar(kind, text, end, request.ignore_eos)


def _json(text: str, *, compact: bool) -> str:
    """Return a schema as it is compiled."""
    if len(text) > MAX_GRAMMAR:
        return text  # refused by its size, before it is parsed
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any] | bool)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGrammar(f"the schema must be a JSON object, or true: {error}") from None
    if not compact:
        return text
    members = {"anyOf": [schema]} if isinstance(schema, bool) else schema
    given: Any = members.get("x-guidance")
    options: dict[str, Any] = {**given} if isinstance(given, dict) else {}
    return json.dumps(members | {"x-guidance": options | {"whitespace_flexible": False}}, ensure_ascii=False)


def _choice(texts: list[str]) -> str:
    """Return the choices as a grammar in Lark, whose strings are those of JSON."""
    if not all(texts):
        raise InvalidGrammar("one of the choices is empty; an output needs at least one character")
    if not texts:
        raise InvalidGrammar("there are no choices; give at least one")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
