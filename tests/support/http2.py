"""The frames of HTTP/2 that a test of a gRPC server needs, for clients that no library would be."""

import contextlib
import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 4  # a setting


class Http2Client:
    """A connection that answers pings and settings, and reads no byte of an answer: its window is 0."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=60)
        self._socket.sendall(PREFACE + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, 0)))
        self.open = True  # as far as the reader knows
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, path: str, message: bytes | None, stream: int = 1) -> None:
        """Begin a gRPC call; with None, send no message."""
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        block = b"".join(b"\x10" + _text(name) + _text(value) for name, value in fields.items())
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, block))
        if message is not None:
            body = b"\0" + struct.pack(">I", len(message)) + message
            self._socket.sendall(_frame(_DATA, _END_STREAM, stream, body))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(60)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while len(head := stream.read(9)) == 9:
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                payload = stream.read(length)
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    self._socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        self.open = False


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """A string of HPACK of less than 127 bytes."""
    return bytes([len(text)]) + text.encode()
