"""The frame of every parser: text comes in any pieces, and the deltas do not depend on where it was cut.

A parser is in one state at a time. A state reads the text from a position, writes deltas and returns the position up to
which it has read. It leaves only a short tail unread, such as the beginning of a marker. So the work is proportional to
the text. Text that turns out to be no tool call is content, as it came.
"""

# pyright: strict

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, TypeAlias

from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, Content, MakeId, Reasoning

State: TypeAlias = Callable[[str, int], int]


def call_id() -> str:
    """A name for a call, as OpenAI's API makes them."""
    return f"call_{secrets.token_hex(12)}"


class DeltaWriter:
    """Collects deltas. Whitespace beside a tool call is layout, not content."""

    def __init__(self, make_id: MakeId = call_id) -> None:
        self._make_id = make_id
        self._deltas: list[ChatDelta] = []
        self._space: list[str] = []  # content that a call may follow
        self._after_call = False
        self._calls = 0

    def content(self, text: str) -> None:
        """Add to the content, but for whitespace at its end until more comes."""
        if self._after_call and not (text := text.lstrip()):
            return
        if body := text.rstrip():
            self._after_call = False
            self._give_space()
            self._add_content(body)
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, Reasoning):
            self._deltas[-1] = Reasoning(last.text + text)
        elif text:
            self._deltas.append(Reasoning(text))

    def begin_call(self, name: str) -> None:
        """Begin a call."""
        self._space.clear()
        self._after_call = True
        self._deltas.append(CallBegin(self._calls, self._make_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, CallArguments) and last.index == self._calls - 1:
            self._deltas[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self._deltas.append(CallArguments(self._calls - 1, text))

    def take(self) -> list[ChatDelta]:
        """Return what has come since the last time."""
        taken, self._deltas = self._deltas, []
        return taken

    def finish(self) -> None:
        """Give the whitespace at the end of the content."""
        self._give_space()

    def _give_space(self) -> None:
        if self._space:
            self._add_content("".join(self._space))
            self._space.clear()

    def _add_content(self, text: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, Content):
            self._deltas[-1] = Content(last.text + text)
        else:
            self._deltas.append(Content(text))


class Reads(Protocol):
    """What takes text and writes deltas."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


class PlainText:
    """All text is content, whitespace included, as soon as it comes."""

    def __init__(self, out: DeltaWriter) -> None:
        self._out = out

    def feed(self, text: str) -> None:
        if text:
            self._out.content(text)
            self._out.finish()

    def finish(self) -> None:
        pass


class TextParser:
    """Reads text and writes deltas. This one takes all of it for content."""

    markers: ClassVar[tuple[str, ...]] = ()  # special tokens that must be in its text

    @staticmethod
    def make_id() -> str:
        """Return a name for a call."""
        return call_id()

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        """`tools` are the names that may be called."""
        self._out = out
        self._tools = frozenset(tools)
        self._state: State = self._content
        self._unread = ""
        self._raw: list[str] = []  # read already, and content if no call comes of it
        self._ended = False

    def feed(self, text: str) -> None:
        """Read more text."""
        text, at = self._unread + text, 0
        while at < len(text):
            state = self._state
            before, at = at, state(text, at)
            if at == before and self._state == state:
                break
        self._unread = text[at:]

    def finish(self) -> None:
        """Read the rest: no more comes."""
        self._ended = True
        self.feed("")
        self._give_up(self._content)
        if self._unread:
            self._out.content(self._unread)

    def _content(self, text: str, at: int) -> int:
        self._out.content(text[at:])
        return len(text)

    def _give_up(self, state: State) -> None:
        """Take for content what was read as the beginning of a call, and go on in that state."""
        if self._raw:
            self._out.content("".join(self._raw))
            self._raw.clear()
        self._state = state

    def _safe(self, text: str, at: int, markers: Sequence[str]) -> int:
        """Return the position up to which no marker can begin that is still incomplete."""
        if self._ended:
            return len(text)
        begin = max(at, len(text) - max(map(len, markers)) + 1)
        if not any(marker[0] in text[begin:] for marker in markers):  # as nearly always
            return len(text)
        for start in range(begin, len(text)):
            if any(marker.startswith(text[start:]) for marker in markers):
                return start
        return len(text)
