"""Copies of pages between vLLM's processes and a store's arena, as the worker orders them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from baton.errors import DeviceLost
from engine.runner import copied_in, copied_out
from engine.vllm_runner.child_link import ChildLink, Pending
from engine.vllm_runner.messages import Attach, Copied, Failed, In, Out
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy, CopyIn, CopyOut

_PATIENCE = 10.0  # seconds for the last copy to end


class VllmMover:
    """Copies between the child's pages and an arena, which the child maps."""

    def __init__(self, child: ChildLink, duplicates: Callable[[], int], *, verify: bool) -> None:
        """`duplicates`: how many orders to duplicate were given so far. They come before later copies into pages."""
        self._child, self._duplicates, self._verify = child, duplicates, verify
        self._last: Pending | None = None

    def attach(self, arena: Arena) -> None:
        assert isinstance(arena, Arena), "only a store's arena can be mapped by another process"
        order = Attach(arena.slots, arena.page_bytes)
        self._last = self._child.order(lambda: order, os.dup(arena.fd))

    def start(self, copies: Sequence[Copy]) -> MovingPages:
        pages, slots = [copy.page for copy in copies], [copy.slot for copy in copies]
        if isinstance(copies[0], CopyOut):
            order = Out(pages, slots)
        else:
            sums = [copy.checksum for copy in copies if isinstance(copy, CopyIn)] if self._verify else []
            order = In(slots, pages, sums, self._duplicates())
        self._last = pending = self._child.order(lambda: order)
        return MovingPages(copies, pending)

    def close(self) -> bool:
        """Orders are carried out in order, so the last one's end is that of all."""
        if self._last is None:
            return True
        return self._last.ended(_PATIENCE)


class MovingPages:
    """Copies that the child was sent."""

    def __init__(self, copies: Sequence[Copy], pending: Pending) -> None:
        self._copies, self._pending = copies, pending

    def done(self) -> bool:
        return self._pending.done

    def wait(self) -> CopiedIn | CopiedOut:
        answer = self._pending.wait()
        if isinstance(answer, Failed):
            raise DeviceLost(f"vLLM could not copy pages: {answer.kind}: {answer.message}")
        assert isinstance(answer, Copied)
        if isinstance(self._copies[0], CopyOut):
            return copied_out(self._copies, answer.checksums, answer.seconds)
        return copied_in(self._copies, answer.intact, answer.seconds)
