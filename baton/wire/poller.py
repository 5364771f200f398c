"""Waiting for links and plain file descriptors together."""

from typing import Any, Protocol

import zmq


class HasSocket(Protocol):
    """A link, or whatever else has one socket to be read."""

    @property
    def socket(self) -> zmq.Socket[Any]: ...


class Poller:
    """Waits until one of some links and file descriptors can be read."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, source: HasSocket | int) -> None:
        self._poller.register(source if isinstance(source, int) else source.socket, zmq.POLLIN)

    def remove(self, source: HasSocket | int) -> None:
        self._poller.unregister(source if isinstance(source, int) else source.socket)

    def wait(self, seconds: float) -> set[int | zmq.Socket[Any]]:
        """What can be read, after at most `seconds`; file descriptors by number, anything of ZMQ as its socket."""
        return {source for source, _ in self._poller.poll(max(0, int(seconds * 1_000)))}
