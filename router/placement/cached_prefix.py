"""How much of a prefix a worker has without computing: its own pages, its node's store, and what that can load.

The workers decide with the same function when it comes to it (`kvstore.load_or_recompute.choose`), so this is a
prediction. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate

from msgspec import Struct

from baton.messages import LowerTier, PageSource, TierSpeed
from baton.store_protocol import TierPages
from kvstore.load_or_recompute import DEFAULT_PREFILL_RATE, DEFAULT_SPEEDS, choose_load_length
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.members import ClusterMembership, MemberRecord

_NOTHING = PrefixMatch(0)
SOURCES = 3  # other stores that are named for cached pages: the next is asked when one fails


class CacheablePrefix(Struct, frozen=True):
    """The pages of an attempt's tokens that caches may have: the full ones among all but the last token."""

    pages: int
    page_size: int  # tokens
    page_bytes: int

    def seconds(self, pages: int, rate: float) -> float:
        """How long computing so many pages takes at `rate` tokens per second; 0: not measured."""
        return pages * self.page_size / (rate or DEFAULT_PREFILL_RATE)


class StoreCache(Struct, frozen=True):
    """A node's live store, and what it has of the prefix: the first `host` pages in its arena, and the next `disk`
    ones on its disk."""

    incarnation: str
    node: str
    endpoint: str = ""  # where it serves pages to other stores; empty: nowhere
    host: int = 0
    disk: int = 0
    disk_speed: TierSpeed = DEFAULT_SPEEDS["disk"]
    remote_speed: TierSpeed = DEFAULT_SPEEDS["remote"]  # at which it gets pages from others

    @property
    def pages(self) -> int:
        """Of the prefix, on whatever tier."""
        return self.host + self.disk


class NodeCache(Struct, frozen=True):
    """A node with a live store. `others` serve it pages of the prefix that it does not have, the most first."""

    store: StoreCache
    others: Sequence[StoreCache] = ()

    def sources(self, after: int, pages: int) -> tuple[PageSource, ...]:
        """Where the store gets those of the first `pages` that come after the first `after`."""
        helpers = [other for other in self.others if other.pages > after]
        return tuple(PageSource(helper.incarnation, helper.endpoint, min(helper.pages, pages)) for helper in helpers)


class ReusablePrefix(Struct, frozen=True):
    """The first `pages` of a prefix need no computing, once `loads` have come from below the arena, tier by tier."""

    pages: int
    loads: tuple[TierPages, ...] = ()
    seconds: float = 0.0  # that the loads take
    sources: tuple[PageSource, ...] = ()  # for those that come from other nodes


def store_caches(
    members: ClusterMembership, held: Mapping[str, PrefixMatch], avoid: Collection[str]
) -> list[StoreCache]:
    """The live store of each node, unless its loop hangs. Those to `avoid` serve their own node and no other."""
    able = [member for member in members.with_role("store") if not member.unresponsive]
    return [store_cache(member, held, serves=member.incarnation not in avoid) for member in able]


def store_cache(member: MemberRecord, held: Mapping[str, PrefixMatch], *, serves: bool) -> StoreCache:
    """What that store has. An arena is evicted from the leaves, so what is only on the disk follows what is in it."""
    match = held.get(member.incarnation, _NOTHING)
    speeds: dict[LowerTier, TierSpeed] = {**DEFAULT_SPEEDS, **{speed.tier: speed for speed in member.load.tiers}}
    on_disk = match.tiers.get("DISK", 0)
    return StoreCache(
        incarnation=member.incarnation,
        node=member.peer.node,
        endpoint=member.hello.data if serves else "",
        host=match.pages - on_disk,
        disk=on_disk,
        disk_speed=speeds["disk"],
        remote_speed=speeds["remote"],
    )


def node_cache(
    members: ClusterMembership, store: MemberRecord, held: Mapping[str, PrefixMatch], avoid: Collection[str] = ()
) -> NodeCache:
    """The node of that store, with the stores that have more of the prefix, the most first, and none to `avoid`."""
    own = store_cache(store, held, serves=store.incarnation not in avoid)
    more = ((match.pages, inc) for inc, match in held.items() if match.pages > own.pages and inc not in avoid)
    able = ((pages, inc) for pages, inc in more if (other := members.get(inc)) is not None and _serves(other))
    best = (members.require_live(inc) for _, inc in nlargest(SOURCES, able))
    return NodeCache(own, [store_cache(other, held, serves=True) for other in best])


def _serves(member: MemberRecord) -> bool:
    """Whether other nodes may get pages from that one."""
    return member.peer.role == "store" and bool(member.hello.data) and not member.unresponsive


def reusable_on_decode_worker(
    prefix: CacheablePrefix, node: NodeCache | None, device: int, rate: float
) -> ReusablePrefix:
    """Of a decode worker, which fetches only what follows the `device` pages that it has itself."""
    if node is None:
        return ReusablePrefix(device)
    return _reusable(prefix, node, max(device, node.store.host), device, rate)


def reusable_on_prefill_worker(prefix: CacheablePrefix, node: NodeCache, device: int, rate: float) -> ReusablePrefix:
    """Of a prefill worker. All pages must be in its node's store, so that is asked first; but those that the worker
    has on its device need no computing, which makes loading them pay less."""
    return _reusable(prefix, node, node.store.host, device, rate)


def _reusable(prefix: CacheablePrefix, node: NodeCache, begin: int, device: int, rate: float) -> ReusablePrefix:
    """`begin`: the first page that must be loaded, or else computed where it is not among the first `device`."""
    here = max(begin, node.store.pages)
    longest = node.others[0].pages if node.others else 0
    runs = [
        TierPages(node.store.disk_speed, here - begin),
        TierPages(node.store.remote_speed, max(0, min(longest, prefix.pages) - here)),
    ]
    runs = [run for run in runs if run.pages]
    choice = choose_load_length(runs, prefix.page_bytes, prefix.page_size, rate, max(0, device - begin))
    loaded = begin + choice.pages
    starts = accumulate((run.pages for run in runs), initial=0)
    return ReusablePrefix(
        pages=max(device, loaded),
        loads=tuple(
            TierPages(run.speed, min(run.pages, choice.pages - start))
            for run, start in zip(runs, starts, strict=False)
            if start < choice.pages
        ),
        seconds=choice.load_seconds,
        sources=node.sources(here, prefix.pages) if loaded > here else (),
    )
