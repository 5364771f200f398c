"""The mover of a CPU: a copy is one memory move on the calling thread, and has ended when it was started."""

from collections.abc import Sequence

from engine.device.page_pool import PagePool
from engine.runner import FinishedCopy, copied_in, copied_out
from kvstore.arena.memory import Arena
from kvstore.checksum import page_checksum
from kvstore.client.transfer import Copy, CopyIn, CopyOut


class HostMover:
    """Copies between the pages of `pool` and an arena, at once."""

    def __init__(self, pool: PagePool, *, verify: bool) -> None:
        self._pool, self._verify = pool, verify
        self.arena: Arena | None = None

    def attach(self, arena: Arena) -> None:
        self.arena = arena

    def start(self, copies: Sequence[Copy]) -> FinishedCopy:
        if isinstance(copies[0], CopyOut):
            return FinishedCopy(copied_out(copies, [self._copy_out(copy) for copy in copies]))
        return FinishedCopy(copied_in(copies, [self._copy_in(copy) for copy in copies]))

    def close(self) -> bool:
        self.arena = None
        return True

    def _copy_out(self, copy: Copy) -> int:
        """Returns the checksum of what lies in the slot then, read while the copy is still in the cache."""
        assert self.arena is not None, "a copy without an arena"
        slot = self.arena.slot(copy.slot)
        self._pool.copy_out(copy.page, slot)
        return page_checksum(slot, self._pool.kv_heads)

    def _copy_in(self, copy: Copy) -> bool:
        """Returns whether the page is intact, as far as that is to be verified."""
        assert self.arena is not None, "a copy without an arena"
        slot = self.arena.slot(copy.slot)
        if self._verify and isinstance(copy, CopyIn):
            return self._pool.copy_in_checked(slot, copy.page) == copy.checksum
        self._pool.copy_in(slot, copy.page)
        return True
