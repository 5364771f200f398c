"""Marks in slots that processes share for the chunks of one prompt (`engine.step.ring`): how far each of them is.

first slot    mark of place 0 │ mark of place 1 │ …        a mark: name of the ring, how far its process is
"""

# pyright: strict

from msgspec import Struct

MARK_BYTES = 64
"""Of the first slot, for each process."""
LEFT = 2**63 - 1
"""How far a process is that computes no more chunks."""


class LeaveRing(Struct, frozen=True):
    """The process at that place of a ring has left it, or is gone. The others wait no longer for it. `header` is the
    slot of the marks."""

    header: int
    place: int
    name: int

    def mark(self, slot: memoryview) -> None:
        """Write it to the slot of the marks. No process writes that mark now."""
        mark = slot[self.place * MARK_BYTES : (self.place + 1) * MARK_BYTES].cast("q")
        mark[1], mark[0] = LEFT, self.name


def name_in_marks(name: bytes) -> int:
    """Return how a mark names the slots that are shared by that name."""
    return int.from_bytes(name[:8], "little", signed=True)
