"""Calls of Mistral models after `[TOOL_CALLS]`: a list of objects, or `name{…}` and `name[ARGS]{…}` by themselves."""

# pyright: strict

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from router.frontend.chat.call_list import CallList
from router.frontend.chat.json_calls import JsonValue, Verdict, skip_space
from router.frontend.chat.text_parser import DeltaWriter

_MARK, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]*")
_AFTER_NAME = re.compile(r"\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?\{\s*(?=[\"}])")
_MOST = 256  # characters of a name, and between it and its arguments
_LETTERS = string.ascii_letters + string.digits


def beginning_of(text: str) -> str:
    """A regular expression for every beginning of a text, the empty one included."""
    return "".join(f"(?:{re.escape(character)}" for character in text) + ")?" * len(text)


_BEGINNING = re.compile(
    rf"\s*(?:{beginning_of(_ID)}|(?:\[CALL_ID\]\s*\w*\s*)?(?:{beginning_of(_ARGS)}|(?:\[ARGS\]\s*)?(?:\{{\s*)?))"
)


def mistral_id() -> str:
    """A name for a call as the family's templates insist on: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class MistralParser(CallList):
    """vLLM's `mistral`."""

    markers = (_MARK, _ARGS, _ID)

    @staticmethod
    def make_id() -> str:
        return mistral_id()

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        super().__init__(out, tools)
        self._name = ""
        self._value = JsonValue()

    def _content(self, text: str, at: int) -> int:
        found = text.find(_MARK, at)
        stop = found if found >= 0 else self._safe(text, at, (_MARK,))
        if stop > at:
            self._out.content(text[at:stop])
        if found < 0:
            return stop
        self._raw = [_MARK]
        self._state = self._marked
        return found + len(_MARK)

    def _marked(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        self._raw.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == "[":
            self._raw.append("[")
            self._listed = False
            self._state = self._in_list
            return end + 1
        self._name = ""
        self._state = self._named
        return end

    # --- a name and its arguments ------------------------------------------------------------------------------------

    def _named(self, text: str, at: int) -> int:
        found = _NAME.match(text, at)
        assert found is not None  # it matches the empty text
        self._name += found[0]
        self._raw.append(found[0])
        end = found.end()
        if len(self._name) > _MOST or (end < len(text) and not self._name):
            self._give_up(self._content)
        elif end < len(text):
            self._state = self._before_arguments
        return end

    def _before_arguments(self, text: str, at: int) -> int:
        found = _AFTER_NAME.match(text, at)
        if found is None:
            if self._ended or len(text) - at > _MOST or not _may_come(text[at:]):
                self._give_up(self._content)
            return at
        self._raw.clear()
        self._out.begin_call(self._name)
        begun = found[0][found[0].index("{") :]
        self._out.arguments(begun)
        self._value = JsonValue()
        self._value.scan("{", 0)
        self._state = self._arguments
        return found.end()

    def _arguments(self, text: str, at: int) -> int:
        end = self._value.scan(text, at)
        self._out.arguments(text[at:end])
        if self._value.verdict is not Verdict.READING:
            self._state = self._content
        return end


def _may_come(text: str) -> bool:
    """Whether arguments may still follow a name."""
    return _BEGINNING.fullmatch(text) is not None
