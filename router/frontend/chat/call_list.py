"""The inside of a JSON list whose objects are calls."""

# pyright: strict

from __future__ import annotations

import re
from collections.abc import Sequence

from router.frontend.chat.json_calls import ObjectCalls
from router.frontend.chat.text_parser import DeltaWriter

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
