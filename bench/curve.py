"""What encryption (CURVE) costs on the decode path: the tokens of a step, from decode worker to router.

    python -m bench.curve [--quick] [--models tiny,100m]

One process sends the message of a decode step with 1 or 24 sequences, a message each `PACE`, to another one, over TCP
on loopback, over TCP with CURVE, and over a Unix socket (ipc). The ways take turns: a machine that others use, too, is
slow to all of them alike. In one more way the sender does all the same but send, and that is subtracted.

`sender` and `receiver` are the CPU time of a whole process for one message, with that of ZMQ's own thread, which
encrypts; `loop` is that of the sender's main thread alone, which in a decode worker runs the steps. `CURVE adds` is the
sender's difference between TCP with CURVE and without; its `limit` is the time of a decode step of as many
sequences in the bare engine with one thread, measured in the same turns, and `ratio` the share of a step that CURVE
takes. The first turn is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import zmq

from baton.messages import Delta, Envelope, Tokens
from baton.wire import ClusterKeys, use_keys
from baton.wire.sockets import bind, configure, connect
from bench import models, report
from bench.bare import BareEngine

SEQUENCES = (1, 24)  # in a step
PACE = 0.001  # seconds between two messages: about a step of the demo model
TARGET = 0.03
_PROMPT, _OUTPUT = 64, 64  # tokens, of the engine's sequences
_TCP, _CURVE, _IPC, _UNSENT = "tcp", "tcp with CURVE", "ipc", "not sent"
_ENDS = ("loop", "sender", "receiver")
_WAYS = (_UNSENT, _TCP, _CURVE, _IPC)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns: a look, not a measurement")
    parser.add_argument("--models", default="tiny,100m", help="whose steps: as bench/models.py knows them")
    asked = parser.parse_args(argv)
    report.say(report.machine())
    turns, count = (5, 500) if asked.quick else (11, 1_000)
    for result in measure(asked.models.split(","), turns, count):
        report.emit(result)
    return 0


def measure(names: Sequence[str], turns: int, count: int) -> list[report.Result]:
    """Medians over that many turns of `count` messages each way, and of as many steps of each model's engine."""
    cpu: dict[tuple[str, int, str], list[float]] = {}  # by end, sequences and way: microseconds
    steps: dict[tuple[str, int], list[float]] = {}  # by model and sequences: microseconds
    with ExitStack() as cleanup:
        ends = cleanup.enter_context(_Ends())
        engines = {name: cleanup.enter_context(BareEngine(models.directory(name), "auto", 1)) for name in names}
        for turn in range(turns + 1):
            for sequences in SEQUENCES:
                taken = {way: ends.run(way, sequences, count) for way in _WAYS}
                seconds = {name: _step(engine, sequences) for name, engine in engines.items()}
                if not turn:
                    continue
                for way in (_TCP, _CURVE, _IPC):
                    for end, used, idle in zip(_ENDS, taken[way], taken[_UNSENT], strict=True):
                        cpu.setdefault((end, sequences, way), []).append((used - idle) * 1e6)
                for name, each in seconds.items():
                    steps.setdefault((name, sequences), []).append(each * 1e6)
    results = [
        report.median_of("curve", f"{end}, {sequences} sequences, {way}", "us", runs)
        for (end, sequences, way), runs in cpu.items()
    ]
    for (name, sequences), runs in steps.items():
        plain, encrypted = cpu["sender", sequences, _TCP], cpu["sender", sequences, _CURVE]
        added = [more - less for more, less in zip(encrypted, plain, strict=True)]
        told = report.median_of("curve", f"CURVE adds, {sequences} sequences, step of {name}", "us", added)
        told = replace(told, limit=statistics.median(runs), ratio=told.value / statistics.median(runs))
        results.append(report.judged(told, TARGET, "low"))
    return results


def _step(engine: BareEngine, sequences: int) -> float:
    """Seconds of a decode step, the median of some."""
    prompts = [[3 + (each + position) % 200 for position in range(_PROMPT)] for each in range(sequences)]
    return statistics.median(engine.generate(prompts, _OUTPUT).gaps)


class _Ends:
    """The two processes, which end with this context."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        (self._sender, its_sender), (self._receiver, its_receiver) = spawn.Pipe(), spawn.Pipe()
        self._keys = ClusterKeys.generate().secret
        self._folder = tempfile.TemporaryDirectory(prefix="curve-")
        self._sides = [
            spawn.Process(target=_send, args=(its_sender, self._keys)),
            spawn.Process(target=_receive, args=(its_receiver, self._keys, self._folder.name)),
        ]

    def __enter__(self) -> _Ends:
        for side in self._sides:
            side.start()
        self._sender.send(self._receiver.recv())  # where the receiver listens
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides:
            side.kill()
            side.join()
        self._folder.cleanup()

    def run(self, way: str, sequences: int, count: int) -> tuple[float, float, float]:
        """CPU seconds for one message, of each of `_ENDS`."""
        expected = 0 if way == _UNSENT else count
        self._receiver.send((way, expected))
        self._receiver.recv()  # its clock runs
        self._sender.send((way, sequences, count))
        loop, sent = self._sender.recv()
        if not expected:
            self._receiver.send("")
        return loop / count, sent / count, self._receiver.recv() / count


def message(sequences: int, step: int) -> bytes:
    """What a decode worker says of one step, as it is sent."""
    deltas = tuple(Delta(f"{request:016x}", 1, 500 + step, (request,)) for request in range(sequences))
    sender, addressee = (f"{process}.{'0' * 16}" for process in ("decode-0", "router"))
    return msgspec.msgpack.encode(Envelope(sender, addressee, step, Tokens(step, deltas)))


def _send(parent: Connection, keys: str) -> None:
    use_keys(ClusterKeys(keys))
    sockets: dict[str, zmq.Socket[bytes]] = {}
    for way, endpoint in parent.recv().items():
        socket = sockets[way] = configure(zmq.Context.instance().socket(zmq.DEALER))
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(8))
        connect(socket, endpoint) if way == _CURVE else socket.connect(endpoint)
    while True:
        way, sequences, count = parent.recv()
        socket = sockets.get(way)
        began = time.thread_time(), time.process_time()
        for step in range(count):
            body = message(sequences, step)
            if socket is not None:
                socket.send(body)
            time.sleep(PACE)
        parent.send((time.thread_time() - began[0], time.process_time() - began[1]))


def _receive(parent: Connection, keys: str, folder: str) -> None:
    use_keys(ClusterKeys(keys))
    sockets = {way: configure(zmq.Context.instance().socket(zmq.ROUTER)) for way in (_TCP, _CURVE, _IPC)}
    sockets[_TCP].bind("tcp://127.0.0.1:*")
    sockets[_IPC].bind(f"ipc://{Path(folder) / str(os.getpid())}")
    endpoints = {way: sockets[way].getsockopt_string(zmq.LAST_ENDPOINT) for way in (_TCP, _IPC)}
    parent.send({**endpoints, _CURVE: bind(sockets[_CURVE], "tcp://127.0.0.1:0")})
    while True:
        way, expected = parent.recv()
        began = time.process_time()
        parent.send("")
        for _ in range(expected):
            sockets[way].recv_multipart()
        if not expected:
            parent.recv()
        parent.send(time.process_time() - began)


if __name__ == "__main__":
    sys.exit(main())
