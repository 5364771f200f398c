"""The HTTP server of every process's metrics port, on threads: the process's loop serves no stranger.

Any process that reaches the port may connect. So the connections at a time, their heads, their lifetimes, their rate
and the threads are all bounded, and each carries one request. Over the limit the oldest connection is closed, first of
those that have sent no request. So strangers that hold every connection keep no scraper out, and each connection lasts
for 160 ms at least, even if they connect as fast as is accepted.
"""

import contextlib
import http.client
import http.server
import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.hosts import host_of_header, is_loopback, names_this_machine
from baton.logs import RateLimitedLog
from baton.unix import NO_DESCRIPTORS

log = logging.getLogger(__name__)
of_strangers = RateLimitedLog(log)

MAX_CONNECTIONS = 64  # at a time
DEADLINE = 5.0  # seconds from the start of a connection to its end, however it is used
_MAX_THREADS = 2 * MAX_CONNECTIONS  # those of connections that were closed may still make their answer
_MAX_HEAD = 16_384  # bytes
_POLL = 0.5  # seconds between two looks for connections past their deadline
_PAUSE = 0.0025  # seconds between two connections: 400 a second, each of which takes 0.4 ms of the process's core
_NO_DESCRIPTORS_PAUSE = 0.5  # seconds without accepting, after the process had no descriptor left


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # further ones


Answerer = Callable[[http.server.BaseHTTPRequestHandler], Answer]


class MetricsServer:
    """Answers each GET by `answer`, on a thread of its own, until `close`."""

    def __init__(self, listener: socket.socket, answer: Answerer) -> None:
        """`listener` listens already, and is closed with the server."""
        self._server = _Server(listener, answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.deadlines)

    def close(self) -> None:
        """End every connection and stop listening."""
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so the connection ends with it. The server bounds all its waits together."""

    default_request_version = "HTTP/1.0"  # so every answer has a status line
    rbufsize = 0  # `_Head` buffers

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        answer = server.answer_of(self)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, text in answer.headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, format: str, *args: object) -> None:
        """A stranger's requests write no lines."""


class _Head(io.BufferedReader):
    """What a connection sends, up to the limit of a head."""

    _left = _MAX_HEAD

    def readline(self, size: int | None = None) -> bytes:
        """Raises HTTPException at the limit, which the handler answers with 431."""
        if not self._left:
            raise http.client.HTTPException(f"a head has at most {_MAX_HEAD} bytes")
        line = super().readline(self._left)  # what asks takes more than that
        self._left -= len(line)
        return line


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False  # threads end when their connections do
    request_queue_size = 256  # 0.64 s of connections

    def __init__(self, listener: socket.socket, answer: Answerer) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_activate()  # with a queue of our own
        self.loopback = is_loopback(listener.getsockname()[0])
        self.deadlines: dict[socket.socket, float] = {}  # of each open connection, by the monotonic clock
        self._answer = answer
        self._with_request: set[socket.socket] = set()  # connections whose request has come
        self._with_thread: set[socket.socket] = set()  # connections that have a thread
        self._lock = threading.Lock()

    def answer_of(self, request: http.server.BaseHTTPRequestHandler) -> Answer:
        with self._lock:
            self._with_request.add(request.connection)
        if self.loopback and not names_this_machine(host_of_header(request.headers.get("Host", ""))):
            # a web page whose name points to loopback (DNS rebinding) could read the answer
            reason = "Host is no name of this machine; use localhost or 127.0.0.1"
            of_strangers.warning("refused %s of %s: %s", request.path, request.client_address[0], reason)
            return Answer(f"{reason}\n".encode(), 403)
        try:
            return self._answer(request)
        except Exception:
            log.exception("failed to answer %s", request.path)
            return Answer(b"failed in this process; its log has the error\n", 500)

    def get_request(self) -> tuple[socket.socket, Any]:
        time.sleep(_PAUSE)
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                of_strangers.warning("no connection is accepted for %.1f s: %s", _NO_DESCRIPTORS_PAUSE, error.strerror)
                time.sleep(_NO_DESCRIPTORS_PAUSE)  # the listener stays readable: without a pause this is a busy loop
            raise  # the caller goes on

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for one more."""
        with self._lock:
            if len(self._with_thread) >= _MAX_THREADS:
                return False
            if len(self.deadlines) >= MAX_CONNECTIONS:
                silent = (each for each in self.deadlines if each not in self._with_request)
                self._end([next(silent, next(iter(self.deadlines)))])
            self._with_thread.add(request)
            self.deadlines[request] = time.monotonic() + DEADLINE
            return True

    def service_actions(self) -> None:
        """End connections past their deadline. The server calls this after every connection and twice a second."""
        now = time.monotonic()
        with self._lock:
            self._end([connection for connection, deadline in self.deadlines.items() if now >= deadline])

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self.deadlines.pop(request, None)
            self._with_request.discard(request)
            self._with_thread.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error of ours; the base class prints a traceback."""

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            self._end(list(self.deadlines))

    def _end(self, connections: list[socket.socket]) -> None:
        """Their threads read the end of the stream, or fail to write, and close them."""
        for connection in connections:
            del self.deadlines[connection]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
