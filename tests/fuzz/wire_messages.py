"""Internal messages, read off their types: valid ones, ones at the edges, and ones that break a type or a bound."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

import msgspec
import msgspec.inspect as mi

from baton.messages import KEY_BYTES, Envelope
from tests.fuzz import values

Hints = Mapping[str, Sequence[Any]]
"""By a field's name: values that mean something to the receiver, such as requests that it has."""

_HINTED = 0.75  # of the fields with hints have one of them
_COUNTS = (0, 1, 2, 3, 5, 15, 16, 17, 100, 1_023, 1_024, 1_025, 2**31, 2**32, 2**53, 2**63 - 1)
_TEXTS = (
    "",
    "a",
    "x" * 128,
    "tcp://127.0.0.1:1",
    "tcp://",
    "udp://x",
    "inproc://x",
    "unix:/x",
    "127.0.0.1:1",
    "a\0b",
    "é",
)


def kinds(union: Any) -> tuple[type[Any], ...]:
    """The classes of a union of messages."""
    return get_args(union) or (union,)


@cache
def _info(kind: type[Any]) -> mi.Type:
    return mi.type_info(kind)


def valid(rng: random.Random, kind: type[Any], hints: Hints) -> Any:
    """A message of that kind within all its bounds."""
    return _of(rng, _info(kind), hints, "")


def encoded(rng: random.Random, union: Any, hints: Hints, envelope: tuple[str, str, int] | None = None) -> bytes:
    """The bytes of a message of that union, valid or not; within an envelope of (sender, addressee, sequence)."""
    tree = msgspec.to_builtins(valid(rng, rng.choice(kinds(union)), hints), builtin_types=(bytes,))
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        tree = _broken(rng, tree)
    body: Any = tree if envelope is None else [*envelope, tree]
    if envelope is not None and rng.random() < 0.03:
        body = _broken(rng, body)
    raw = _packed(body)
    return values.damaged(rng, raw) if rng.random() < 0.05 else raw


def sealed(sender: str, addressee: str, sequence: int, message: Any) -> bytes:
    return msgspec.msgpack.encode(Envelope(sender, addressee, sequence, message))


def _packed(tree: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError, ValueError):  # MessagePack has no such number or text
        return b"\x81\xa4type" + b"\xc1"


def _of(rng: random.Random, info: mi.Type, hints: Hints, name: str) -> Any:
    if (known := hints.get(name)) and rng.random() < _HINTED:
        return rng.choice(known)
    match info:
        case mi.StructType():
            fields = {
                field.name: _of(rng, field.type, hints, field.name)
                for field in info.fields
                if field.required or field.name in hints or rng.random() < 0.5
            }
            return info.cls(**fields)
        case mi.IntType(ge=low, gt=above, le=high):
            bottom = low if low is not None else above + 1 if above is not None else -(2**31)
            top = high if high is not None else 2**63 - 1
            return min(max(rng.choice(_COUNTS) if rng.random() < 0.8 else values.integer(rng), bottom), top)
        case mi.FloatType(ge=low, gt=above, le=high):
            bottom = low if low is not None else above if above is not None else -1e30
            drawn = min(max(abs(values.real(rng)), bottom), high if high is not None else 1e30)
            return drawn if drawn == drawn and (above is None or drawn > above) else bottom + 0.5
        case mi.StrType(pattern=str()):
            return "".join(rng.choices("0123456789abcdef", k=rng.randrange(1, 17)))
        case mi.StrType(min_length=shortest, max_length=longest):
            text = (
                rng.choice(_TEXTS) if rng.random() < 0.7 else values.text(rng, 300).encode("utf-8", "replace").decode()
            )
            return (text or "x" * (shortest or 0))[: longest or 300]
        case mi.BytesType(min_length=shortest, max_length=longest) if shortest == longest and shortest:
            return rng.choice([b"k" * shortest, rng.randbytes(shortest)])
        case mi.BytesType(min_length=shortest, max_length=longest):
            data = rng.randbytes(rng.choice([0, 1, 4, 16, 16 * 5, 64, 15, 17, 16 * 64]))
            return data.ljust(shortest or 0, b"\0")[: longest or 10_000]
        case mi.BoolType():
            return rng.random() < 0.5
        case mi.NoneType():
            return None
        case mi.LiteralType(values=several):
            return rng.choice(sorted(several, key=str))
        case mi.UnionType(types=types):
            return _of(rng, rng.choice(types), hints, name)
        case mi.VarTupleType(item_type=item, max_length=longest):
            count = min(rng.choice([0, 1, 1, 2, 3, 30]), longest if longest is not None else 30)
            return tuple(_of(rng, item, hints, name) for _ in range(count))
        case mi.TupleType(item_types=items):
            return tuple(_of(rng, item, hints, name) for item in items)
        case _:
            raise TypeError(f"no value for {info}")


def _broken(rng: random.Random, tree: Any) -> Any:
    """The same tree with one node that is of another type, missing, or beyond its bounds."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        name = rng.choice(list(tree))
        match rng.randrange(5):
            case 0:
                return {key: each for key, each in tree.items() if key != name}
            case 1:
                return {**tree, values.text(rng, 10).encode("utf-8", "replace").decode(): _node(rng)}
            case _:
                return {**tree, name: _broken(rng, tree[name])}
    if isinstance(tree, list | tuple) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        return [*tree[:at], _broken(rng, tree[at]), *tree[at + 1 :]] if rng.random() < 0.8 else list(tree[:at])
    if isinstance(tree, bytes) and rng.random() < 0.5:
        return tree[: rng.randrange(len(tree) + 1)] if rng.random() < 0.5 else tree * rng.choice([2, 100])
    return _node(rng)


def _node(rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0:
            return values.data(rng, 2_000)
        case 1:
            nested: Any = []
            for _ in range(rng.choice([3, 400])):
                nested = [nested]
            return nested
        case 2:
            return min(max(values.integer(rng), -(2**63)), 2**64 - 1)
        case 3:
            return values.real(rng)
        case 4:
            return "x" * rng.choice([0, 129, 5_000])
        case 5:
            return b"k" * rng.choice([0, KEY_BYTES - 1, KEY_BYTES, KEY_BYTES * 1_025])
        case 6:
            return {"type": rng.choice(["Hello", "Tokens", "x", ""])}
        case _:
            return rng.choice([None, True, [], {}])
