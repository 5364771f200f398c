"""JSON as hostile clients write it: what is no JSON, keys twice, numbers of any size, broken encodings."""

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.fuzz import values


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in the text as they are."""

    text: bytes


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may come twice."""

    pairs: tuple[tuple[str, Any], ...]


RAW = (
    b"NaN", b"-Infinity", b"1e999", b"-1e999", b"1" * 5_000, b"0x10", b"01", b"1.", b".5", b"+1", b"nul", b"'x'",
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u12"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\x00"', b'"\\x"', b"", b",",
    b"[", b"}", b"[" * 200 + b"]" * 200, b"[" * 50_000, b'{"a":' * 2_000 + b"1" + b"}" * 2_000, b"-", b"1e-999999",
    b"// c\n1", b"/* c */1", b"1" + b"0" * 400 + b".0", b"undefined",
)  # fmt: skip


def encode(value: Any) -> bytes:
    """Write a value; lone surrogates as escapes, NaN and infinities as JavaScript has them."""
    match value:
        case Raw(text=text):
            return text
        case Pairs(pairs=pairs):
            return b"{" + b",".join(json.dumps(key).encode() + b":" + encode(each) for key, each in pairs) + b"}"
        case dict():
            return encode(Pairs(tuple((str(key), each) for key, each in value.items())))
        case list() | tuple():
            return b"[" + b",".join(map(encode, value)) + b"]"
        case _:
            return json.dumps(value).encode()


def odd(rng: random.Random) -> Any:
    """A value that some field does not expect."""
    return Raw(rng.choice(RAW)) if rng.random() < 0.2 else values.anything(rng)


class Schema:
    """Draws bodies by an OpenAPI document, so that fields that come later are fuzzed as well."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components: dict[str, Any] = document.get("components", {}).get("schemas", {})
        self.paths: dict[str, Any] = document["paths"]

    def body_of(self, path: str) -> dict[str, Any] | None:
        """The schema of a path's JSON body, with its properties; none: it takes no such body."""
        content = self.paths[path].get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        return self._resolved(content["schema"]) if content else None

    def value(self, rng: random.Random, schema: Any, depth: int = 0) -> Any:
        """A value of that schema, if it is one that says much; at its edges."""
        if not isinstance(schema, dict) or not schema or depth > 4:
            return values.anything(rng, 2)
        schema = self._resolved(schema)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.value(rng, rng.choice(schema[several]), depth + 1)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        match kind:
            case "integer":
                return values.integer(rng)
            case "number":
                return values.real(rng)
            case "string":
                return values.text(rng)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "array":
                return [self.value(rng, schema.get("items"), depth + 1) for _ in range(_length(rng))]
            case "object":
                return self._object(rng, schema, depth)
            case _:
                return values.anything(rng, 2)

    def _object(self, rng: random.Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        known: dict[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        result = {
            name: self.value(rng, each, depth + 1)
            for name, each in known.items()
            if name in required or rng.random() < 0.2
        }
        if not known:
            result |= {values.text(rng, 10): values.anything(rng, 2) for _ in range(rng.randrange(4))}
        return result

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        return schema


def _length(rng: random.Random) -> int:
    return rng.choice([0, 1, 1, 2, 3, 17, 200]) if rng.random() < 0.9 else 3_000


def mutated(rng: random.Random, base: dict[str, Any], schema: Schema, body: dict[str, Any]) -> Any:
    """A valid body with one to four fields that are not, or that contradict each other."""
    fields = dict(base)
    known: dict[str, Any] = body.get("properties", {})
    doubled: list[tuple[str, Any]] = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 4])):
        name = rng.choice(list(known)) if known else values.text(rng, 20)
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                fields[name] = schema.value(rng, known.get(name))
            case 4 | 5:
                fields[name] = odd(rng)
            case 6:
                doubled.append((name, schema.value(rng, known.get(name))))
            case _:
                fields.pop(rng.choice([*fields, name]), None)
    if rng.random() < 0.05:
        fields[values.text(rng, 200)] = odd(rng)
    if rng.random() < 0.02:
        return odd(rng)
    return Pairs((*fields.items(), *doubled)) if doubled else fields
