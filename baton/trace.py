"""Where a process's loop spends its time: named spans of so many steps, as a file that chrome://tracing and Perfetto
open.

    while not stop.is_set():
        with tracer.turn():
            with tracer.span("receive", "sockets"):
                ...
            with tracer.span("step", "engine"):
                tracer.count()              a step has begun

A tracer is off until `start`; from the next turn on it records every span of its loop's thread until the turn in which
the last step was counted. Off, a span costs about 0.15 µs and allocates nothing, so spans stay where they are for good;
on, 0.5 µs. Times are those of the machine's monotonic clock: traces of several processes of one machine may be laid
over each other.

A thread writes the file, some spans at a time, with a pause after each: the loop never waits for the disk, and for
Python's lock no longer than such a part takes. A tracer has one trace at a time, until its file is written.

Owns what was recorded and the file that it becomes; a file that can't be written is a line in the log and no more.
The folder keeps a bounded number of files and bytes (`TraceLimits`): the oldest traces are removed, whichever process
wrote them. The format is the JSON array of "complete" events of Google's StartTrace Event Format.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from baton import private_folder
from baton.config import TraceLimits
from baton.messages import MAX_TRACE_STEPS

log = logging.getLogger(__name__)

_LIMITS = TraceLimits()
MAX_SPANS = 200_000  # about 25 MB of file; a trace that comes to so many ends there
_PART = 100  # spans that are written at a time: 0.2 ms of Python
_PAUSE = 0.001  # seconds after each part, in which the loop has Python to itself
_CLOSING = 10.0  # seconds that a process which ends waits for its trace to be written
_ABANDONED = 600.0  # seconds after which a half-written file has no writer any more
_NAME = re.compile(r"(?P<half>\.)?[A-Za-z0-9-]+-[0-9a-f]{8}\.json(?(half)\.[0-9a-f]{8})")

Argument = int | float | str


class _Off:
    """A span of a tracer that is off."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_OFF = _Off()


class Recording:
    """The spans of one trace. Pure: times, in nanoseconds, are its caller's."""

    def __init__(self, steps: int, most: int = MAX_SPANS) -> None:
        """Complete after `steps` steps, or at `most` spans. Raises ValueError for no steps at all, or too many."""
        if not 1 <= steps <= MAX_TRACE_STEPS:
            raise ValueError(f"{steps} steps can't be traced; it takes 1 to {MAX_TRACE_STEPS:,}")
        self._steps = steps
        self._most = most
        self._spans: deque[tuple[str, str, int, int, dict[str, Argument]]] = deque()
        self.counted = 0

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def complete(self) -> bool:
        return self.counted >= self._steps or len(self._spans) >= self._most

    def add_span(self, name: str, category: str, start: int, end: int, args: dict[str, Argument]) -> None:
        """A span that has ended. Beyond the limit it is dropped."""
        if len(self._spans) < self._most:
            self._spans.append((name, category, start, end - start, args))

    def parts(self, process: str, pid: int, thread: int) -> Iterator[bytes]:
        """The file's content, piece by piece. Times become microseconds there. The spans are forgotten on the way."""
        names = {"process_name": process, "thread_name": "loop"}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": name, "pid": pid, "tid": thread, "args": {"name": value}}
            for name, value in names.items()
        ]
        yield b'{"traceEvents":[' + _listed(events)
        while self._spans:
            events = []
            for _ in range(min(_PART, len(self._spans))):
                name, category, start, duration, args = self._spans.popleft()
                event: dict[str, object] = {
                    "ph": "X", "name": name, "cat": category, "pid": pid, "tid": thread,
                    "ts": start / 1_000, "dur": duration / 1_000,
                }  # fmt: skip
                events.append(event | {"args": args} if args else event)
            yield b"," + _listed(events)
        yield b'],"displayTimeUnit":"ms","otherData":' + msgspec.json.encode({"steps": self.counted}) + b"}"


class _Span:
    """A span that is being recorded."""

    __slots__ = ("_args", "_category", "_name", "_recording", "_start")

    def __init__(self, recording: Recording, name: str, category: str, args: dict[str, Argument]) -> None:
        self._recording = recording
        self._name = name
        self._category = category
        self._args = args

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._recording.add_span(self._name, self._category, self._start, time.monotonic_ns(), self._args)


class _Turn:
    """A turn of the loop, after whose end a complete trace is written."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        self._tracer.begin()
        self._span = self._tracer.span("turn", "loop")
        self._span.__enter__()

    def __exit__(self, *_: object) -> None:
        self._span.__exit__(None, None, None)
        self._tracer.finish_if_complete()


class Tracer:
    """The spans of one process's loop. For one thread."""

    def __init__(self, process: str = "", keep: TraceLimits = _LIMITS) -> None:
        """Off. `process` is what the trace calls it."""
        self.process = process
        self.keep = keep
        self._recording: Recording | None = None
        self._waiting: Recording | None = None  # for the next turn
        self._folder, self._mark = Path(), ""
        self._turn = _Turn(self)
        self._writer: threading.Thread | None = None
        self._hurry = threading.Event()

    @property
    def on(self) -> bool:
        """Whether spans are recorded, so that it is worth finding out what to say of them."""
        return self._recording is not None

    @property
    def mark(self) -> str:
        """The mark of the trace that waits for a turn, is recorded or is being written; none: a new one may start."""
        busy = self._recording is not None or self._waiting is not None
        return self._mark if busy or (self._writer is not None and self._writer.is_alive()) else ""

    def start(self, folder: Path, mark: str, steps: int) -> None:
        """Record from the next turn on, until so many steps were counted; then write the file. While another trace is
        under way this one is refused, with a line in the log. Raises ValueError for 0 steps or more than MAX_STEPS."""
        recording = Recording(steps)
        path = trace_path(folder, self.process, mark)
        if self.mark:
            log.warning("no trace %s: the trace %s is under way", path.name, self.mark)
            return
        self._waiting, self._folder, self._mark = recording, folder, mark
        log.info("tracing %d steps into %s", steps, path)

    def span(self, name: str, category: str, **args: Argument) -> AbstractContextManager[None]:
        """What is done inside takes part in the trace under this name."""
        if self._recording is None:
            return _OFF
        return _Span(self._recording, name, category, args)

    def turn(self) -> AbstractContextManager[None]:
        """One turn of the loop. A trace begins and ends between two of them."""
        return self._turn

    def count(self) -> None:
        """A step has begun."""
        if self._recording is not None:
            self._recording.counted += 1

    def begin(self) -> None:
        """A turn begins, and with it the trace that waits for one."""
        if self._waiting is not None:
            self._recording, self._waiting = self._waiting, None

    def finish_if_complete(self) -> None:
        if self._recording is not None and self._recording.complete:
            self.stop(self._mark)

    def stop(self, mark: str) -> None:
        """End the trace of that mark, if it is under way, and have written what there is, be it nothing yet."""
        recording = self._recording or self._waiting
        if recording is None or mark != self._mark:
            return
        self._recording = self._waiting = None
        path = trace_path(self._folder, self.process, mark)
        self._writer = threading.Thread(
            target=self._write, args=(recording, path, threading.get_native_id()), name="trace", daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """End the trace that is under way, and wait until it is written. The tracer can be used again."""
        self.stop(self._mark)
        if self._writer is not None:
            self._hurry.set()
            self._writer.join(_CLOSING)
            self._hurry.clear()

    def _write(self, recording: Recording, path: Path, thread: int) -> None:
        """On a thread of its own."""
        spans = len(recording)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with private_folder.replacing(path) as file:  # names and times tell what clients are served
                for part in recording.parts(self.process, os.getpid(), thread):
                    file.write(part)
                    self._hurry.wait(_PAUSE)
            _prune(path, self.keep)
        except OSError as error:
            log.warning("can't write the trace %s: %s", path, error.strerror)
        else:
            log.info("wrote %d spans of %d steps to %s", spans, recording.counted, path)


def trace_path(folder: Path, process: str, mark: str) -> Path:
    """Where a process's trace of that mark lies."""
    return folder / f"{process}-{mark}.json"


def new_mark() -> str:
    """What tells the traces of one process apart."""
    return secrets.token_hex(4)


def _listed(events: list[dict[str, object]]) -> bytes:
    """As JSON, without the brackets."""
    return msgspec.json.encode(events)[1:-1]


def _prune(newest: Path, keep: TraceLimits) -> None:
    """Remove the oldest traces of the folder beyond what it keeps. Other processes may do so at the same time."""
    traces: list[tuple[float, int, Path]] = []
    for entry in os.scandir(newest.parent):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_file(follow_symlinks=False):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not match["half"]:
            traces.append((status.st_mtime, status.st_size, Path(entry.path)))
        elif status.st_mtime < time.time() - _ABANDONED:  # its writer was killed
            Path(entry.path).unlink(missing_ok=True)
    files = size = 0
    for _, length, path in sorted(traces, key=lambda one: (one[2] == newest, one[0]), reverse=True):
        files, size = files + 1, size + length
        if path != newest and (files > keep.files or size > keep.size):
            path.unlink(missing_ok=True)
            log.info("removed the old trace %s: cluster.trace_files and trace_bytes bound what is kept", path)
