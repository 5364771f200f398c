"""Raw bytes on every TCP port without keys: HTTP to the pages of metrics, and what is no ZMQ to ZMQ's ports."""

from collections.abc import Sequence
from contextlib import suppress

from tests.fuzz import sockets, values
from tests.fuzz.case import Case

_GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01"
_MECHANISMS = (b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"\xff" * 20, b"")


class PlainPorts:
    """A stranger on loopback."""

    threads = 3

    def __init__(self, pages: Sequence[str], zmq: Sequence[str]) -> None:
        """`pages` are host:port that serve HTTP, `zmq` endpoints."""
        self._pages = list(pages)
        self._zmq = [endpoint.removeprefix("tcp://") for endpoint in zmq]

    def run(self, case: Case) -> str:
        return self._page(case) if case.rng.random() < 0.5 else self._greeting(case)

    def _page(self, case: Case) -> str:
        """A request for a page, whole or broken. The page must come for a whole one."""
        rng = case.rng
        path = rng.choice(["/metrics", "/discovery", "/", "/x", "/metrics?name[]=x", "/%00", "*", "/" + "a" * 9_000])
        method = rng.choice(["GET", "GET", "GET", "HEAD", "POST", "PUT", "OPTIONS", "X"])
        raw = f"{method} {path} HTTP/1.{rng.randrange(2)}\r\nHost: {rng.choice(['x', 'x', '', '%'])}\r\n\r\n".encode()
        broken = rng.random() < 0.4
        if broken:
            raw = values.damaged(rng, raw) if rng.random() < 0.7 else values.data(rng, 70_000)
        with sockets.connect(rng.choice(self._pages)) as connection:
            sockets.send(case, connection, raw)
            with suppress(OSError):
                connection.shutdown(1)
            read = sockets.drain(connection)
        status = int(read[9:12]) if read.startswith(b"HTTP/1") and read[9:12].isdigit() else 0
        # Python's own server of pages answers methods that it lacks with 501; an HTTP version beyond its own with 505.
        assert status < 500 or status in (501, 505), f"status {status}: {read[:500]!r}"
        assert b"Traceback" not in read, read[:2_000]
        return f"page {status}"

    def _greeting(self, case: Case) -> str:
        """The beginning of ZMQ's handshake, and then anything. The port must close."""
        rng = case.rng
        raw = _GREETING + rng.choice(_MECHANISMS).ljust(20, b"\0") + bytes([rng.randrange(2)]) + b"\0" * 31
        for _ in range(rng.choice([0, 1, 3])):
            flags, body = rng.choice([0, 1, 2, 4, 5, 6, 0xFF]), values.data(rng, 400)
            raw += bytes([flags, len(body) % 256]) + rng.choice([b"\x05HELLO", b"\x05READY", b""]) + body
        if rng.random() < 0.3:
            raw = values.damaged(rng, raw)
        if rng.random() < 0.1:
            raw = values.data(rng, 70_000)
        with sockets.connect(rng.choice(self._zmq)) as connection:
            sockets.send(case, connection, raw)
            with suppress(OSError):
                connection.shutdown(1)
            sockets.drain(connection)
        return "greeting"
