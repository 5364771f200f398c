"""Another user of this machine, with a process that tries the cluster's sockets and files.

    with OtherUser(Job(kind=zmq.SUB, endpoints=(endpoint,))) as other:
        told = other.told_now()

A process that has given up root for uid 65534. It takes one job, tries it again and again, and tells each time how
often the other end refused it and which messages it got. The job and its keys come through a pipe.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - the process can't read Python's library any more when a socket needs this
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.wire import ClusterKeys

UID = 65534
_ROOT = Path(__file__).parents[2]
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)  # fmt: skip
_BEAT = 0.05  # seconds between two tries


def unavailable() -> str:
    """Why this process can't become another user, or nothing."""
    if os.getuid() != 0:
        return f"only root can start a process of uid {UID}, and this is uid {os.getuid()}"
    probe = subprocess.run(
        [sys.executable, "-c", f"import os; os.setgroups([]); os.setgid({UID}); os.setuid({UID})"],
        capture_output=True,
        text=True,
    )
    return "" if probe.returncode == 0 else f"setuid is not permitted here: {probe.stderr.strip()[-200:]}"


class Job(msgspec.Struct, frozen=True):
    """What the process tries. `keys` is a secret half; empty: none."""

    keys: str = ""
    kind: int = 0
    endpoints: tuple[str, ...] = ()
    listens: bool = False
    identity: bytes = b""
    messages: tuple[tuple[bytes, ...], ...] = ()  # the frames of each
    path: str = ""  # a file to read


class Told(msgspec.Struct, frozen=True):
    """What came of it until now."""

    refused: tuple[int, ...] = ()  # for each endpoint: connections that failed
    heard: tuple[tuple[bytes, ...], ...] = ()  # messages, from all endpoints
    problem: str = ""


class OtherUser:
    """Runs one job until the end of the context."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-m", "tests.support.other_user"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(msgspec.to_builtins(job)).encode() + b"\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def told(self) -> Told:
        """The next word of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process of uid {UID} has ended"
        return msgspec.json.decode(line, type=Told)

    def told_now(self) -> Told:
        """A word that it says after this call: one is maybe in the pipe, and one in the making."""
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], 0)[0]:
            self.told()
        self.told()
        return self.told()


# --- in the process ---------------------------------------------------------------------------------------------------


class _Side:
    """One socket, made anew when its connection has failed: ZMQ does not always try again."""

    def __init__(self, job: Job, endpoint: str) -> None:
        self._job = job
        self._endpoint = endpoint
        self.refused = 0
        self._open()

    def turn(self) -> list[tuple[bytes, ...]]:
        """Say everything, and return what was heard."""
        heard: list[tuple[bytes, ...]] = []
        try:
            if not self._job.listens:
                for message in self._job.messages:
                    self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
        try:
            while True:
                heard.append(tuple(self._socket.recv_multipart(zmq.NOBLOCK)))
        except zmq.ZMQError:
            pass
        failed = 0
        while self._monitor.poll(0):
            failed += 1
            recv_monitor_message(self._monitor)
        self.refused += failed
        if failed and not self._job.listens:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            self._open()
        return heard

    def _open(self) -> None:
        job = self._job
        self._socket: Any = zmq.Context.instance().socket(job.kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor: Any = self._socket.get_monitor_socket(_FAILED)
        if job.keys:
            keys = ClusterKeys(job.keys)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, job.keys.encode())
            if job.listens:
                self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            else:
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        if job.kind == zmq.SUB:
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        elif job.identity:
            self._socket.setsockopt(zmq.IDENTITY, job.identity)
        if job.listens:
            self._socket.bind(self._endpoint)
        else:
            self._socket.connect(self._endpoint)


def _main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    if job.path:
        try:
            _say(Told(heard=((Path(job.path).read_bytes(),),)))
        except OSError as error:
            _say(Told(problem=type(error).__name__))
        return
    sides = [_Side(job, endpoint) for endpoint in job.endpoints]
    heard: list[tuple[bytes, ...]] = []
    while True:
        for side in sides:
            heard += side.turn()
        _say(Told(tuple(side.refused for side in sides), tuple(heard)))
        time.sleep(_BEAT)


def _say(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
