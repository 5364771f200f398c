"""What happened lately that an operator should know: processes that came and went, attempts and requests that failed.

A fault may make thousands of lines. Of one kind at most `_BURST` notices are kept in `_WINDOW` seconds; the last of
them counts the others.
"""

# pyright: strict

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.errors import Overloaded, all_errors
from router.events import Log
from router.requests.explain import client_name

_MOST = 120
_BURST = 6
_SELDOM = {"stood still": 1}  # kinds of which fewer are kept
_WINDOW = 5.0  # seconds
_TEXT = 400  # characters
_KINDS = frozenset({"joins", "drains", "role", "stood still"})  # of lines that are told though they are no warning
_FAILED = "failed: "  # begins the kind of a line about a request that failed; its error's reason follows
_REFUSALS = frozenset(error.reason for error in all_errors() if issubclass(error, Overloaded))


@dataclass(slots=True)
class Notice:
    """One line. `more` lines of its kind came at about the same time and are not kept."""

    number: int  # counts notices from 1
    at: float  # seconds
    level: str  # "info", "warning" or "error"
    kind: str
    text: str
    request: str = ""  # the cluster's name of the request that it is about
    more: int = 0


class Notices:
    """The last notices."""

    def __init__(self) -> None:
        self._notices = deque[Notice](maxlen=_MOST)
        self._bursts: dict[tuple[str, str], tuple[float, int, Notice]] = {}  # begin, count, the last that was kept
        self._count = 0

    def logged(self, line: Log, now: float) -> None:
        if line.detail or not (line.warning or line.kind in _KINDS):
            return
        kind = line.kind or "router"
        level = "warning" if line.warning else "info"
        if kind == "gone" or (kind.startswith(_FAILED) and kind.removeprefix(_FAILED) not in _REFUSALS):
            level = "error"
        text = f"{client_name(line.request)}: {line.text}" if line.request else line.text
        self._add(level, kind, text, now, line.request)

    def last(self, count: int) -> list[Notice]:
        """The last notices, newest first."""
        return [*self._notices][: -count - 1 : -1]

    def _add(self, level: str, kind: str, text: str, now: float, request: str) -> None:
        begin, count, last = self._bursts.get((level, kind), (float("-inf"), 0, None))
        if now - begin > _WINDOW:
            begin, count = now, 0
        if last is not None and count >= _SELDOM.get(kind, _BURST):
            last.more += 1
            return
        self._count += 1
        notice = Notice(self._count, now, level, kind, text[:_TEXT], request)
        self._notices.append(notice)
        self._bursts[level, kind] = (begin, count + 1, notice)
