"""JSON as it comes: where a value ends, and what a text means."""

# pyright: strict

from __future__ import annotations

import json
import re
from enum import Enum

_PLAIN = re.compile(r'[^"\\]*')
_BARE = re.compile(r"[\w+\-.]*")
_BETWEEN = re.compile(r"[\w\s+\-.,:]*")
_CLOSERS = {"{": "}", "[": "]"}


class Verdict(Enum):
    """How far a value has come."""

    READING = "reading"
    DONE = "done"
    BAD = "no such value"


class JsonValue:
    """Finds the end of one JSON value. It checks brackets and strings, and not every detail between them."""

    def __init__(self, begun: str = "") -> None:
        """`begun`: the beginning of the value."""
        self.verdict = Verdict.READING
        self._closers: list[str] = []
        self._in_string = self._escaped = self._bare = False
        self.scan(begun, 0)

    def scan(self, text: str, at: int) -> int:
        """Read on. Return the position up to which the value goes, or of what can't be part of it."""
        while at < len(text) and self.verdict is Verdict.READING:
            if self._in_string:
                at = self._string(text, at)
            elif self._bare:
                at = _end(_BARE, text, at)
                self.verdict = Verdict.DONE if at < len(text) else Verdict.READING
            else:
                at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        self._escaped = text[at] == "\\"
        if not self._escaped:
            self._in_string = False
            self._close_if_whole()
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        if self._closers:
            at = _end(_BETWEEN, text, at)
            if at == len(text):
                return at
        match text[at]:
            case '"':
                self._in_string = True
            case "{" | "[" as opener:
                self._closers.append(_CLOSERS[opener])
            case "}" | "]" as closer if self._closers and closer == self._closers[-1]:
                self._closers.pop()
                self._close_if_whole()
            case other:
                if self._closers or not _BARE.fullmatch(other):
                    self.verdict = Verdict.BAD
                    return at
                self._bare = True
        return at + 1

    def _close_if_whole(self) -> None:
        if not self._closers:
            self.verdict = Verdict.DONE


def decoded(raw: str) -> object:
    """Return the value of a JSON text; an Ellipsis for one that is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return ...


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None  # it matches the empty text
    return match.end()
