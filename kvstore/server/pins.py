"""Pins: prefixes that the operator wants kept, each with a time to live, on the account of a tenant. Pure.

A pin belongs to the router that asked for it. That router alone can end it, and heartbeats list it to that router. If
the router is gone, the pin lasts until its time is over, and serves all requests. Where two routers pin the same pages,
each has a pin of its own, and the pages count once.
"""

# pyright: strict

from collections.abc import Iterator
from dataclasses import dataclass

from baton.messages import AttemptHeld, PagesPinned, PinPages
from kvstore.arena.host_page_pool import HostPage, HostPagePool
from kvstore.keys import split_keys


@dataclass(slots=True)
class _Pinning:
    tenant: str
    pages: list[HostPage]
    expires: float


class PinnedPrefixes:
    """Holds pages against eviction until their time is over."""

    def __init__(self, pages: HostPagePool, page_bytes: int, quota: int) -> None:
        """`quota`: bytes that one tenant may pin."""
        self._pages = pages
        self._page_bytes = page_bytes
        self._quota = quota
        self._pins: dict[tuple[str, str], _Pinning] = {}  # by owner and name

    def pin(self, order: PinPages, router: str, now: float) -> tuple[PagesPinned, list[HostPage]]:
        """Hold every page of a chain or none, for the router of that incarnation. Returns the answer, and the pages
        that are pinned now."""
        keys, name = split_keys(order.keys), (router, order.pin)
        chain: list[HostPage] = []
        for key in keys:
            if (page := self._pages.find(key)) is None:
                return PagesPinned(order.pin, len(chain), "missing"), []
            chain.append(page)
        replaced = self._pins.get(name)
        others = [p for other, p in self._pins.items() if other != name and p.tenant == order.tenant]
        pinned = {id(page) for pinning in others for page in pinning.pages} | {id(page) for page in chain}
        if len(pinned) * self._page_bytes > self._quota:
            return PagesPinned(order.pin, 0, "quota"), []
        for page in chain:
            self._pages.hold(page)
        if replaced is not None:
            self.unpin(*name)
        self._pins[name] = _Pinning(order.tenant, chain, now + order.ttl_ms / 1_000)
        return PagesPinned(order.pin, len(chain)), chain

    def unpin(self, router: str, pin: str) -> None:
        """End a pin; one that is not there has ended already."""
        if (pinning := self._pins.pop((router, pin), None)) is not None:
            for page in pinning.pages:
                self._pages.unhold(page)

    def tick(self, now: float) -> None:
        for name in [name for name, pinning in self._pins.items() if now >= pinning.expires]:
            self.unpin(*name)

    def __len__(self) -> int:
        return len(self._pins)

    def listed(self, router: str) -> tuple[AttemptHeld, ...]:
        """For the heartbeat to a router: its pins, with how many of their pages can still be found. A corrupt one
        can't."""
        return tuple(
            AttemptHeld(pin, 1, sum(page.node is not None for page in pinning.pages))
            for (owner, pin), pinning in self._pins.items()
            if owner == router
        )

    @property
    def held(self) -> Iterator[HostPage]:
        """A page for each hold of ours."""
        return (page for pinning in self._pins.values() for page in pinning.pages)

    @property
    def bytes(self) -> int:
        return len({id(page) for page in self.held}) * self._page_bytes
