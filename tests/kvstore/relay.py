"""What lies between two stores in their tests: a relay of TCP connections that can fail them."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_PATIENCE = 20.0  # seconds for its threads to end


class Relay:
    """A cable between a store and another: it can flip a bit, be cut, go silent and be restored."""

    def __init__(self, target: str) -> None:
        self._target = int(target.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._flip = 0
        self.carried = 0  # bytes to those that ask
        self._on = threading.Event()
        self._on.set()
        self._ended = False
        self._start(self._accept)

    def flip_after(self, size: int) -> None:
        """Flip one bit after so many more bytes to those that ask."""
        self._flip = size

    def silence(self) -> None:
        """Carry nothing more, without telling either end."""
        self._on.clear()

    def restore(self) -> None:
        """Carry on after a silence."""
        self._on.set()

    def cut(self) -> None:
        """End every connection; new ones are welcome."""
        self._on.set()
        for each in self._open:
            _shut(each)

    def close(self) -> None:
        self._ended = True
        _shut(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(_PATIENCE)
        for each in (self._listener, *self._open):
            each.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            self._start(self._carry, near, far, False)
            self._start(self._carry, far, near, True)

    def _carry(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        try:
            while data := source.recv(2**16):
                self._on.wait()
                if back:
                    self.carried += len(data)
                    if 0 < self._flip <= len(data):
                        spoilt = bytearray(data)
                        spoilt[self._flip - 1] ^= 4
                        data = bytes(spoilt)
                    self._flip = max(0, self._flip - len(data))
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            _shut(each)


def _shut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
