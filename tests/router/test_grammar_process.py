"""Faults of JSON schemas: cases of JSON-Schema-Test-Suite (MIT, see `json_schema_cases.jsonl`), each of which compiles
exactly or has a fault with a path, and schemas with a part that no output can complete.
"""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.errors import InvalidGrammar
from baton.grammars import matcher_of
from baton.messages import Grammar
from router.frontend.grammar_process import check_ends, faults_of

_, *CASES = [json.loads(line) for line in (Path(__file__).parent / "json_schema_cases.jsonl").read_text().splitlines()]
TOKENIZER = LLTokenizer("byte")
END = TOKENIZER.eos_token
CLOSERS = frozenset(b'"]}')
_OUTPUTS, _MOST = 12, 300
INTEGER = {"type": "integer"}
LOOP = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/loop"}}


def compiled(schema: Any) -> LLMatcher:
    whole = {"anyOf": [schema]} if isinstance(schema, bool) else schema
    text = json.dumps(whole | {"x-guidance": {"whitespace_flexible": False}})
    return matcher_of(TOKENIZER, Grammar("json_schema", text, END))


def output_of(matcher: LLMatcher, rng: random.Random) -> bytes | None:
    """Walk along the masks. Returns None for an output that becomes too long."""
    output = bytearray()
    while len(output) < _MOST:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(mask[:256])]
        if mask[END] and (not allowed or rng.random() < 0.5):
            return bytes(output)
        closing = [token for token in allowed if token in CLOSERS]
        output.append(rng.choice(closing if closing and rng.random() < 0.4 else allowed))
        assert matcher.consume_token(output[-1])
    return None


def accepts(matcher: LLMatcher, value: Any) -> bool:
    tokens = [*json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_answers_validate_and_faults_have_a_path(case: dict[str, Any]) -> None:
    schema = case["schema"]
    try:
        matcher = compiled(schema)
    except InvalidGrammar:
        faults = faults_of(schema)
        path = next(iter(faults.left_out | faults.others))
        part: Any = schema
        for step in path.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            part = part[int(key)] if isinstance(part, list) else part[key]
        if not faults.others:  # the schema without its faults accepts whatever this one does
            loose = compiled(faults.schema)
            fits = [value for value in case["valid"] if accepts(loose.deep_copy(), value)]
            assert len(fits) >= len(case["valid"]) // 2, (faults.schema, case["valid"])
        return
    check = jsonschema.Draft202012Validator(schema)
    outputs = [output_of(matcher.deep_copy(), random.Random(seed)) for seed in range(_OUTPUTS)]
    whole = [output for output in outputs if output is not None]
    assert whole
    for output in whole:
        check.validate(json.loads(output.decode(errors="replace")))
    assert [value for value in case["invalid"] if accepts(matcher.deep_copy(), value)] == []


def declared(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "patternProperties": {pattern: {}}} | more


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (declared("^(a|b)$", additionalProperties=False), "#: patternProperties"),
        (declared("^a$", additionalProperties=False, required=["a"]), "#: patternProperties"),
        ({"type": "array", "items": declared("^a$", additionalProperties=False)}, "#/items: patternProperties"),
        (
            {"type": "object", "properties": {'é"/': {}}, "patternProperties": {'^é"/$': {}}}
            | {"additionalProperties": False},
            "#: patternProperties",
        ),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#: it needs itself"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, "#: it needs itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": LOOP}}, "#/\\$defs/loop"),
        ({"anyOf": [{"$ref": "#/anyOf/1"}, {"allOf": [{"$ref": "#"}]}]}, "needs itself"),
        ({"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 2}, "#: it needs itself"),
        (
            {"type": "object", "properties": {"a/b~": {"$ref": "#/properties/a~1b~0"}}, "required": ["a/b~"]},
            "needs itself",
        ),
        (
            {"$defs": {"t": {"$id": "x", "type": "array", "items": {"$ref": "#"}, "minItems": 1}}},
            "#/\\$defs/t: it needs itself",
        ),
    ],
)  # fmt: skip
def test_a_part_without_an_end_is_named(schema: Any, says: str) -> None:
    with pytest.raises(InvalidGrammar, match=says):
        check_ends(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True, False, {}, declared("^a$"), declared("^a", additionalProperties=False),
        declared("^(a|c)$", additionalProperties=False), declared("^c$", additionalProperties=False),
        {"type": "object", "patternProperties": {"^a$": INTEGER}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"a": {"enum": []}, "b": False}},
        {"$defs": {"t": {"$id": "x", "type": "array", "items": {"$ref": "#/$defs"}, "minItems": 1, "$defs": {}}}},
        {"$ref": "https://example.com/other"},
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_whose_parts_end_is_taken(schema: Any) -> None:
    check_ends(schema)
