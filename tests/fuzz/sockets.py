"""Raw connections with a deadline for everything, and what an HTTP server may answer on one."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.fuzz.case import Case

SILENCE = 45.0  # seconds in which a server must answer or close; it bounds heads by 15 s and bodies by 30 s


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, as far as it was read."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


def connect(address: str) -> socket.socket:
    """A connection to host:port, or to the Unix socket that "unix:PATH" names."""
    if address.startswith("unix:"):
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(SILENCE)
        local.connect(address.removeprefix("unix:"))
        return local
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=SILENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(case: Case, connection: socket.socket, piece: bytes) -> bool:
    """Send a piece; False when the server has closed, which it may at any time."""
    connection.settimeout(SILENCE)  # a read before may have had a shorter one
    try:
        connection.sendall(case.sending(piece))
    except TimeoutError:
        raise AssertionError(f"the server has read nothing for {SILENCE} s, and not closed") from None
    except OSError:
        return False
    return True


def drain(connection: socket.socket, seconds: float = SILENCE) -> bytes:
    """Read until the server closes. Raises AssertionError when it does not, though nothing is to come."""
    until, read = time.monotonic() + seconds, bytearray()
    while True:
        connection.settimeout(max(0.01, until - time.monotonic()))
        try:
            piece = connection.recv(65_536)
        except TimeoutError:
            raise AssertionError(
                f"the connection is still open after {seconds} s; read {bytes(read[:500])!r}"
            ) from None
        except OSError:
            return bytes(read)
        if not piece:
            return bytes(read)
        read += piece
        del read[2**20 :]


def reply(
    connection: socket.socket, method: str = "POST", patience: Callable[[], float] = lambda: SILENCE
) -> Reply | None:
    """Read one answer; None when the server has closed without one. An answer that is not whole in time is told so."""
    connection.settimeout(patience())
    response = http.client.HTTPResponse(connection, method=method)
    body = bytearray()
    try:
        try:
            response.begin()
        except TimeoutError:
            return Reply(0, {}, b"", whole=False)
        except (OSError, http.client.HTTPException):
            return None
        headers = {name.lower(): value for name, value in response.getheaders()}
        whole = True
        try:
            while piece := response.read1(65_536):
                body += piece
                connection.settimeout(max(0.01, patience()))
        except TimeoutError:
            whole = False
        except (OSError, http.client.HTTPException):
            pass
        return Reply(response.status, headers, bytes(body), whole)
    finally:
        with suppress(OSError):
            response.close()


def check(answer: Reply) -> None:
    """Raise AssertionError for a server's own failure, or an error that is not in the shape of one."""
    head = answer.body[:2_000]
    assert answer.status < 500, f"status {answer.status}: {head!r}"
    assert answer.status == 0 or answer.status >= 200, f"status {answer.status}"
    for word in (b"Traceback", b"internal error", b'File "/', b"object at 0x"):
        assert word not in answer.body, f"{word!r} in an answer of status {answer.status}: {head!r}"
    if answer.status >= 400 and answer.whole and answer.body and "json" in answer.headers.get("content-type", ""):
        try:
            content = json.loads(answer.body)
        except ValueError:
            raise AssertionError(f"an error of status {answer.status} is no JSON: {head!r}") from None
        error = content.get("error") if isinstance(content, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        assert isinstance(message, str), f"an error without a message: {head!r}"
        assert message, f"an error without a message: {head!r}"
        assert len(message) < 4_000, f"an error of {len(message)} characters"
