"""Calls in a JSON list, and calls that the request insists on: there the output is JSON, and nothing else marks it.

With `tool_choice` "required" it is a list of `{"name": …, "parameters": {…}}`, with a named function its parameters.
"""

# pyright: strict

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from router.frontend.chat.json_calls import JsonValue, ObjectCalls, Verdict, skip_space
from router.frontend.chat.text_argument import BEGIN, END
from router.frontend.chat.text_parser import DeltaWriter, TextParser

_SEPARATORS = re.compile(r"[\s,]*")


class CallList(ObjectCalls):
    """Reads from behind the bracket that begins the list. Without any call it stays content."""

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        super().__init__(out, tools)
        self._listed = False  # whether the list has had a call

    def _in_list(self, text: str, at: int) -> int:
        found = _SEPARATORS.match(text, at)
        assert found is not None  # it matches the empty text
        end = found.end()
        self._raw.append(found[0])
        if end == len(text):
            return end
        if text[end] == "{":
            self._expect_object()
            return end
        if text[end] == "]":
            self._raw.append("]")
            end += 1
            if self._listed:
                self._raw.clear()
        self._give_up(self._content)
        return end

    def _after_object(self, text: str, at: int) -> int:
        self._listed = True
        self._state = self._in_list
        return at


class RequiredCalls(CallList):
    """A list of calls."""

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        super().__init__(out, tools)
        self._state = self._before_list

    def _before_list(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if end == len(text):
            return end
        if text[end] != "[":
            self._give_up(self._content)
            return end
        self._raw.append("[")
        self._state = self._in_list
        return end + 1


class NamedCall(TextParser):
    """One call of one function: the output is its arguments."""

    def __init__(self, out: DeltaWriter, tools: Sequence[str]) -> None:
        super().__init__(out, tools)
        (self._name,) = tools
        self._value = JsonValue()
        self._state = self._before

    def _before(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if end < len(text):
            self._out.begin_call(self._name)
            self._state = self._arguments
        return end

    def _arguments(self, text: str, at: int) -> int:
        end = self._value.scan(text, at)
        self._out.arguments(text[at:end])
        if self._value.verdict is not Verdict.READING:
            self._state = self._content
        return end


class TextCall(TextParser):
    """One call of one tool that takes a text: the output is the text."""

    def __init__(self, out: DeltaWriter, tools: Sequence[str]) -> None:
        super().__init__(out, tools)
        (self._name,) = tools
        self._state = self._before

    def _before(self, text: str, at: int) -> int:
        self._out.begin_call(self._name)
        self._out.arguments(BEGIN)
        self._state = self._text
        return at

    def _text(self, text: str, at: int) -> int:
        self._out.arguments(json.dumps(text[at:], ensure_ascii=False)[1:-1])
        return len(text)

    def finish(self) -> None:
        if self._state == self._text:
            self._out.arguments(END)
        super().finish()
