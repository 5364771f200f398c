"""Text that comes in pieces: which pattern matches first, where a JSON value ends, and the text that one holds.

A pattern is a part of a regular expression: literals, classes of characters (`\\s*`, `[^>]+`), groups of alternatives,
classes with a name, and a look-ahead at its end. A class takes up to 256 characters (white space: 32), all that it
can, and gives none back. So pieces match as their whole does, and the work is proportional to the text.
"""

# pyright: strict

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from typing import Any, TypeAlias

from router.frontend.detokenizer import MARK

MOST, _MOST_SPACE = 256, 32  # characters of a class
_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[swd]"
_RUN = re.compile(rf"(?P<cls>{_CLASS})(?P<times>[*+]?)")
_NAMED = re.compile(rf"\(\?P<(?P<group>\w+)>(?P<cls>{_CLASS})(?P<times>[*+])\)")
_LITERAL = re.compile(r"\\(?P<escaped>[^\w]|[nt])|(?P<plain>[^\\.^$*+?{}\[\]|()])")
_ESCAPED = {"n": "\n", "t": "\t"}
_IN_STRING = re.compile(r'[^"\\]*')
_BARE = re.compile(r"[\w+\-.]*")
_BETWEEN = re.compile(r"[\w\s+\-.,:]*")
_CLOSERS = {"{": "}", "[": "]"}
TEXT_ARGUMENT = "input"
"""The one argument of a tool that takes text: a model writes `{"input": "…"}`, and the client gets the text alone."""
_BEGIN = re.compile(rf'\s*\{{\s*"{TEXT_ARGUMENT}"\s*:\s*"')
_TEXT_RUN = re.compile(r'(?:[^"\\]|\\u(?![dD][89a-bA-B])[0-9a-fA-F]{4}|\\u[dD][89a-bA-B][0-9a-fA-F]{2}'
                  r"\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])*")  # fmt: skip
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\.", re.DOTALL)
_LONGEST_ESCAPE = 12  # characters: a surrogate pair


@dataclass(frozen=True)
class _Atom:
    """A literal, or a class of characters with the least number of them. An empty literal begins a look-ahead."""

    text: str
    least: int | None = None
    group: str = ""

    @property
    def most(self) -> int:
        """The characters that it has at most."""
        return len(self.text) if self.least is None else _MOST_SPACE if self.text == r"\s" else MOST

    def expression(self, number: int) -> str:
        if self.least is None:
            return re.escape(self.text)
        run = f"{self.text}{{{self.least},{self.most}}}+"
        return f"(?P<{self.group}_{number}>{run})" if self.group else f"(?:{run})"


_Sequence: TypeAlias = tuple[_Atom, ...]


@dataclass(frozen=True)
class Hit:
    """A pattern by its number, and the text between two positions that it matches. Without a number, one may begin
    there when more text comes."""

    number: int | None
    start: int
    end: int
    groups: Mapping[str, str]


class _Reader:
    """Reads one pattern as sequences, of which any may match. Raises ValueError."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def read_sequences(self) -> list[_Sequence]:
        alternatives = self._alternatives()
        if self._at < len(self._pattern):
            raise self._wrong()
        return alternatives

    def _wrong(self) -> ValueError:
        return ValueError(f"the pattern {self._pattern!r} is not understood from character {self._at} on")

    def _take(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._at)
        self._at += len(text) if is_next else 0
        return is_next

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        if match := expression.match(self._pattern, self._at):
            self._at = match.end()
        return match

    def _alternatives(self) -> list[_Sequence]:
        alternatives: list[_Sequence] = []
        while True:
            sequences: list[_Sequence] = [()]
            while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
                items = self._item()
                sequences = [before + after for before in sequences for after in items]
            alternatives += sequences
            if not self._take("|"):
                return alternatives

    def _item(self) -> list[_Sequence]:
        look = self._take("(?=")
        if look or self._take("(?:"):
            items = self._alternatives()
            if not self._take(")"):
                raise self._wrong()
            items = [(_Atom(""), *item) for item in items] if look else items
        elif run := self._match(_NAMED) or self._match(_RUN):
            least = {"*": 0}.get(run["times"], 1)
            items = [(_Atom(run["cls"], least, run.groupdict().get("group") or ""),)]
            if not run["times"]:
                raise self._wrong()
        elif one := self._match(_LITERAL):
            items = [(_Atom(_ESCAPED.get(one["escaped"], one["escaped"]) or one["plain"]),)]
        else:
            raise self._wrong()
        return [*items, ()] if self._take("?") else items


class Patterns:
    """Several patterns. Of those that match at one place, the first one counts."""

    def __init__(self, patterns: Sequence[str], special: Collection[str] = ()) -> None:
        """`special`: texts of tokens that count only where a mark stands before them. Raises ValueError."""
        self._sequences: list[_Sequence] = []
        wholes: list[str] = []
        for number, pattern in enumerate(patterns):
            alternatives: list[str] = []
            for sequence in map(_merged, _Reader(pattern).read_sequences()):
                marked = tuple(_marked(atom, special) for atom in sequence)
                alternatives.append(_expression(marked, len(self._sequences)))
                self._sequences.append(marked)
            wholes.append(f"(?P<n_{number}>{'|'.join(alternatives)})")
        self._whole = re.compile("|".join(wholes)) if wholes else None
        self._first = re.compile("|".join(sorted(set[str]().union(*map(_firsts, self._sequences)))) or "(?!)")
        self._longest = max((sum(atom.most for atom in one) for one in self._sequences), default=0)

    @property
    def literals(self) -> str:
        """All literal texts, joined."""
        return "\n".join(atom.text for sequence in self._sequences for atom in sequence if atom.least is None)

    def may_begin(self, text: str, at: int) -> bool:
        """Whether a character from a position on is one that a pattern can begin with."""
        return self._first.search(text, at) is not None

    def find(self, text: str, at: int, *, ended: bool, here: bool = False) -> Hit | None:
        """Return the first match from a position on, or with `here` the one at the position. Unless the text has ended,
        it may be a place where a pattern begins that is not complete."""
        if self._whole is None or not self.may_begin(text, at):
            return None
        match = self._whole.match(text, at) if here else self._whole.search(text, at)
        if not ended:
            last = match.start() if match else len(text) - 1
            firsts = self._first.finditer(text, max(at, len(text) - self._longest))
            for start in (at,) if here else (first.start() for first in firsts):
                if start > last:
                    break
                if any(_may_come(one, text, start) for one in self._sequences):
                    return Hit(None, start, len(text), {})
        if match is None:
            return None
        groups = {name.rpartition("_")[0]: text for name, text in match.groupdict().items() if text is not None}
        assert match.lastgroup is not None
        return Hit(int(match.lastgroup.removeprefix("n_")), match.start(), match.end(), groups)


def _merged(sequence: _Sequence) -> _Sequence:
    """Return a sequence with one atom for each run of literals."""

    def add_atom(sequence: _Sequence, atom: _Atom) -> _Sequence:
        last = sequence[-1] if sequence else None
        if last is None or last.least is not None or atom.least is not None or not last.text or not atom.text:
            return (*sequence, atom)
        return (*sequence[:-1], replace(last, text=last.text + atom.text))

    empty: _Sequence = ()
    return reduce(add_atom, sequence, empty)


def _marked(atom: _Atom, special: Collection[str]) -> _Atom:
    text = atom.text
    if atom.least is None and text:
        for one in special:
            text = text.replace(one, MARK + one)
    return replace(atom, text=text)


def _expression(sequence: _Sequence, number: int) -> str:
    parts = ["(?=" if atom == _Atom("") else atom.expression(number) for atom in sequence]
    return "".join(parts) + ")" * parts.count("(?=")


def _firsts(sequence: _Sequence) -> set[str]:
    """Return expressions for the characters that a sequence can begin with."""
    firsts: set[str] = set()
    for atom in sequence:
        if atom.text:
            firsts.add(re.escape(atom.text[0]) if atom.least is None else atom.text)
            if atom.least != 0:
                break
    return firsts


def _may_come(sequence: _Sequence, text: str, at: int) -> bool:
    """Whether all of the text from a position on is the beginning of a sequence that more text may complete, or
    lengthen."""
    for atom in sequence:
        if at == len(text) and atom.text:
            return True
        if atom.least is None:
            if not text.startswith(atom.text, at):
                return len(text) - at < len(atom.text) and atom.text.startswith(text[at:])
            at += len(atom.text)
        else:
            run = re.match(f"{atom.text}{{0,{atom.most}}}", text[at : at + atom.most])
            assert run is not None  # it matches the empty text
            at += run.end()
            if at == len(text):
                return True
            if run.end() < atom.least:
                return False
    return False


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
        at = _end(_IN_STRING, text, at)
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


class TextArgument:
    """Reads the text out of arguments that come in fragments. Arguments of another form are the text themselves."""

    def __init__(self) -> None:
        self._raw = ""  # what is not yet given out
        self._begun = self._ended = False

    def feed(self, fragment: str) -> str:
        if self._ended:
            return ""
        self._raw += fragment
        if not self._begun:
            begin = _BEGIN.match(self._raw)
            if begin is None:
                return ""
            self._begun, self._raw = True, self._raw[begin.end() :]
        run = _TEXT_RUN.match(self._raw)
        assert run is not None  # it matches the empty text
        text, end = run[0], run.end()
        while end < len(self._raw) and self._raw[end] != '"' and len(self._raw) - end >= _LONGEST_ESCAPE:
            text += self._raw[end]  # no escape that JSON has
            run = _TEXT_RUN.match(self._raw, end + 1)
            assert run is not None
            text, end = text + run[0], run.end()
        self._ended = end < len(self._raw) and self._raw[end] == '"'
        self._raw = self._raw[end:]
        return _unescaped(text)

    def finish(self) -> str:
        """Return what was held back: no more comes."""
        if self._ended:
            return ""
        self._ended = True
        if self._begun:
            return _unescaped(self._raw)
        value: Any = decoded(self._raw or "{}")
        if value == {}:
            return ""
        texts: list[Any] = list(value.values()) if isinstance(value, dict) else []  # pyright: ignore
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._raw


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_meant, text)


def _meant(escape: re.Match[str]) -> str:
    value = decoded(f'"{escape[0]}"')
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else escape[0]
