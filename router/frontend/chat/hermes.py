"""Calls of Hermes and Qwen models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""

# pyright: strict

from __future__ import annotations

from router.frontend.chat.json_calls import ObjectCalls, skip_space

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(ObjectCalls):
    """vLLM's `hermes`."""

    markers = (_BEGIN, _END)

    def _content(self, text: str, at: int) -> int:
        found = text.find(_BEGIN, at)
        stop = found if found >= 0 else self._safe(text, at, (_BEGIN,))
        if stop > at:
            self._out.content(text[at:stop])
        if found < 0:
            return stop
        self._raw = [_BEGIN]
        self._state = self._before_object
        return found + len(_BEGIN)

    def _before_object(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        self._raw.append(text[at:end])
        if end < len(text):
            self._expect_object()
        return end

    def _after_object(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if text.startswith(_END, end):
            self._state = self._content
            return end + len(_END)
        if end == len(text) or (_END.startswith(text[end:]) and not self._ended):
            return end
        if text[end] == "{":
            self._expect_object()
        else:
            self._state = self._content
        return end
