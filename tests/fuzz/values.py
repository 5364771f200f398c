"""Values at the edges of every type, and a few that are of no type."""

import random
import string
from collections.abc import Callable
from typing import Any

INTEGERS = (
    0, 1, -1, 2, 7, 16, 255, 256, 999, 1_000, 1_001, 4_095, 4_096, 4_097, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31),
    2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 0.5, 1.0, 1.0000001, 2.0, -2.0, -0.1, 1e-308, 5e-324, 1e308, -1e308, 3.4e38, 3.5e38, 1e-45,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
STRINGS = (
    "", " ", "\0", "a", "</s>", "<s>", "\ufffd", "é", "e\u0301", "漢字", "👩‍👩‍👧‍👦", "\u202e", "\ud800", "\udfff\ud800",
    "null", "true", "NaN", "-1", "1e999", "../../etc/passwd", "%s%n%x", "{{ 7 * 7 }}", "{% for x in y %}", "'; --",
    "\r\nX-Injected: 1", "bonfan korles dimin taras", "user", "assistant", "system", "tool", "developer", "text",
    "json_object", "json_schema", "auto", "required", "none", "function", "$ref", "[DONE]", "data: x\n\n",
)  # fmt: skip


def integer(rng: random.Random) -> int:
    return rng.choice(INTEGERS) if rng.random() < 0.7 else rng.randrange(-(2**66), 2**66) >> rng.randrange(66)


def real(rng: random.Random) -> float:
    return rng.choice(FLOATS) if rng.random() < 0.7 else rng.uniform(-3, 3) * 10 ** rng.randrange(-5, 6)


def text(rng: random.Random, longest: int = 4_000) -> str:
    """A string: of the list, printable, or of any code points, surrogates included."""
    match rng.randrange(6):
        case 0 | 1:
            return rng.choice(STRINGS)
        case 2:
            return "".join(rng.choices(string.printable, k=rng.randrange(40)))
        case 3:
            return "".join(chr(rng.randrange(0x11_0000)) for _ in range(rng.randrange(12)))
        case 4:
            return rng.choice(STRINGS) * rng.randrange(50)
        case _:
            return rng.choice(["a", "ba ", "é", "\0", "👍"]) * rng.randrange(longest)


def data(rng: random.Random, longest: int = 4_000) -> bytes:
    match rng.randrange(4):
        case 0:
            return rng.choice([b"", b"\0", b"\xff", b"\xc1", b"\x80" * 16, b"k" * 16, b"k" * 15, b"{}", b"null"])
        case 1:
            return rng.randbytes(16)
        case 2:
            return rng.randbytes(rng.randrange(200))
        case _:
            return rng.randbytes(rng.randrange(longest))


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON or MessagePack has, nested a few levels."""
    scalars: list[Callable[[], Any]] = [
        lambda: None, lambda: True, lambda: False, lambda: integer(rng), lambda: real(rng), lambda: text(rng, 400),
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.35:
        if rng.random() < 0.5:
            return [anything(rng, depth + 1) for _ in range(rng.randrange(5))]
        return {text(rng, 20): anything(rng, depth + 1) for _ in range(rng.randrange(5))}
    return rng.choice(scalars)()


def damaged(rng: random.Random, whole: bytes) -> bytes:
    """Bytes with some changed, cut out, repeated or put in."""
    changed = bytearray(whole)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice([0, 0x7F, 0x80, 0xC1, 0xFF])
            case 2:
                del changed[at : at + rng.randrange(1, 20)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randrange(1, 20))
            case _:
                end = at + rng.randrange(1, 40)
                changed[at:at] = changed[at:end]
    return bytes(changed)
