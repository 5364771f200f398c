"""A prompt whose chunks several prefill workers compute at a time, layer behind layer, and one worker's part in it.

A chunk needs, at each layer, K and V of the tokens before it at that layer. So the next chunk may follow one layer
behind. The processes hand these layers on through slots of their node's store that they share (`ShareSlots`). One slot
has a mark for each of them, which tells how far it is (`kvstore.arena.shared_slots`). The others are a region of one
chunk for each of them:

    worker 1   chunk 0 ···───▶ layer by layer ───▶ region 1        chunk 2 ···
    worker 0     chunk 1 ···  (waits for each layer of chunk 0)      chunk 3 ···

The last chunk is worker 0's. In the end that one has the whole prompt on its device, and seals it. The others only
help.

A region is written again when the worker's next chunk comes to a layer. By then all chunks between have come to it, for
each waits for the one before. No other chunk reads the region. So one region for each worker is enough.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from baton.messages import RingPart


class RingBroken(Exception):  # ends a step, and no request
    """The chunk before did not come, or its worker has left the ring."""


class RingPlan(Struct, frozen=True, gc=False):
    """The chunks of a prompt of `total` pages, the last of which may be partial."""

    part: RingPart
    total: int

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return -(-(self.total - self.part.first) // self.part.pages)

    @property
    def slots(self) -> int:
        """How many the store is asked for."""
        return 1 + self.part.workers * self.part.pages

    def owner(self, number: int) -> int:
        """Place of the worker that computes a chunk."""
        return (self.count - 1 - number) % self.part.workers

    def pages(self, number: int) -> range:
        """The pages of a chunk, counted from the start of the prompt."""
        first = self.part.first + number * self.part.pages
        return range(first, min(first + self.part.pages, self.total))

    def next_own(self, number: int) -> int | None:
        """The first chunk of this worker from there on; none: it has no more."""
        return next((n for n in range(number, self.count) if self.owner(n) == self.part.place), None)


class RingChunk(Struct, frozen=True, gc=False):
    """A step's only chunk is that one of a ring. `name` and `slots` are the ring's. It waits no longer than
    `patience` seconds after the step has begun."""

    plan: RingPlan
    number: int
    name: int
    slots: Sequence[int]
    patience: float

    @property
    def awaits(self) -> int:
        """Place of the worker that computes the chunk before; −1: there is none."""
        return self.plan.owner(self.number - 1) if self.number else -1

    @property
    def gives(self) -> Iterator[tuple[int, int]]:
        """The pages that others wait for, each with its slot."""
        return self._slots_of(self.number) if self.number < self.plan.count - 1 else iter(())

    @property
    def takes(self) -> Iterator[tuple[int, int]]:
        """The pages that others have computed since this worker's last chunk, each with its slot."""
        for number in range(max(0, self.number - self.plan.part.workers + 1), self.number):
            yield from self._slots_of(number)

    def _slots_of(self, number: int) -> Iterator[tuple[int, int]]:
        begin = 1 + self.plan.owner(number) * self.plan.part.pages
        return zip(self.plan.pages(number), self.slots[begin:], strict=False)
