"""Schemas with a part that no output can complete."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidGrammar
from router.frontend.grammar_process import check_ends

INTEGER = {"type": "integer"}
LOOP = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/loop"}}


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
