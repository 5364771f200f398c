"""Calls of Llama 3: `{"name": …, "parameters": {…}}` at the beginning of a line or after `<|python_tag|>`.

Nothing else marks them, so an object is a call only if it has the keys of one and names a tool of the request. Several
calls are separated by semicolons.
"""

# pyright: strict

from __future__ import annotations

import re
from collections.abc import Sequence

from router.frontend.chat.json_calls import ObjectCalls, skip_space
from router.frontend.chat.text_parser import DeltaWriter

_TAG = "<|python_tag|>"
_MARK = re.compile(r"<\|python_tag\|>|\{")
_SEPARATORS = re.compile(r"[\s;,]*")


class Llama3JsonParser(ObjectCalls):
    """vLLM's `llama3_json`."""

    markers = (_TAG,)
    usual_keys_only = True

    def __init__(self, out: DeltaWriter, tools: Sequence[str] = ()) -> None:
        super().__init__(out, tools)
        self._line_begins = True  # only whitespace has come since the last line feed

    def _accepts(self, name: str) -> bool:
        return name in self._tools

    def _content(self, text: str, at: int) -> int:
        while (found := _MARK.search(text, at)) is not None:
            self._give(text[at : found.start()])
            at = found.end()
            if found[0] == _TAG:
                self._raw = [_TAG]
                self._state = self._tagged
                return at
            if self._line_begins:
                self._expect_object()
                return found.start()
            self._give("{")
        stop = self._safe(text, at, (_TAG,))
        self._give(text[at:stop])
        return stop

    def _give(self, text: str) -> None:
        _, line_feed, line = text.rpartition("\n")
        self._line_begins = (self._line_begins or bool(line_feed)) and not line.strip()
        if text:
            self._out.content(text)

    def _give_up(self, state: object) -> None:
        self._line_begins = self._line_begins and not self._raw
        super()._give_up(self._content)

    def _tagged(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        self._raw.append(text[at:end])
        if end < len(text):
            self._expect_object()
        return end

    def _after_object(self, text: str, at: int) -> int:
        found = _SEPARATORS.match(text, at)
        assert found is not None  # it matches the empty text
        end = found.end()
        self._raw.append(found[0])
        self._line_begins = False
        if text.startswith(_TAG, end):
            self._raw.append(_TAG)
            self._state = self._tagged
            return end + len(_TAG)
        if end == len(text) or (_TAG.startswith(text[end:]) and not self._ended):
            return end
        if text[end] == "{":
            self._expect_object()
        else:
            self._give_up(self._content)
        return end
