"""The one argument of a tool that takes text: a model writes `{"input": "…"}`, and the client gets the text alone."""

# pyright: strict

from __future__ import annotations

import json
import re
from typing import Any

from router.frontend.chat.json_values import decoded

NAME = "input"
_BEGIN = re.compile(rf'\s*\{{\s*"{NAME}"\s*:\s*"')
_RUN = re.compile(r'(?:[^"\\]|\\u(?![dD][89a-bA-B])[0-9a-fA-F]{4}|\\u[dD][89a-bA-B][0-9a-fA-F]{2}'
                  r"\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])*")  # fmt: skip
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\.", re.DOTALL)
_LONGEST_ESCAPE = 12  # characters: a surrogate pair


def arguments_of(text: str) -> str:
    """Return the arguments that hold a text."""
    return json.dumps({NAME: text}, ensure_ascii=False)


class TextArgument:
    """Reads the text out of arguments that come in fragments. Arguments of another form are the text themselves."""

    def __init__(self) -> None:
        self._raw = ""  # what is not yet given out
        self._begun = self._ended = False

    def feed(self, fragment: str) -> str:
        """Return more of the text."""
        if self._ended:
            return ""
        self._raw += fragment
        if not self._begun:
            begin = _BEGIN.match(self._raw)
            if begin is None:
                return ""
            self._begun, self._raw = True, self._raw[begin.end() :]
        run = _RUN.match(self._raw)
        assert run is not None  # it matches the empty text
        text, end = run[0], run.end()
        while end < len(self._raw) and self._raw[end] != '"' and len(self._raw) - end >= _LONGEST_ESCAPE:
            text += self._raw[end]  # no escape that JSON has
            run = _RUN.match(self._raw, end + 1)
            assert run is not None
            text, end = text + run[0], run.end()
        self._ended = end < len(self._raw) and self._raw[end] == '"'
        self._raw = self._raw[end:]
        return _plain(text)

    def finish(self) -> str:
        """Return what was held back: no more comes."""
        if self._ended:
            return ""
        self._ended = True
        if self._begun:
            return _plain(self._raw)
        value: Any = decoded(self._raw or "{}")
        if value == {}:
            return ""
        texts: list[Any] = list(value.values()) if isinstance(value, dict) else []  # pyright: ignore
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._raw


def text_of(arguments: str) -> str:
    """Return the text that whole arguments hold."""
    reader = TextArgument()
    return reader.feed(arguments) + reader.finish()


def _plain(text: str) -> str:
    return _ESCAPE.sub(_meant, text)


def _meant(escape: re.Match[str]) -> str:
    value = decoded(f'"{escape[0]}"')
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else escape[0]
