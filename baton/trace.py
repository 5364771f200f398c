"""Where a process's loop spends its time: named spans of so many steps, as a file that chrome://tracing and Perfetto
open.

    while not stop.is_set():
        with tracer.turn():
            with tracer.span("receive", "sockets"):
                ...
            with tracer.span("step", "engine"):
                tracer.count()              a step has begun

A tracer is off until `start`; from the next turn on it records every span of its loop's thread until the turn in which
the last step was counted, and writes them at once. Off, a span costs about 0.15 µs and allocates nothing, so spans stay
where they are for good; on, 0.5 µs. Times are those of the machine's monotonic clock: traces of several processes of
one machine may be laid over each other.

Owns what was recorded and the file that it becomes; a file that can't be written is a line in the log and no more.
The format is the JSON array of "complete" events of Google's Trace Event Format.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import msgspec

log = logging.getLogger(__name__)

MAX_STEPS = 10_000
MAX_SPANS = 200_000  # about 25 MB of file; a trace that comes to so many ends there

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
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"{steps} steps can't be traced; it takes 1 to {MAX_STEPS:,}")
        self._steps = steps
        self._most = most
        self._spans: list[tuple[str, str, int, int, dict[str, Argument]]] = []
        self.counted = 0

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def complete(self) -> bool:
        return self.counted >= self._steps or len(self._spans) >= self._most

    def add(self, name: str, category: str, start: int, end: int, args: dict[str, Argument]) -> None:
        """A span that has ended. Beyond the limit it is dropped."""
        if len(self._spans) < self._most:
            self._spans.append((name, category, start, end - start, args))

    def document(self, process: str, pid: int, thread: int) -> dict[str, object]:
        """What the file holds. Times become microseconds there."""
        names = {"process_name": process, "thread_name": "loop"}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": name, "pid": pid, "tid": thread, "args": {"name": value}}
            for name, value in names.items()
        ]
        for name, category, start, duration, args in self._spans:
            event: dict[str, object] = {
                "ph": "X", "name": name, "cat": category, "pid": pid, "tid": thread,
                "ts": start / 1_000, "dur": duration / 1_000,
            }  # fmt: skip
            events.append(event | {"args": args} if args else event)
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"steps": self.counted}}


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
        self._recording.add(self._name, self._category, self._start, time.monotonic_ns(), self._args)


class _Turn:
    """A turn of the loop, after whose end a complete trace is written."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        self._tracer.begin()
        self._span = self._tracer.span("turn", "loop")
        self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._span.__exit__(kind, error, at)
        self._tracer.finish_if_complete()


class Tracer:
    """The spans of one process's loop. For one thread."""

    def __init__(self, process: str = "") -> None:
        """Off. `process` is what the trace calls it."""
        self.process = process
        self._recording: Recording | None = None
        self._waiting: Recording | None = None  # for the next turn
        self._path = Path()
        self._turn = _Turn(self)

    @property
    def on(self) -> bool:
        """Whether spans are recorded, so that it is worth finding out what to say of them."""
        return self._recording is not None

    def start(self, path: Path, steps: int) -> None:
        """Record from the next turn on, until so many steps were counted; then write `path`. A trace that is under way
        ends here. Raises ValueError for no steps, or more than MAX_STEPS."""
        recording = Recording(steps)
        self.close()
        self._waiting, self._path = recording, path
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
            self.close()

    def close(self) -> None:
        """Write what there is, be it nothing yet, and be off."""
        recording, self._recording, self._waiting = self._recording or self._waiting, None, None
        if recording is None:
            return
        document = recording.document(self.process, os.getpid(), threading.get_native_id())
        try:
            _write(self._path, msgspec.json.encode(document))
        except OSError as error:
            log.warning("can't write the trace %s: %s", self._path, error.strerror)
        else:
            log.info("wrote %d spans of %d steps to %s", len(recording), recording.counted, self._path)


def trace_path(folder: Path, process: str, mark: str) -> Path:
    """Where a process's trace of that mark lies."""
    return folder / f"{process}-{mark}.json"


def new_mark() -> str:
    """What tells the traces of one process apart."""
    return secrets.token_hex(4)


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, for its owner alone: names and times tell what is served to whom. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
