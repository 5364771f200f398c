"""How many connections a door holds, and which of them go first.

A connection *waits for its client* unless a request of it is being served: it is new, idle, in the middle of a head, or
its client does not read. A client without a key can bring a connection into no other state for longer than an answer
takes. So whenever places or memory run out, connections that wait are closed, the longest first.
"""

# pyright: strict

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

SPARE = 64  # connections beyond the configured ones, for health checks and operators
OPERATORS = SPARE // 2  # of them
HELD = 64 * 2**20  # bytes that all connections that wait may hold: unfinished heads, answers that are not read


class Closable(Protocol):
    def abort(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Places(Generic[C]):
    """The connections that wait for their clients, the longest first."""

    def __init__(self, most: int, held: int = HELD) -> None:
        """`most`: connections that may be served at a time, besides health checks and operators."""
        self.most = most
        self._most_held = held
        self._held = 0
        self._waiting: dict[C, int] = {}  # with the bytes that each holds

    def enter(self, connection: C, count: int) -> bool:
        """Add a new connection, and close another one where there are more than there may be. `count` includes it.

        Return False if all others are served: then the new one has no place."""
        if count > self.most + SPARE:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self._close(oldest)
        self._waiting[connection] = 0
        return True

    def waits(self, connection: C, held: int) -> None:
        """Note that a connection waits for its client and holds so many bytes. A turn in the line is kept."""
        self._held += held - self._waiting.get(connection, 0)
        self._waiting[connection] = held
        while self._held > self._most_held:
            self._close(next(other for other, size in self._waiting.items() if size))

    def leave(self, connection: C) -> None:
        """Note that a connection is served, or has ended."""
        self._held -= self._waiting.pop(connection, 0)

    def _close(self, connection: C) -> None:
        self.leave(connection)
        connection.abort()
