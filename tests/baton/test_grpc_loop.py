import array
import asyncio
import fcntl
import socket
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.grpc_loop import GrpcEventLoop

CALLS = 200
LINES = "/test.Lines/Line"


class _RecordingLoop(GrpcEventLoop):
    """Keeps the sockets that readers were added for."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        super().__init__()

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        if isinstance(fd, socket.socket):
            self.sockets.append(fd)
        super().add_reader(fd, callback, *args)


class _WaitingServer:
    """Answers every call once `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.waiting = threading.Semaphore(0)

    def answer(self, request: bytes, context: Any) -> bytes:
        self.waiting.release()
        self.release.wait(60)
        return request

    @contextmanager
    def listening(self) -> Iterator[str]:
        server = grpc.server(ThreadPoolExecutor(CALLS))
        handler = grpc.unary_unary_rpc_method_handler(self.answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Lines", {"Line": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.release.set()
            server.stop(0).wait(30)


def _unread(wakeups: socket.socket) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(wakeups, termios.FIONREAD, size)
    return size[0]


def _unread_once_there_are(count: int, wakeups: socket.socket) -> int:
    """Keep the loop from running meanwhile."""
    until = time.monotonic() + 60
    while (unread := _unread(wakeups)) < count and time.monotonic() < until:
        time.sleep(0.001)
    return unread


@pytest.mark.timeout(120)
def test_a_burst_of_grpc_events_takes_one_turn_of_the_loop() -> None:
    server = _WaitingServer()

    async def burst(address: str) -> list[bytes]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _RecordingLoop)
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(LINES)
            answers = [asyncio.ensure_future(call(b"%d" % number, timeout=100)) for number in range(CALLS)]
            for _ in answers:
                assert await asyncio.to_thread(server.waiting.acquire, timeout=60)
            wakeups = loop.sockets[-1]
            server.release.set()
            before = _unread_once_there_are(CALLS // 2, wakeups)
            assert before >= CALLS // 2
            for _ in range(2):
                await asyncio.sleep(0)
            assert _unread(wakeups) < before // 2
            return await asyncio.gather(*answers)

    with server.listening() as address, asyncio.Runner(loop_factory=_RecordingLoop) as runner:
        assert runner.run(burst(address)) == [b"%d" % number for number in range(CALLS)]
