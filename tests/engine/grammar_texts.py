"""Random JSON schemas and regular expressions, and whether a text matches one."""

import json
import random
import re
from typing import Any

import jsonschema

from baton.messages import Grammar
from tests.support.checkpoints import EOS

_WORDS = ["id", "name", "price", "tags", "état", 'quo"te', "a b", "x"]
_FORMATS = ["date", "time", "ipv4", "uuid"]
_PATTERNS = ["^[a-c]{1,4}$", "^x-[0-9]+$", "^(ab|cd)*$", "[A-F]{2}"]
_CLASSES = ["[a-c]", "[^x-z]", r"\d", "[A-F0-9]", ".", r"\.", "é", "[あ-お]", " ", "q"]


def random_grammar(seed: int) -> Grammar:
    """Return a schema for three of four seeds, and a regular expression for the others."""
    rng = random.Random(seed)
    if seed % 4 == 3:
        return Grammar("regex", _regex(rng, 3), EOS)
    schema = _schema(rng, 3)
    if "properties" in schema and rng.random() < 0.3:  # a definition that refers to itself
        schema |= {"$defs": {"list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}}}
        schema["properties"]["linked"] = {"$ref": "#/$defs/list"}
        schema["$defs"]["list"]["additionalProperties"] = False
    return json_grammar(schema, compact=rng.random() < 0.9)


def json_grammar(schema: dict[str, Any], *, compact: bool = True) -> Grammar:
    options = {"x-guidance": {"whitespace_flexible": False}} if compact else {}
    return Grammar("json_schema", json.dumps(schema | options), EOS)


def assert_matches(grammar: Grammar, text: str) -> None:
    """Raise unless an independent library says that the whole text matches."""
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text) is not None, (grammar.text, text)
        return
    schema = json.loads(grammar.text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_integer, _number, _string, _enum, lambda rng: {"type": rng.choice(["boolean", "null"])}]
    if depth == 0:
        return rng.choice(leaves)(rng)
    match rng.randrange(6):
        case 0 | 1 | 2:
            names = rng.sample(_WORDS, rng.randint(1, 4))
            schema = {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}}
            extra: Any = rng.choice([False] * 4 + [{"type": "boolean"}])
            return schema | {"required": names[: rng.randint(0, len(names))], "additionalProperties": extra}
        case 3:
            low = rng.randint(0, 2)
            schema = {"type": "array", "items": _schema(rng, depth - 1)}
            return schema | {"minItems": low, "maxItems": low + rng.randint(0, 3)}
        case 4:
            return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case _:
            return rng.choice(leaves)(rng)


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1_000, 1_000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 7, 1_000, 10**9])}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 99)}


def _string(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case 1:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case _:
            low = rng.randint(0, 5)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _enum(rng: random.Random) -> dict[str, Any]:
    values = rng.sample([*_WORDS, 1, -2.5, True, None, ["a", 1], {"k": "v"}, "\n\t\\", "日本"], rng.randint(1, 4))
    return {"enum": values} if len(values) > 1 else {"const": values[0]}


def _regex(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_CLASSES)
    match rng.randrange(4):
        case 0:
            return "".join(_regex(rng, depth - 1) for _ in range(rng.randint(1, 4)))
        case 1:
            return "(" + "|".join(_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))) + ")"
        case 2:
            low = rng.randint(0, 2)
            return f"(?:{_regex(rng, depth - 1)})" + rng.choice(["?", f"{{{low},{low + rng.randint(1, 3)}}}"])
        case _:
            return _regex(rng, 0) + _regex(rng, depth - 1)
