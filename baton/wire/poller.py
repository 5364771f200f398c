"""Waiting for links and plain file descriptors together."""

from __future__ import annotations

from typing import Any

import zmq

from baton.wire.links import Link


class Poller:
    """Waits until one of some links and file descriptors can be read."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, source: Link[Any] | int) -> None:
        self._poller.register(source.socket if isinstance(source, Link) else source, zmq.POLLIN)

    def remove(self, source: Link[Any] | int) -> None:
        self._poller.unregister(source.socket if isinstance(source, Link) else source)

    def wait(self, seconds: float) -> set[int | Link[Any]]:
        """What can be read, after at most `seconds`; file descriptors by number, anything of ZMQ as its socket."""
        return {source for source, _ in self._poller.poll(max(0, int(seconds * 1_000)))}
