"""The HTTP server of one page, on threads, for processes whose loop must not serve it.

Any process that reaches the port may connect. So the connections at a time, their threads, their lifetimes and their
rate are all bounded. Over the limit the oldest connection is closed. So strangers that hold every connection keep no
scraper out, and each connection lasts for 160 ms at least, even if they connect as fast as is accepted.
"""

import contextlib
import http.server
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from baton.hosts import host_of_header, is_loopback, names_this_machine
from baton.logs import RateLimitedLog
from baton.unix import NO_DESCRIPTORS

log = RateLimitedLog(logging.getLogger(__name__))

MAX_CONNECTIONS = 32  # at a time, and so many threads
DEADLINE = 5.0  # seconds from the start of a connection to its end, however it is used
_POLL = 0.5  # seconds between two looks for connections past their deadline
_PAUSE = 0.005  # seconds between two connections: at most 200 a second, so a flood takes little of the process's core
_NO_DESCRIPTORS_PAUSE = 0.5  # seconds without accepting, after the process had no descriptor left


class MetricsServer:
    """Serves `page` at every path from threads of its own until `close`."""

    def __init__(self, host: str, port: int, page: Callable[[], bytes], content_type: str) -> None:
        """Listen on `host`:`port` (0: any free port). Raises OSError."""
        self._server = _Server(host, port, page, content_type)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.deadlines)

    def close(self) -> None:
        """End every connection and stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so the connection ends with it."""

    timeout = DEADLINE  # of one read or write; the server bounds their sum

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        if server.loopback and not names_this_machine(host_of_header(self.headers.get("Host", ""))):
            self.send_error(403, "Host is no name of this machine")  # a web page whose name points to loopback
            return
        body = server.page()
        self.send_response(200)
        self.send_header("Content-Type", server.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A stranger's requests write no lines."""


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False  # threads end when their connections do
    request_queue_size = 128

    def __init__(self, host: str, port: int, page: Callable[[], bytes], content_type: str) -> None:
        self.page, self.content_type = page, content_type
        self.loopback = is_loopback(host)
        self.deadlines: dict[socket.socket, float] = {}  # of each open connection, by the monotonic clock
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, as HTTPServer does: that may take seconds."""
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        time.sleep(_PAUSE)
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                log.warning("no connection is accepted for %.1f s: %s", _NO_DESCRIPTORS_PAUSE, error.strerror)
                time.sleep(_NO_DESCRIPTORS_PAUSE)  # the listener stays readable: without a pause this is a busy loop
            raise  # the caller goes on

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for one more."""
        with self._lock:
            if len(self.deadlines) >= MAX_CONNECTIONS:
                oldest = next(iter(self.deadlines))
                del self.deadlines[oldest]
                self._end([oldest])
            self.deadlines[request] = time.monotonic() + DEADLINE
            return True

    def service_actions(self) -> None:
        """End connections past their deadline. The server calls this after every connection and twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [connection for connection, deadline in self.deadlines.items() if now >= deadline]
            self._end(late)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self.deadlines.pop(request, None)
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
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
