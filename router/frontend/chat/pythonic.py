"""Calls as a Python list, of Llama 3.2 and 4 and others: `[f(city="Rome"), g()]`, alone in the output.

Nothing else marks them, so a list is one of calls only if its first element calls a tool of the request.
"""

# pyright: strict

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from router.frontend.chat.json_calls import skip_space
from router.frontend.chat.python_values import PythonValue
from router.frontend.chat.text_parser import DeltaWriter, TextParser

_BEGINS, _END = ("<|python_start|>", "<|python_tag|>"), "<|python_end|>"
_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_NO_MORE = re.compile(r"\s*\)")
_NO_MORE_CALLS = re.compile(r"\s*\]")
_NAME_BEGINS = re.compile(r"\s*(?:[A-Za-z_][\w.\-]*\s*)?")
_ARGUMENT_BEGINS = re.compile(r"\s*(?:[A-Za-z_]\w*\s*)?")
_MOST = 256  # characters of a name


class PythonicParser(TextParser):
    """vLLM's `pythonic`."""

    markers = (*_BEGINS, _END)

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        super().__init__(out, tools)
        self._state = self._start
        self._name = ""
        self._begun = False  # whether any call has
        self._arguments = 0  # of the last call
        self._value = PythonValue()

    def _start(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        self._raw.append(text[at:end])
        if end == len(text):
            return end
        for begin in _BEGINS:
            if text.startswith(begin, end):
                self._raw.append(begin)
                return end + len(begin)
            if begin.startswith(text[end:]) and not self._ended:
                return end
        if text[end] != "[":
            self._give_up(self._content)
            return end
        self._raw.append("[")
        self._state = self._before_name
        return end + 1

    def _before_name(self, text: str, at: int) -> int:
        if self._begun and (end := _NO_MORE_CALLS.match(text, at)) is not None:
            self._state = self._after_list
            return end.end()
        found = _NAME.match(text, at)
        if found is None:
            return self._unless_more(text, at, _NAME_BEGINS)
        if found[1] not in self._tools:
            self._give_up(self._content)
            return at
        self._raw.append(found[0])
        self._name = found[1]
        self._arguments = 0
        self._state = self._before_argument
        return found.end()

    def _before_argument(self, text: str, at: int) -> int:
        if (end := _NO_MORE.match(text, at)) is not None:
            self._say("}" if self._arguments else "{}")
            self._state = self._after_call
            return end.end()
        found = _ARGUMENT.match(text, at)
        if found is None:
            return self._unless_more(text, at, _ARGUMENT_BEGINS)
        self._say(f"{', ' if self._arguments else '{'}{json.dumps(found[1])}: ")
        self._arguments += 1
        self._value = PythonValue()
        self._state = self._in_value
        return found.end()

    def _in_value(self, text: str, at: int) -> int:
        end = self._value.scan(text, at)
        self._out.arguments(self._value.take())
        if self._value.bad:
            self._state = self._content
        elif self._value.done:
            self._state = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        """A comma or the end of the arguments: the value has ended there."""
        self._state = self._before_argument
        return at + (text[at] == ",")

    def _after_call(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if end == len(text):
            return end
        self._state = {",": self._before_name, "]": self._after_list}.get(text[end], self._content)
        return end + (text[end] in ",]")

    def _after_list(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if _END.startswith(text[end:]) and not self._ended:
            return end
        self._state = self._content
        return end + len(_END) if text.startswith(_END, end) else end

    def _say(self, arguments: str) -> None:
        if self._raw:
            self._raw.clear()
            self._begun = True
            self._out.begin_call(self._name)
        self._out.arguments(arguments)

    def _unless_more(self, text: str, at: int, beginning: re.Pattern[str]) -> int:
        """Wait for more if the text so far may be the beginning of what is expected; else it is content."""
        if self._ended or len(text) - at > _MOST or not beginning.fullmatch(text, at):
            if self._state == self._before_argument and self._arguments:
                self._out.arguments("}")  # those that have come can be used
            self._give_up(self._content)
        return at

    def finish(self) -> None:
        self._ended = True
        self.feed("")
        if self._state == self._in_value:
            self._value.finish()
            self._out.arguments(self._value.take())
        super().finish()
