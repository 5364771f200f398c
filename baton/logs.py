"""Logging as every process does it: one file per process in one folder, one line per record, the request id in it.

2026-01-31T12:00:00.123 decode-0 INFO worker.loop request=ab12 accepted attempt 1

Files are rotated by size, so a log's disk space is bounded. A line that a peer, a client or a stranger can trigger goes
through a `RateLimitedLog`. Tracebacks, and all lines of libraries, are limited in the same way by the handler itself.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from baton.config import ClusterConfig

_MAX_TEXT = 500  # characters of a rate-limited line: it may quote what a stranger sent
_INTERVAL = 10.0  # seconds
_MAX_KINDS = 1_000  # kinds that one RateLimit remembers; the oldest is forgotten first
_OURS = frozenset({"baton", "engine", "kvstore", "router", "prefill_worker", "decode_worker", "worker", "deploy"})


class _Formatter(logging.Formatter):
    converter = time.gmtime
    default_msec_format = "%s.%03d"
    default_time_format = "%Y-%m-%dT%H:%M:%S"


@dataclass(slots=True)
class _Kind:
    since: float  # start of its interval, in seconds
    lines: int = 0  # let through in that interval
    left_out: int = 0  # since the last line


class RateLimit:
    """Decides which lines are written: at most `burst` of one kind per `interval` seconds. Thread-safe."""

    def __init__(
        self, interval: float = _INTERVAL, burst: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval, self._burst, self._clock = interval, burst, clock
        self._kinds: dict[object, _Kind] = {}
        self._lock = threading.Lock()

    def admit(self, kind: object) -> int | None:
        """Return how many lines of this kind were left out since its last one; none if this one is left out too."""
        now = self._clock()
        with self._lock:
            state = self._kinds.get(kind)
            if state is None:
                if len(self._kinds) >= _MAX_KINDS:
                    del self._kinds[next(iter(self._kinds))]
                state = self._kinds[kind] = _Kind(now)
            if now - state.since >= self._interval:
                state.since, state.lines = now, 0
            if state.lines >= self._burst:
                state.left_out += 1
                return None
            state.lines += 1
            left_out, state.left_out = state.left_out, 0
            return left_out


class RateLimitedLog:
    """A logger for lines that a peer, a client or a stranger can trigger. A line's kind is its unformatted message.

    After some were left out, the next line of that kind says how many. A line is cut to 500 characters, and characters
    that are not printable are escaped."""

    def __init__(self, logger: logging.Logger, limit: RateLimit | None = None) -> None:
        self._logger = logger
        self._limit = limit or RateLimit()

    def warning(self, message: str, *args: object) -> None:
        self.log(logging.WARNING, message, message, *args)

    def info(self, message: str, *args: object) -> None:
        self.log(logging.INFO, message, message, *args)

    def log(self, level: int, kind: object, message: str, *args: object) -> None:
        """A line of another kind than its message: where that is formatted already."""
        if not self._logger.isEnabledFor(level) or (left_out := self._limit.admit(kind)) is None:
            return
        text = _printable((message % args if args else message)[:_MAX_TEXT])[:_MAX_TEXT]
        self._logger.log(level, "%s%s", text, f" ({left_out} lines like this were left out)" if left_out else "")


class _Flood(logging.Filter):
    """Limits what a handler writes of lines that no `RateLimitedLog` has seen: tracebacks, and all lines of libraries.
    Such lines can come once for every request or connection."""

    def __init__(self, limit: RateLimit) -> None:
        super().__init__()
        self._limit = limit

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None and record.name.partition(".")[0] in _OURS:
            return True
        left_out = self._limit.admit((record.name, record.pathname, record.lineno))
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines like this were left out)", ()
        return left_out is not None


class _File(RotatingFileHandler):
    """A log file that only its user can read, and that is rotated."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)  # an older version created it readable by all
        return os.fdopen(descriptor, "a", encoding=self.encoding, errors=self.errors)


def configure(process: str, cluster: ClusterConfig, level: int = logging.INFO) -> Path:
    """Send this process's records to `process`.log in the cluster's folder of logs; returns that file's path."""
    folder = cluster.logs
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{process}.log"
    handler = _File(
        path, maxBytes=cluster.log_max_bytes, backupCount=cluster.log_files, encoding="utf-8", errors="backslashreplace"
    )
    handler.addFilter(_Flood(RateLimit(burst=5)))
    handler.setFormatter(_Formatter(f"%(asctime)s {process} %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    for former in root.handlers[:]:
        root.removeHandler(former)
        former.close()
    root.addHandler(handler)
    root.setLevel(level)
    return path


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose every line names its request."""

    def __init__(self, logger: logging.Logger, request: str) -> None:
        super().__init__(logger, {})
        self._request = request

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"request={self._request} {msg}", kwargs


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
