"""Tool calls that are JSON objects, read as they come: `{"name": "f", "arguments": {…}}`.

A call begins when its name is known and its arguments have begun as an object does. Until then it may turn out to be
none. After that the arguments are passed on as they come. Only their brackets and strings are looked at, because a
client learns more from arguments with a small fault than from a call that is missing.
"""

# pyright: strict

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar, TypeAlias

from router.frontend.chat.text_parser import DeltaWriter, TextParser

SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\]*')
_BARE = re.compile(r"[\w+\-.]*")
_BETWEEN = re.compile(r"[\w\s+\-.,:]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_NAME = 256  # characters
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = frozenset({"arguments", "parameters"})
_USUAL_KEYS = frozenset({"name", "type", "id", "function"}) | _ARGUMENTS


class Verdict(Enum):
    """How far a value has come."""

    READING = "reading"
    DONE = "done"
    BAD = "no such value"


class JsonValue:
    """Finds the end of one JSON value. It checks brackets and strings, and not every detail between them."""

    def __init__(self) -> None:
        self.verdict = Verdict.READING
        self._closers: list[str] = []
        self._in_string = self._escaped = self._bare = False

    def scan(self, text: str, at: int) -> int:
        """Read on; returns the position up to which the value goes, or of what can't be part of it."""
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


Step: TypeAlias = Callable[[str, int], int]


class CallObject:
    """One call as an object. Keys come in any order."""

    def __init__(self, out: DeltaWriter, accepts: Callable[[str], bool], *, usual_keys_only: bool = False) -> None:
        """`accepts`: whether a name may be called. `usual_keys_only`: an object with other keys is no call."""
        self.verdict = Verdict.READING
        self.begun = False
        self._out = out
        self._accepts = accepts
        self._usual_keys_only = usual_keys_only
        self._step: Step = self._open
        self._first = True
        self._key = ""
        self._name: str | None = None
        self._given = False  # whether arguments have come
        self._early: list[str] = []  # arguments that came before the name
        self._value = JsonValue()
        self._parts: list[str] = []  # of the value

    def scan(self, text: str, at: int) -> int:
        """Read on; returns the position up to which the object goes, or of what can't be part of it."""
        while at < len(text) and self.verdict is Verdict.READING:
            at = self._step(text, at)
        return at

    def _bad(self, at: int) -> int:
        self.verdict = Verdict.BAD
        return at

    def _open(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._bad(at)
        self._step = self._before_key
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        at = _end(SPACE, text, at)
        if at == len(text):
            return at
        if text[at] == "}" and self._first:
            return self._bad(at)  # it has no name
        if text[at] != '"':
            return self._bad(at)
        self._first = False
        self._collect(self._key_ends)
        return at

    def _key_ends(self, raw: str) -> None:
        key = decoded(raw)
        if not isinstance(key, str) or (self._usual_keys_only and key not in _USUAL_KEYS):
            self.verdict = Verdict.BAD
            return
        self._key, self._step = key, self._colon

    def _colon(self, text: str, at: int) -> int:
        at = _end(SPACE, text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._bad(at)
        self._step = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        at = _end(SPACE, text, at)
        if at == len(text):
            return at
        if self._key in _ARGUMENTS:
            if self._given:
                return self._bad(at)
            self._given = True
            if text[at] == "{":
                self._parts = ["{"]
                self._step = self._opened
                return at + 1
            self._collect(self._encoded)
        elif self._key == "name":
            self._collect(self._name_ends)
        else:
            self._collect(self._other_ends)
        return at

    def _collect(self, ends: Callable[[str], None]) -> None:
        """Read a whole value, and then call `ends` with its text."""
        self._value, self._parts = JsonValue(), []

        def step(text: str, at: int) -> int:
            end = self._value.scan(text, at)
            self._parts.append(text[at:end])
            if self._value.verdict is Verdict.DONE:
                ends("".join(self._parts))
            elif self._value.verdict is Verdict.BAD:
                self._bad(end)
            return end

        self._step = step

    def _name_ends(self, raw: str) -> None:
        name = decoded(raw)
        if not isinstance(name, str) or self._name is not None or not _is_name(name) or not self._accepts(name):
            self.verdict = Verdict.BAD
            return
        self._name, self._step = name, self._after_value
        if self._early:
            self._begin()

    def _other_ends(self, raw: str) -> None:
        self._step = self._after_value

    def _opened(self, text: str, at: int) -> int:
        """The arguments are an object if a key or the end follows its brace."""
        end = _end(SPACE, text, at)
        self._parts.append(text[at:end])
        if end == len(text):
            return end
        if text[end] not in '"}':
            return self._bad(end)
        self._value = JsonValue()
        self._value.scan("{", 0)
        self._say("".join(self._parts))
        self._step = self._arguments
        return end

    def _arguments(self, text: str, at: int) -> int:
        end = self._value.scan(text, at)
        self._say(text[at:end])
        if self._value.verdict is Verdict.DONE:
            self._step = self._after_value
        elif self._value.verdict is Verdict.BAD:
            return self._bad(end)
        return end

    def _encoded(self, raw: str) -> None:
        """Arguments that are no object: as a text that holds one, or null. Others are passed on as they are."""
        value = decoded(raw)
        inner = decoded(value) if isinstance(value, str) else value
        if isinstance(value, str) and isinstance(inner, dict) and _is_text(value):
            self._say(value)
        else:
            self._say("{}" if inner is None else raw)
        self._step = self._after_value

    def _after_value(self, text: str, at: int) -> int:
        at = _end(SPACE, text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._step = self._before_key
        elif text[at] == "}" and self._name is not None:
            if not self.begun:
                self._say("{}")
            self.verdict = Verdict.DONE
        else:
            return self._bad(at)
        return at + 1

    def _say(self, fragment: str) -> None:
        if self.begun:
            self._out.arguments(fragment)
            return
        self._early.append(fragment)
        if self._name is not None:
            self._begin()

    def _begin(self) -> None:
        assert self._name is not None
        self.begun = True
        self._out.begin_call(self._name)
        self._out.arguments("".join(self._early))


class ObjectCalls(TextParser):
    """A parser whose calls are objects. `_raw` holds what was read of a call that has not begun."""

    usual_keys_only: ClassVar[bool] = False

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        super().__init__(out, tools)
        self._call = self._new_call()

    def _accepts(self, name: str) -> bool:
        return True

    def _new_call(self) -> CallObject:
        return CallObject(self._out, self._accepts, usual_keys_only=self.usual_keys_only)

    def _expect_object(self) -> None:
        self._call, self._state = self._new_call(), self._object

    def _object(self, text: str, at: int) -> int:
        end = self._call.scan(text, at)
        self._raw.append(text[at:end])
        if self._call.begun:
            self._raw.clear()
        if self._call.verdict is Verdict.BAD:
            self._give_up(self._content)
        elif self._call.verdict is Verdict.DONE:
            self._state = self._after_object
        return end

    def _after_object(self, text: str, at: int) -> int:
        raise NotImplementedError


def skip_space(text: str, at: int) -> int:
    """The position after the whitespace that begins at a position."""
    return _end(SPACE, text, at)


def decoded(raw: str) -> object:
    """The value of a JSON text; an Ellipsis for one that is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return ...


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _MOST_NAME and name.isprintable()


def _is_text(value: str) -> bool:
    """Whether it can be sent: half of a surrogate pair can't."""
    return not _SURROGATE.search(value)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # it matches the empty text
    return found.end()
