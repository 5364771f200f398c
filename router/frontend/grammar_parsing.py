"""From a request's `structured_output` to the grammar that decode workers match.

What needs llguidance is checked later, by `grammar_checker`.
"""

# pyright: strict

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import InvalidGrammar, UnsupportedField
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.served_model import ServedModel


def grammar_of(output: Mapping[str, Any] | None, model: ServedModel, *, ignore_eos: bool = False) -> Grammar | None:
    """Return the grammar of a request with this `structured_output`; None without one. Raises InvalidGrammar, and
    UnsupportedField where the checkpoint has no tokenizer or no end of sequence."""
    if output is None or output.get("json_object") is False:
        return None
    if model.tokenizer_file is None or model.grammar_end is None:
        missing = "end-of-sequence token" if model.tokenizer_file else "tokenizer.json"
        raise UnsupportedField(f"{model.name} has no {missing}, so its output can't follow a grammar; leave it out")
    kind: Any = "lark"
    compact = output.get("compact", False)
    match output:
        case {"json_schema": schema}:
            kind, text = "json_schema", _json(schema, model, compact=compact)
        case {"json_object": True}:
            kind, text = "json_schema", _json('{"type":"object"}', model, compact=compact)
        case {"regex": text}:
            kind = "regex"
        case {"choice": choices}:
            text = _choice(choices.get("texts", ()))
        case {"grammar": text}:
            pass
        case _:
            raise InvalidGrammar("structured_output is empty; it needs a schema, a regex, a choice or a grammar")
    if not 0 < len(text) <= MAX_GRAMMAR:
        raise InvalidGrammar(f"the grammar has {len(text)} characters; it must have 1 to {MAX_GRAMMAR}")
    return Grammar(kind, text, model.grammar_end, ignore_eos, output.get("frame", ""))


def _json(text: str, model: ServedModel, *, compact: bool) -> str:
    """Return a schema as it is compiled: with a bound on white space, unless it has its own."""
    if len(text) > MAX_GRAMMAR:
        return text  # refused by its size, before it is parsed
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any] | bool)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGrammar(f"the schema must be a JSON object, or true: {error}") from None
    members = {"anyOf": [schema]} if isinstance(schema, bool) else schema
    return json.dumps(
        bounded(members, 0 if compact else model.json_whitespace, own=not compact),
        ensure_ascii=False,
        separators=(",", ":"),
    )


def bounded(schema: dict[str, Any], spaces: int, *, own: bool = True) -> dict[str, Any]:
    """Return a schema with at most so many characters of white space in one place; `own`: unless it says so itself."""
    guidance: Any = schema.get("x-guidance")
    options: dict[str, Any] = {**guidance} if isinstance(guidance, dict) else {}
    if not own or not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        options |= {"whitespace_pattern": rf"[ \t\r\n]{{1,{spaces}}}"} if spaces else {"whitespace_flexible": False}
    return schema | {"x-guidance": options}


def _choice(texts: Sequence[str]) -> str:
    """Return the choices as a grammar in Lark, whose strings are those of JSON."""
    if not all(texts):
        raise InvalidGrammar("one of the choices is empty; an output needs at least one character")
    if not texts:
        raise InvalidGrammar("there are no choices; give at least one")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
