"""`baton pin`: pin the prefixes of a file, one after the other. An error in one does not stop the others.

A file holds one prefix per line, as JSON: {"text": …} or {"token_ids": […]}, optionally with "id" and "ttl". Only
requests of its "tenant", with its "cache_salt", find it. A file with the extension .txt is one prefix as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client import Client, PinOptions
from baton.errors import BatonError, InvalidRequest
from baton.v1 import cache_pb2 as pb

STDIN = "-"
_UNITS_MS = {"": 1_000, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", re.IGNORECASE)
_FIELDS = {"text", "token_ids", "id", "ttl", "tenant", "cache_salt"}


@dataclass(frozen=True)
class PinOutcome:
    """The outcome of one prefix. `line` counts from 1."""

    line: int
    pinned: pb.PinPrefixResponse | None = None
    error: BatonError | None = None

    def as_json(self) -> dict[str, Any]:
        if self.pinned is None:
            assert self.error is not None
            return {"line": self.line, "error": {"reason": self.error.reason, "message": str(self.error)}}
        counts = {field.name: value for field, value in self.pinned.ListFields() if field.name.startswith("tokens_")}
        return {"line": self.line, **pin_as_json(self.pinned.pin), **counts}


def pin_as_json(pin: pb.Pin) -> dict[str, Any]:
    return {
        "id": pin.id,
        "tenant": pin.tenant,
        "node": pin.node,
        "tokens": pin.tokens,
        "pages": pin.pages,
        "bytes": pin.bytes,
        "expires_in_ms": pin.expires_in_ms,
    }


def parse_duration_ms(text: str) -> int:
    """Parse `90s`, `15m`, `1.5h`, `2d`, or a number of seconds. Raises InvalidRequest."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is no duration; write seconds, or a number with ms, s, m, h or d such as 1h")
    return int(float(match[1]) * _UNITS_MS[match[2].lower()])


def read(source: str, stdin: str = "") -> list[tuple[int, str]]:
    """Return the prefixes of a file, or of `stdin` for "-": each as unparsed JSON, with its line number.

    Raises InvalidRequest if the file can't be read or holds none.
    """
    try:
        text = stdin if source == STDIN else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"can't read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{source} is not UTF-8 text") from None
    if Path(source).suffix == ".txt":
        lines = [(1, json.dumps({"text": text}))] if text else []
    else:  # not splitlines(): JSON strings may hold other line separators, such as U+2028
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{source} holds no prefix; write one JSON object per line, such as " + '{"text": "…"}')
    return lines


def parse(line: str, ttl_ms: int | None, tenant: str = "") -> tuple[str | list[int], PinOptions]:
    """Parse one prefix: its text or token ids, and how to pin it. Raises InvalidRequest.

    `ttl_ms` applies if the line has no "ttl"; None: the router's default. `tenant` applies if the line has no "tenant".
    """
    try:
        given: object = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f'{type(given).__name__} is no prefix; write an object, such as {{"text": "…"}}')
    if unknown := sorted(set(given) - _FIELDS):
        raise InvalidRequest(
            f"unknown field {unknown[0]!r}; a prefix has text or token_ids, id, ttl, tenant, cache_salt"
        )
    if ("text" in given) == ("token_ids" in given):
        raise InvalidRequest("give either text or token_ids")
    field, kind = ("text", str) if "text" in given else ("token_ids", list)
    prompt: Any = given[field]
    if not isinstance(prompt, kind):
        raise InvalidRequest(f"{field} can't be sent: it is a {type(prompt).__name__}")
    return prompt, {
        "ttl_ms": parse_duration_ms(str(given["ttl"])) if "ttl" in given else ttl_ms,
        "id": given.get("id", ""),
        "tenant": given.get("tenant", tenant),
        "cache_salt": given.get("cache_salt", ""),
    }


def pin_prefixes(
    client: Client, lines: list[tuple[int, str]], ttl_ms: int | None, timeout: float | None = None, tenant: str = ""
) -> Iterator[PinOutcome]:
    """Pin the prefixes in order, one at a time, so that they hardly delay requests.

    `timeout` is the time limit of each, in seconds.
    """
    for number, line in lines:
        try:
            prompt, options = parse(line, ttl_ms, tenant)
            yield PinOutcome(number, pinned=client.pin_prefix(prompt, timeout=timeout, **options))
        except BatonError as error:
            yield PinOutcome(number, error=error)
