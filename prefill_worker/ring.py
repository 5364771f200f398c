"""What a prefill worker does of a prompt that several compute at a time (`engine.step.ring`).

    Prefill(ring) ──▶ pages before the first chunk are here ──▶ ShareSlots ──▶ Reserved: all have come ──▶ own chunks
                            │ more or fewer are                    │ late           │ a chunk did not come, another
                            ▼                                      ▼                ▼ prompt came, it ends
                          alone                                  alone            alone, behind what is complete

A worker in a ring has no other prompt, since the others of the ring would wait for those steps. Each chunk is a step of
its own. The worker at place 0 makes the result, with the others or without them. The others drop the prompt when the
ring ends for them, and neither seal nor cache any of it. Pure.
"""

# pyright: strict

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from baton.messages import KEY_BYTES, Prefill
from baton.step_cost_model import StepCostModel, pairs
from baton.store_protocol import ShareSlots
from engine.step.batch import Chunk
from engine.step.block_table import BlockTable
from engine.step.ring import RingChunk, RingPlan
from kvstore.arena.shared_slots import LeaveRing, name_in_marks

JOIN = 0.25  # seconds that a worker waits for the others to come
_PATIENCE = 6.0  # times what a chunk takes, at most, with its waits
_UNMEASURED = 5.0  # seconds of a chunk whose time is not known


@dataclass(eq=False)
class Ring:
    """A worker's part in one ring, until it leaves it."""

    plan: RingPlan
    name: bytes
    number: int  # of its next chunk
    lease: int = 0  # of the shared slots; 0: it has not asked for them
    join_began: float = 0.0  # seconds
    slots: Sequence[int] = ()  # empty: others have not come yet

    @classmethod
    def of(cls, order: Prefill, total: int, page_size: int, most: int, router: str) -> "Ring | None":
        """Return the part that an order gives in a prompt of `total` pages. None: steps of `most` tokens are too small
        for it. Its name is the same for all workers that get the order from one router."""
        if (part := order.ring) is None or part.pages * page_size > most:
            return None
        plan = RingPlan(part, total)
        if plan.count < part.workers or (number := plan.next_own(0)) is None:
            return None
        text = f"{router}\0{order.request}\0{order.attempt}".encode()
        return cls(plan, blake2b(text, digest_size=KEY_BYTES).digest(), number)

    @property
    def helps(self) -> bool:
        """Another worker makes the result."""
        return self.plan.part.place > 0

    @property
    def name_in_marks(self) -> int:
        return name_in_marks(self.name)

    def join(self, lease: int, now: float) -> ShareSlots:
        self.lease, self.join_began = lease, now
        part = self.plan.part
        return ShareSlots(lease, self.name, self.plan.slots, part.workers, part.place)

    def leave(self) -> list[LeaveRing]:
        """Tell the others, if they may wait."""
        return [LeaveRing(self.slots[0], self.plan.part.place, self.name_in_marks)] if self.slots else []

    def chunk(self, tokens: Sequence[int], pages: BlockTable, page_size: int, costs: StepCostModel) -> Chunk:
        """Its next chunk of a prompt."""
        own = self.plan.pages(self.number)
        start = own.start * page_size
        new = tokens[start : own.stop * page_size]
        seconds = costs.seconds(len(new), pairs(len(new), start)) if costs.knows_prompts else _UNMEASURED
        patience = JOIN + _PATIENCE * seconds
        ring = RingChunk(self.plan, self.number, self.name_in_marks, self.slots, patience)
        return Chunk(new, start, pages, ring=ring)
