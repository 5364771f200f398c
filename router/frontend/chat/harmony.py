"""gpt-oss's harmony format: messages with a header each, on the channels analysis, commentary and final.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

The package openai-harmony does not serve here. It parses token ids of its own vocabulary, which it downloads when it is
first used, and it raises an error for text that is not in the format.
"""

# pyright: strict

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from router.frontend.chat.json_calls import skip_space
from router.frontend.chat.text_parser import DeltaWriter, TextParser

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = (_START, _CHANNEL)
_MARKS = (*_ENDS, *_BEGINS)
_IN_TEXT = re.compile("|".join(map(re.escape, _MARKS)))
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MOST_HEADER = 500  # characters
_FUNCTIONS = "functions."


class HarmonyParser(TextParser):
    """vLLM's `openai` for tools and `openai_gptoss` for reasoning, in one."""

    markers = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = (), *, calls: bool, reasoning: bool) -> None:
        """`calls`, `reasoning`: whether these are told from the content."""
        super().__init__(out, tools)
        self._calls = calls
        self._reasoning = reasoning
        self._state = self._first
        self._size = 0  # of the header, in characters
        self._thought = False  # whether there has been any reasoning
        self._separate = False  # what comes next of it is another message
        self._no_arguments = True  # so far

    def _first(self, text: str, at: int) -> int:
        """The prompt ends with a header's beginning, so the output begins within it."""
        end = skip_space(text, at)
        begins = (_CHANNEL, _START, "to=")
        if text.startswith(begins, end):
            self._raw.append(text[at:end])
            self._state = self._in_header
            return end
        if end == len(text) and not self._ended:
            self._raw.append(text[at:end])
            return end
        if any(begin.startswith(text[end:]) for begin in begins) and not self._ended:
            self._raw.append(text[at:end])
            return end
        self._give_up(self._content)
        return at

    def _in_header(self, text: str, at: int) -> int:
        found = text.find(_MESSAGE, at)
        stop = found if found >= 0 else self._safe(text, at, (_MESSAGE,))
        self._raw.append(text[at:stop])
        self._size += stop - at
        if self._size > _MOST_HEADER:
            self._size = 0
            self._give_up(self._content)
            return stop
        if found < 0:
            return stop
        self._begin_message("".join(self._raw))
        self._raw.clear()
        self._size = 0
        return found + len(_MESSAGE)

    def _begin_message(self, header: str) -> None:
        channel = _NAME_OF_CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        if self._calls and (name.startswith(_FUNCTIONS) or name in self._tools):
            self._out.begin_call(name.removeprefix(_FUNCTIONS) or name)
            self._no_arguments = True
            self._state = self._in_call
        elif self._reasoning and channel and channel[1] == "analysis":
            self._separate = self._thought
            self._state = self._in_reasoning
        else:
            self._state = self._content

    def _in_call(self, text: str, at: int) -> int:
        return self._body(text, at, self._argue)

    def _argue(self, text: str) -> None:
        self._no_arguments = False
        self._out.arguments(text)

    def _in_reasoning(self, text: str, at: int) -> int:
        return self._body(text, at, self._think)

    def _think(self, text: str) -> None:
        self._out.reasoning("\n" + text if self._separate else text)
        self._thought, self._separate = True, False

    def _content(self, text: str, at: int) -> int:
        return self._body(text, at, self._out.content)

    def _body(self, text: str, at: int, say: Callable[[str], None]) -> int:
        found = _IN_TEXT.search(text, at)
        stop = found.start() if found else self._safe(text, at, _MARKS)
        if stop > at:
            say(text[at:stop])
        if found is None:
            return stop
        self._end_call()
        if found[0] in _BEGINS:
            self._raw.append(found[0])
            self._state = self._in_header
        else:
            self._state = self._between
        return found.end()

    def _between(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if end < len(text):
            self._state = self._content
        return end

    def _end_call(self) -> None:
        if self._state == self._in_call and self._no_arguments:
            self._argue("{}")

    def finish(self) -> None:
        self._ended = True
        self.feed("")
        self._end_call()
        super().finish()
