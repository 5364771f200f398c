"""Patterns in text that comes in pieces: which one matches first, and where one may still begin.

A pattern is a part of a regular expression: literals, classes of characters (`\\s*`, `[^>]+`), groups of alternatives,
classes with a name, and a look-ahead at its end. A class takes up to 256 characters (white space: 32), all that it
can, and gives none back. So pieces match as their whole does, and the work is proportional to the text.
"""

# pyright: strict

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

from router.frontend.detokenizer import MARK

MOST, _MOST_SPACE = 256, 32  # characters of a class
_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[swd]"
_RUN = re.compile(rf"(?P<cls>{_CLASS})(?P<times>[*+]?)")
_NAMED = re.compile(rf"\(\?P<(?P<group>\w+)>(?P<cls>{_CLASS})(?P<times>[*+])\)")
_LITERAL = re.compile(r"\\(?P<escaped>[^\w]|[nt])|(?P<plain>[^\\.^$*+?{}\[\]|()])")
_ESCAPED = {"n": "\n", "t": "\t"}


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

    def read(self) -> list[_Sequence]:
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
            for sequence in map(_merged, _Reader(pattern).read()):
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

    def find(self, text: str, at: int, *, ended: bool, here: bool = False) -> Hit | None:
        """Return the first match from a position on, or with `here` the one at the position. Unless the text has ended,
        it may be a place where a pattern begins that is not complete."""
        if self._whole is None or self._first.search(text, at) is None:  # as nearly always
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

    def add(sequence: _Sequence, atom: _Atom) -> _Sequence:
        last = sequence[-1] if sequence else None
        if last is None or last.least is not None or atom.least is not None or not last.text or not atom.text:
            return (*sequence, atom)
        return (*sequence[:-1], replace(last, text=last.text + atom.text))

    empty: _Sequence = ()
    return reduce(add, sequence, empty)


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
