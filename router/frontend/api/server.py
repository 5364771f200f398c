"""The listener of an HTTP API, and its connections: uvicorn's, with the bounds that it lacks, and closer to RFC 9112.

Any process that reaches the port may connect, and the loop that serves it also streams all tokens. So a connection
holds a bounded number of headers and bytes of each head, trailer and queue of requests, and each of its states but one
has a deadline. `Places` bounds what all connections hold together.

| state | ends by |
|---|---|
| waiting for a head, or for its rest | `HEAD_SECONDS`, counted from the connection's or the head's first byte |
| reading a body | the deadline of `gates.py`; a path that reads none answers at once, and then closes |
| answering | the answer's end; `UNREAD_SECONDS` while the client does not read |
| idle | `KEEP_ALIVE` |
| closing | `LINGER_SECONDS` if the client may still send, `LAST_UNREAD_SECONDS` while it does not read |

A connection *waits for its client* unless a request of it is being served: it is new, idle, in the middle of a head, or
its client does not read. A client without a key can bring a connection into no other state for longer than an answer
takes. So whenever places or memory run out, connections that wait are closed, the longest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
from asyncio import sslproto
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.doors import ServerTls
from baton.logs import RateLimitedLog
from baton.unix import NO_DESCRIPTORS
from router.frontend.api import errors

log = RateLimitedLog(logging.getLogger(__name__))

HANDSHAKES = 256  # of TLS that are not finished, at a time
HANDSHAKE_SECONDS = 10.0
_TLS_END_SECONDS = 5.0  # in which a client must confirm the end of its TLS
_TLS_BUFFER = 64 * 2**10  # bytes that asyncio takes for each TLS connection; its own 256 KiB would be 1 GiB for 4,096
_ACCEPTED = 16  # connections accepted in one turn of the loop
_PAUSE = 0.5  # seconds without accepting, after the process had no descriptor left
_GRACE = 1  # seconds that clients get to read how their streams ended
KEEP_ALIVE = 75  # seconds that a connection may be idle between requests; load generators keep theirs that long
ENDING_SECONDS = 1  # the same once the server takes no more connections
HEAD_SECONDS = 15.0  # in which a new connection's first request, and each request's head, must have come
UNREAD_SECONDS = 60.0  # in which a client must read something while its answer comes
LINGER_SECONDS = 5.0  # in which a client may go on sending what nothing reads
LAST_UNREAD_SECONDS = 30.0  # in which the client of a closed connection must have read something
MAX_HEADERS = 128  # of a request, and as many trailers
_HEAD_BYTES = 64 * 2**10  # of a head, of all trailers, and of anything else between two parts of a body
_SLICE = 16 * 2**10  # bytes that are parsed between two looks at these bounds
_PIPELINED = 32  # requests that wait for the one before them
_CYCLE_BYTES = 4 * 2**10  # that such a request takes, about
_DROPPED = 256 * 2**20  # bytes of a client that goes on sending after its last answer
_NOT_HTTP = "these bytes are no HTTP/1.1 request"
SPARE = 64  # connections beyond the configured ones, for health checks and operators
OPERATORS = SPARE // 2  # of them
HELD = 64 * 2**20  # bytes that all connections that wait may hold: unfinished heads, answers that are not read


class ApiServer:
    """The server. It listens on one address and ends with the router."""

    def __init__(self, app: ASGIApp, max_connections: int, tls: ServerTls | None = None) -> None:
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
        )
        self._config.load()
        self._server = _UvicornServer(self._config)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._places: Places = Places(min(max_connections, descriptors // 2))
        self._tls = tls
        if tls is not None:
            sslproto.SSLProtocol.max_size = _TLS_BUFFER
        self._beginning: dict[asyncio.Task[None], None] = {}  # connections, until TLS is agreed on; the oldest first
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections from a socket that listens."""
        self._listener = listener
        self._tasks = [asyncio.create_task(self._accept(listener)), asyncio.create_task(self._server.serve([listener]))]

    def refuse_connections(self) -> None:
        """Stop listening: others that listen at the port get what comes from now on. Connections end with their next
        answer, or soon."""
        with contextlib.suppress(OSError):
            while True:  # until none waits: closing the socket would reset them
                self._take(self._listener.accept()[0])
        # The task that accepts is not cancelled: it may hold a connection already.
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        ending, state = (b"connection", b"close"), self._server.server_state
        self._config.encoded_headers.append(ending)  # of all answers, from uvicorn's next second on
        state.default_headers = [*state.default_headers, ending]
        self._config.timeout_keep_alive = ENDING_SECONDS
        for connection in self._server.server_state.connections:
            assert isinstance(connection, Connection)
            connection.end_soon()

    @property
    def has_connections(self) -> bool:
        return bool(self._beginning or self._server.server_state.connections)

    async def stop(self) -> None:
        """Stop listening, let clients read how their streams ended, and end."""
        if self._tasks:
            accepting, serving = self._tasks
            for task in (accepting, *self._beginning):
                task.cancel()
            await asyncio.gather(accepting, *self._beginning, return_exceptions=True)
            self._server.should_exit = True
            await serving

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(_ACCEPTED):
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno in NO_DESCRIPTORS:
                        log.warning("no connection is accepted for %.1f s: %s", _PAUSE, error.strerror)
                        await asyncio.sleep(_PAUSE)
                    if listener.fileno() < 0:
                        return
                    continue
                self._take(connection)
            await asyncio.sleep(0)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        begun = asyncio.create_task(self._begin(connection))
        self._beginning[begun] = None
        begun.add_done_callback(lambda task: self._beginning.pop(task, None))
        if len(self._beginning) > HANDSHAKES:
            oldest = next(iter(self._beginning))
            del self._beginning[oldest]
            oldest.cancel()

    async def _begin(self, connection: socket.socket) -> None:
        """Give a connection to a protocol, once TLS is agreed on."""
        more = {}
        if self._tls is not None:
            more = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
            more |= {"ssl_shutdown_timeout": _TLS_END_SECONDS}
        with contextlib.suppress(OSError):  # a handshake that failed, or came too late
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, connection, **more)

    def _connection(self) -> Connection:
        return Connection(self._config, self._server.server_state, self._places)


class _UvicornServer(uvicorn.Server):
    """A server whose process handles its own signals, and accepts its connections itself."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Places:
    """The connections that wait for their clients, the longest first."""

    def __init__(self, most: int, held: int = HELD) -> None:
        """`most`: connections that may be served at a time, besides health checks and operators."""
        self.most = most
        self._most_held = held
        self._held = 0
        self._waiting: dict[Connection, int] = {}  # with the bytes that each holds

    def enter(self, connection: Connection, count: int) -> bool:
        """Add a new connection, and close another one where there are more than there may be. `count` includes it.

        Return False if all others are served: then the new one has no place."""
        if count > self.most + SPARE:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self._close(oldest)
        self._waiting[connection] = 0
        return True

    def waits(self, connection: Connection, held: int) -> None:
        """Note that a connection waits for its client and holds so many bytes. A turn in the line is kept."""
        self._held += held - self._waiting.get(connection, 0)
        self._waiting[connection] = held
        while self._held > self._most_held:
            self._close(next(other for other, size in self._waiting.items() if size))

    def leave(self, connection: Connection) -> None:
        self._held -= self._waiting.pop(connection, 0)

    def _close(self, connection: Connection) -> None:
        self.leave(connection)
        connection.abort()


class ClosingTransport:
    """A transport whose `close` lets the client read the last answer. Everything else is the transport's own.

    A socket that is closed while its client still sends is reset, and a reset destroys what the client has not read.
    So the server first says that it will send no more, and then drops what still comes."""

    def __init__(self, transport: asyncio.Transport, still_sends: Callable[[], bool]) -> None:
        """`still_sends` tells whether the client may be in the middle of a request."""
        self._transport = transport
        self._still_sends = still_sends
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        """Send what is written, and end the connection once the client has read it."""
        if self._closed:
            return
        self._closed = True
        self.write = _drop
        transport = self._transport
        if self._still_sends() and not transport.is_closing():
            if transport.can_write_eof():
                with contextlib.suppress(OSError):  # the client has gone
                    transport.write_eof()
            transport.resume_reading()
            self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)
        else:
            transport.close()
            self._until_read(math.inf)

    def lost(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _until_read(self, before: float) -> None:
        """Abort the connection if its client reads nothing for so long. asyncio itself would wait for ever."""
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self._transport.abort()
        elif left:
            self._timer = asyncio.get_running_loop().call_later(LAST_UNREAD_SECONDS, self._until_read, left)


def _drop(data: object) -> None:
    pass


class Connection(HttpToolsProtocol):
    """One connection. It waits for its client, or serves one request after the other."""

    def __init__(self, config: Config, state: ServerState, places: Places) -> None:
        super().__init__(config, state, {})
        self._places = places
        self._why: tuple[int, str] | None = None  # a callback of the parser refuses the request: status and message
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._headers = 0  # of this head, or trailers of this body
        self._header_bytes = 0
        self._quiet = 0  # bytes since the parser last completed a head, a part of a body, or a request
        self._completed = False  # it did so in this slice
        self._ended = False  # nothing more is read
        self._dropped = 0  # bytes that came after that

    # --- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(ClosingTransport(transport, lambda: self._in_body or self._ended))  # type: ignore[arg-type]
        if self._places.enter(self, len(self.connections)):
            self._await_head()
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        self._got_head()
        self._unset_keepalive_if_required()
        self._reads()
        self.transport.lost()  # type: ignore[attr-defined]
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    def end_soon(self) -> None:
        """Wait for the client's next request for no longer than `ENDING_SECONDS`. Closing at once would lose a request
        that is on its way."""
        self.timeout_keep_alive = ENDING_SECONDS
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(ENDING_SECONDS, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._places.waits(self, self._held)
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads()
        if self._serves:
            self._places.leave(self)

    def _reads(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    @property
    def _serves(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _held(self) -> int:
        """Bytes that this connection holds for its client, about."""
        return self.transport.get_write_buffer_size() + self._quiet + _CYCLE_BYTES * len(self.pipeline)

    # --- what comes --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ended or self.transport.is_closing():
            self._dropped += len(data)
            if self._dropped > _DROPPED:
                self.abort()
            return
        self._unset_keepalive_if_required()
        if not self._serves and self._head_timer is None:
            self._await_head()
        try:
            for at in range(0, len(data), _SLICE):
                self._feed(data[at : at + _SLICE])
        except httptools.HttpParserError:
            self._refuse(*(self._why or (400, _NOT_HTTP)))
        if not self._serves:
            self._places.waits(self, self._held)

    def _feed(self, data: bytes) -> None:
        """Parse a slice. Raises HttpParserError, with `_why` if the parser itself found nothing wrong."""
        self._completed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # to h2c, websocket: the request is served as it is
            self._feed(self._head_without_upgrade() + data[upgrade.args[0] :])
            return
        self._quiet = 0 if self._completed else self._quiet + len(data)
        if self._quiet > _HEAD_BYTES:
            self._check_size(self._quiet)

    def _head_without_upgrade(self) -> bytes:
        """The head that was just read, for a new parser: the old one takes what follows for another protocol."""
        start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%s: %s" % header for header in self.headers if header[0] not in (b"upgrade", b"http2-settings")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([start, *lines, b"", b""])

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _got_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        if self._quiet:
            self._refuse(408, f"the request's head did not come within {HEAD_SECONDS:g} s")
        elif not self._serves:
            self.abort()

    # --- what the parser finds ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] = {"abort": self.abort}
        self._headers = self._header_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        self._check_size(self._header_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        self._check_size(self._header_bytes)
        if not self._in_body:  # a trailer is none of the request's headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(405, "this server is no proxy; CONNECT is not served")
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._stop(400, f"the request has {hosts} Host headers; send one")
        if len(self.pipeline) >= _PIPELINED:
            self._stop(429, f"{_PIPELINED} requests of this connection wait already; read their answers first")
        super().on_headers_complete()
        self._got_head()
        self._in_body = self._completed = True
        self._headers = self._header_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._completed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # it is read again
            return
        self._in_body, self._completed = False, True
        super().on_message_complete()

    def _check_size(self, size: int) -> None:
        what = "trailers" if self._in_body else "head"
        if size > _HEAD_BYTES:
            self._stop(431, f"the request's {what} has more than {_HEAD_BYTES} bytes; send less")
        if self._headers > MAX_HEADERS:
            self._stop(431, f"the request's {what} has more than {MAX_HEADERS} headers; send fewer")

    def _stop(self, status: int, message: str) -> None:
        """Stop the parser. Raises HttpParserError, also through the parser, which says nothing of its own."""
        self._why = (status, message)
        raise httptools.HttpParserError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, or one that is too large, and read nothing more."""
        self._ended = True
        self._got_head()
        cycle = self.cycle
        if self._serves and not cycle.more_body:  # the request before is answered first
            cycle.keep_alive = False
            return
        if self._serves and (cycle.response_started or self.pipeline):
            self.abort()
            return
        if self._serves:
            cycle.disconnected = True
            cycle.message_event.set()
        body = msgspec.json.encode(errors.described(status, message))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    # --- answers -----------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._places.leave(self)
        cycle.scope.setdefault("state", {})["places"] = self._places.most - len(self.tasks)
        super()._start_asgi_task(cycle, _Exchange(cycle, app))  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        self._places.waits(self, self._held)
        super().on_response_complete()


class _Exchange:
    """The application, for one request."""

    def __init__(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self._cycle = cycle
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, until_close = self._cycle, False

        def answered(message: Message) -> Awaitable[None]:
            nonlocal until_close
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if cycle.more_body:  # what follows would have to be read before another request
                    message["headers"] = [*headers, (b"connection", b"close")]
                if scope["http_version"] == "1.0" and not any(name.lower() == b"content-length" for name, _ in headers):
                    until_close, cycle.chunked_encoding = True, False  # HTTP/1.0 has no chunks
            elif until_close:
                cycle.expected_content_length = len(message.get("body", b""))
            return send(message)

        await self._app(scope, receive, answered)
