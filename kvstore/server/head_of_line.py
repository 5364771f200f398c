"""The one prompt of a node that may hold pages while it waits for slots. Pure.

Prompts of several writes reserve their slots write by write. Two that together exceed the arena could each
hold what the other one lacks. So the store keeps a line, of which it knows the head alone:

    a Reserve is refused ──no head──▶ `full`: this prompt is the head; it keeps what it holds, and asks again
                         ──a head───▶ `behind`: this prompt gives back what it holds, and asks again

While the head waits, no other prompt gets a slot. Progress is certain. Of the prompts that have slots, each writes its
pages without waiting for anything but its device, and then is done, or is refused and gives back. So the number of
prompts that hold pages falls until the head gets its slots. It remains the head until all of its pages are written, and
its chain fits into the arena by itself. Then it leaves, and another prompt takes its place.

The head has a number of its worker's, which is kept like a lease. The place is free as soon as the worker forgets that
number, leaves it out of its heartbeat, or disconnects.
"""

# pyright: strict

from collections.abc import Collection

from kvstore.server.leases import ClientProcess


class HeadOfLine:
    """At most one prompt, which waits for slots or has done so."""

    def __init__(self, patience: float) -> None:
        """A head that waits and has not asked again for `patience` seconds loses its place."""
        self._patience = patience
        self._head: tuple[ClientProcess, int] | None = None
        self._waits = False  # its last Reserve was refused
        self._last_request = 0.0

    def bars(self, process: ClientProcess, prompt: int, now: float) -> bool:
        """Return whether another prompt waits at the head of the line."""
        return self._waits and self._head != (process, prompt) and now - self._last_request <= self._patience

    def refused(self, process: ClientProcess, prompt: int, now: float) -> bool:
        """Note that there are no slots for this prompt. Return whether it is the head, and may keep what it holds."""
        lost = self._waits and now - self._last_request > self._patience
        if self._head is None or lost:
            self._head = (process, prompt)
        if self._head != (process, prompt):
            return False
        self._waits, self._last_request = True, now
        return True

    def granted(self, process: ClientProcess, prompt: int) -> None:
        if self._head == (process, prompt):
            self._waits = False

    def leave(self, process: ClientProcess, prompt: int) -> None:
        """Free the place if it is this prompt's."""
        if self._head == (process, prompt):
            self._head, self._waits = None, False

    def keep(self, process: ClientProcess, listed: Collection[int]) -> None:
        """Free the place if it is that of a prompt of this process that is not `listed`."""
        if self._head is not None and self._head[0] is process and self._head[1] not in listed:
            self._head, self._waits = None, False

    def pause(self, seconds: float) -> None:
        """The store stood still meanwhile."""
        self._last_request += seconds

    @property
    def waiting(self) -> tuple[ClientProcess, int] | None:
        """The head, while it waits."""
        return self._head if self._waits else None
