"""Python literals as JSON, as they come: strings, numbers, True, False, None, lists, tuples and dictionaries.

`ast.literal_eval` needs the whole literal, limits its depth and warns about escapes. A value that is no literal becomes
a JSON string where that is possible, because a client can tell more from it than from nothing.
"""

# pyright: strict

from __future__ import annotations

import json
import math
import re

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"""[^\s,:\[\](){}"']*""")
_PLAIN = re.compile(r"""[^\\"']*""")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_OPENERS = {"[": ("]", "[", "]"), "(": (")", "[", "]"), "{": ("}", "{", "}")}
_PREFIXES = frozenset({"r", "b", "u", "f", "rb", "br", "fr", "rf"})
_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonValue:
    """One argument of a call. It ends before a comma or a closing parenthesis that is not its own."""

    def __init__(self) -> None:
        self.done = False
        self.bad = False
        self._closers: list[tuple[str, str]] = []  # Python's and JSON's
        self._said: list[str] = []
        self._comma = self._any = False
        self._word: list[str] = []
        self._string: _String | None = None

    def take(self) -> str:
        """Return the JSON that has come since the last time."""
        taken = "".join(self._said)
        self._said.clear()
        return taken

    def scan(self, text: str, at: int) -> int:
        """Read on; returns the position up to which the value goes."""
        while at < len(text) and not self.done and not self.bad:
            at = self._in_string(text, at) if self._string is not None else self._outside(text, at)
        return at

    def finish(self) -> None:
        """End a value that was cut."""
        self._end_word()

    def _outside(self, text: str, at: int) -> int:
        word = _match(_WORD, text, at)
        if word:
            self._word.append(word)
            return at + len(word)
        character = text[at]
        if character in "\"'":
            raw = False
            if (prefix := "".join(self._word).lower()) in _PREFIXES:
                self._word.clear()
                raw = "r" in prefix
            self._end_word()
            self._begin()
            self._said.append('"')
            self._string = _String(character, raw=raw)
            return at + 1
        self._end_word()
        if character in _OPENERS:
            closer, opened, closed = _OPENERS[character]
            self._begin()
            self._said.append(opened)
            self._closers.append((closer, closed))
        elif self._closers and character == self._closers[-1][0]:
            self._comma = False
            self._said.append(self._closers.pop()[1])
        elif not self._closers and character in ",)":
            self.done = True
            if not self._any:
                self._said.append("null")
            return at
        elif character == ",":
            self._comma = True
        elif character == ":" and self._closers:
            self._said.append(": ")
        elif character.isspace():
            return at + len(_match(_SPACE, text, at))
        else:
            self.bad = True
            return at
        return at + 1

    def _begin(self) -> None:
        """Write the comma before a value: Python allows one before a closing bracket, too."""
        self._any = True
        if self._comma:
            self._said.append(", ")
            self._comma = False

    def _end_word(self) -> None:
        if not self._word:
            return
        word = "".join(self._word)
        self._word.clear()
        self._begin()
        self._said.append(_json_of(word))

    def _in_string(self, text: str, at: int) -> int:
        assert self._string is not None
        end = self._string.scan(text, at)
        self._said.append(self._string.take())
        if self._string.done:
            self._said.append('"')
            self._string = None
        return end


class _String:
    """One string literal, after its first quotation mark."""

    def __init__(self, quote: str, *, raw: bool) -> None:
        self.done = False
        self._quote = quote
        self._raw = raw
        self._quotes = 1  # in a row
        self._triple: bool | None = None  # not known before the third character
        self._escape = ""
        self._said: list[str] = []

    def take(self) -> str:
        taken = "".join(self._said)
        self._said.clear()
        return taken

    def scan(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        character = text[at]
        if self._escape:
            self._escaped(character)
            return at + 1
        if self._triple is None and not self._opened(character):
            return at + 1 if character == self._quote else at
        if character == self._quote:
            self._quotes += 1
            self.done = not self._triple or self._quotes == 3
            return at + 1
        self._keep_quotes()
        if character == "\\":
            self._escape = "\\"
            return at + 1
        if character in "\"'":
            self._say(character)
            return at + 1
        plain = _match(_PLAIN, text, at)
        self._say(plain)
        return at + len(plain)

    def _opened(self, character: str) -> bool:
        """Whether the literal has been opened, with one mark or with three."""
        if character == self._quote and self._quotes < 3:
            self._quotes += 1
            if self._quotes == 3:
                self._triple, self._quotes = True, 0
            return False
        if self._quotes == 2:  # an empty one
            self.done = True
            return False
        self._triple, self._quotes = False, 0
        return True

    def _keep_quotes(self) -> None:
        """Fewer marks than three end nothing in a literal with three."""
        self._say(self._quote * self._quotes)
        self._quotes = 0

    def _escaped(self, character: str) -> None:
        if self._raw:
            self._say(self._escape + character)
            self._escape = ""
            return
        self._escape += character
        kind = self._escape[1]
        if kind in _ESCAPES:
            self._say(_ESCAPES[kind])
            self._escape = ""
        elif kind in _DIGITS:
            if len(self._escape) == 2 + _DIGITS[kind]:
                self._say(_of_digits(self._escape))
                self._escape = ""
        else:
            self._say(self._escape)
            self._escape = ""

    def _say(self, text: str) -> None:
        if text:
            self._said.append(json.dumps(text, ensure_ascii=False)[1:-1])


def _of_digits(escape: str) -> str:
    try:
        character = chr(int(escape[2:], 16))
    except (ValueError, OverflowError):
        return escape
    # Half of a pair is no text that can be sent.
    return escape if 0xD800 <= ord(character) < 0xE000 else character


def _json_of(word: str) -> str:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return json.dumps(number) if math.isfinite(number) else json.dumps(word)


def _match(pattern: re.Pattern[str], text: str, at: int) -> str:
    found = pattern.match(text, at)
    assert found is not None  # it matches the empty text
    return found[0]
