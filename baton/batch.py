"""Batches in OpenAI's format: a request on each line of a file, and a result on each line of another.

`run` is the one executor. With it `baton run-batch` sends to a cluster's HTTP API, and a router calls its own API. Each
request gets the lowest class, so the router's queue decides when it is served. A result names its line by its id. So a
batch that was cut off goes on after the results that it has, and no line gets two results.
"""

# pyright: strict

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw, Struct

from baton.errors import AttemptsExhausted, BatchConflict, InvalidRequest, shown
from baton.messages import LOWEST_CLASS

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
AT_ONCE = 32  # requests of a batch that are under way

MAX_LINE = 32 * 2**20  # bytes
_MAX_ID = 512  # characters
_PREFIX = "batch_req_"
_BEGINNING = b'{"id":"batch_req_'  # of a result
_PAUSE = 1.0  # seconds before a refused request is sent again, where its answer names no number of them
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 60.0
_OVERRIDES = {"priority": Raw(str(LOWEST_CLASS).encode()), "stream": Raw(b"false")}


class Line(Struct):
    """A request, as its line has it."""

    custom_id: str
    url: str
    body: dict[str, Raw]
    method: str = "POST"


class Response(Struct):
    """The answer to a request, whatever its status."""

    status_code: int
    request_id: str
    body: Any


class LineError(Struct):
    """Why a line has no answer."""

    code: str
    message: str


class Result(Struct):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: LineError | None

    @property
    def completed(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    @property
    def line(self) -> int:
        """The line of its request, counted from 1. Raises ValueError for an id of another program."""
        return int(self.id.removeprefix(_PREFIX))


@dataclass(frozen=True)
class Answer:
    """What came of a request over HTTP. The headers have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after(self) -> float | None:
        """Seconds after which another try is worth it. None: this answer is final."""
        if self.status not in (429, 503) or self.headers.get("baton-reason") == AttemptsExhausted.reason:
            return None
        try:
            return max(_LEAST_PAUSE, min(_MOST_PAUSE, float(self.headers["retry-after"])))
        except (KeyError, ValueError):  # a proxy may name a date
            return _PAUSE


Send = Callable[[str, bytes, str], Awaitable[Answer]]
"""Sends a body to a path under a request's name. It raises BatonError if the whole batch has to end."""


class Results:
    """The results of a batch on disk, those of an earlier run included. One process at a time has them open.

    Threads may share it."""

    def __init__(self, output: Path, errors: Path | None = None) -> None:
        """Open the files, and drop a last line that was cut off. `errors`: takes results without an answer of status
        200; None: the output does. Raises BatchConflict if another process has them open, and InvalidRequest for a file
        that holds something else."""
        self.completed = self.failed = self.bytes = 0
        self.lines: dict[int, str | None] = {}  # number → custom_id
        self._lock = threading.Lock()
        self._output = output.open("a+b")
        self._errors = self._output if errors is None else errors.open("a+b")
        try:
            fcntl.flock(self._output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in {self._output, self._errors}:
                self._read(file)
        except BlockingIOError:
            self.close()
            raise BatchConflict(f"another process writes the results of a batch to {output}") from None
        except BaseException:
            self.close()
            raise

    def add_result(self, result: Result) -> None:
        line = msgspec.json.encode(result) + b"\n"
        with self._lock:
            file = self._output if result.completed else self._errors
            file.write(line)
            file.flush()
            self._count(result, len(line))

    def close(self) -> None:
        self._output.close()
        self._errors.close()

    def _read(self, file: BinaryIO) -> None:
        file.seek(0)
        whole = 0
        for number, line in enumerate(file, 1):
            begun = line.rstrip(b"\0")[: len(_BEGINNING)]  # a power cut leaves zeros
            if not line.endswith(b"\n") and _BEGINNING.startswith(begun):
                file.truncate(whole)
                break
            try:
                result = msgspec.json.decode(line, type=Result)
                self._count(result, len(line))
            except (msgspec.MsgspecError, ValueError):
                raise InvalidRequest(
                    f"line {number} of {file.name} is no result of a batch; choose another output, or remove that file"
                ) from None
            whole += len(line)

    def _count(self, result: Result, size: int) -> None:
        self.lines[result.line] = result.custom_id
        self.bytes += size
        self.completed += result.completed
        self.failed += not result.completed


async def run(
    source: BinaryIO, results: Results, send: Send, *, endpoint: str = "", at_once: int = AT_ONCE,
    max_line: int = MAX_LINE, seconds: float | None = None,
) -> None:  # fmt: skip
    """Send the request of every line that has no result yet, and add its result.

    `endpoint`: the one that all lines must name. `max_line`: bytes. After so many `seconds` the lines that are left get
    an error. Raises InvalidRequest where the results are of another input, and the errors of `send`."""
    lines, turn = _lines(source, results, endpoint, max_line), asyncio.Lock()
    deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def work() -> None:
        while True:
            async with turn:
                if (item := await asyncio.to_thread(next, lines, None)) is None:
                    return
            await asyncio.to_thread(results.add_result, await _result(*item, send, deadline))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _result(number: int, line: Line | LineError, send: Send, deadline: float | None) -> Result:
    """Return the result of a line. A request that is refused for want of room is sent again and again."""
    name = f"{_PREFIX}{number}"
    if isinstance(line, LineError):
        return Result(name, None, None, line)
    body = msgspec.json.encode(line.body | _OVERRIDES)
    try:
        async with asyncio.timeout_at(deadline):
            answer = await send(line.url, body, name)
            while (pause := answer.retry_after) is not None:
                await asyncio.sleep(pause)
                answer = await send(line.url, body, name)
    except TimeoutError:
        return Result(name, line.custom_id, None, LineError("batch_expired", "the batch's time is up"))
    try:
        value = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = answer.body.decode(errors="replace")
    request = answer.headers.get("x-request-id", name)
    return Result(name, line.custom_id, Response(answer.status, request, value), None)


def _lines(source: BinaryIO, results: Results, endpoint: str, max_line: int) -> Iterator[tuple[int, Line | LineError]]:
    """Yield every line without a result, with its number. Raises InvalidRequest."""
    custom_ids = set[str]()
    number = 0
    while raw := source.readline(max_line + 1):
        number += 1
        if not raw.strip():
            continue
        try:
            if len(raw) > max_line:
                raise InvalidRequest(f"it has more than {max_line} bytes; send less")
            line = _checked(raw, endpoint, custom_ids)
        except InvalidRequest as error:
            line = LineError(error.reason, f"line {number}: {error}")
            while not raw.endswith(b"\n") and (raw := source.readline(max_line)):
                pass
        if number not in results.lines:
            yield number, line
        elif results.lines[number] != (custom_id := line.custom_id if isinstance(line, Line) else None):
            raise InvalidRequest(
                f"line {number} of the input has custom_id {shown(repr(custom_id))}, and its result has "
                f"{shown(repr(results.lines[number]))}: the results are of another input; choose another output"
            )


def _checked(raw: bytes, endpoint: str, custom_ids: set[str]) -> Line:
    """Decode a line. Raises InvalidRequest."""
    try:
        line = msgspec.json.decode(raw, type=Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"it is no request of a batch: {shown(str(error), 300)}") from None
    if not 0 < len(line.custom_id) <= _MAX_ID:
        raise InvalidRequest(f"custom_id has {len(line.custom_id)} characters; it must have 1 to {_MAX_ID}")
    if line.custom_id in custom_ids:
        raise InvalidRequest(f"custom_id {shown(repr(line.custom_id))} stands on another line, too; make it unique")
    custom_ids.add(line.custom_id)
    if line.method != "POST":
        raise InvalidRequest(f"method is {shown(repr(line.method))}; it must be POST")
    if line.url not in ((endpoint,) if endpoint else ENDPOINTS):
        raise InvalidRequest(f"url is {shown(repr(line.url))}; it must be {endpoint or ' or '.join(ENDPOINTS)}")
    return line
