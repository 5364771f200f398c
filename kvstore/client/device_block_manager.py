"""The owner of each page of a worker's device pool, and the cached pages in it.

    free ──take, grow──▶ private ──publish──▶ cached, referenced ⇄ cached, unreferenced ──evicted──▶ free
      ▲                     │ free                        (free, take)
      └─────────────────────┘

A page is *private* while only its sequence knows it, *cached* once its contents are complete and it can be found by
key. Cached pages without references stay until room is needed: then they go least recently used, leaves first.

What is launched, a step or a copy, has an *epoch* from `begin` to `end`. A page that loses its last reference is *in
limbo* until all that was under way at that moment has ended, since until then the device may read or write it. A page
in limbo can be handed out, so that admission does not depend on the device's progress. But no step and no copy that
gives it new contents is launched before it has left limbo (`in_limbo`).

A page can also be found by the tokens that it begins with, below the key of the page before it. A sequence that goes on
with some of these tokens copies the page (copy on write). The page may be cached, belong to a sequence that goes on in
it, or have been freed. It is found until it is handed out anew. Tokens are compared themselves, not by hashes.

Pure: page numbers and keys, no tensors and no clock. The tree of keys is `kvstore.arena.radix_tree`, the order
`kvstore.arena.eviction`.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from baton.messages import TOKEN_BYTES
from kvstore.arena.eviction import LeafFirstLru
from kvstore.arena.radix_tree import RadixNode, RadixTree
from kvstore.events.changes import CacheChange, ChangeLog
from kvstore.keys import START

FEWEST_COPIED = 2
"""Tokens for which a page is copied: it takes less than they do."""


class DuplicatePage(Struct, frozen=True):
    """A command: copy what lies in one device page to another, before the next step."""

    source: int
    dest: int


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A page that can be found. `parent` is empty where its chain starts."""

    key: bytes
    parent: bytes
    page: int
    apart: bool = False  # no page follows it, and others are not told of it


@dataclass(frozen=True, slots=True)
class DeviceBlockStats:
    """Counts of pages; the last three only grow. A lookup is one page asked for by `take`."""

    total: int
    free: int
    evictable: int
    referenced: int
    cached: int
    hits: int
    evictions: int


class DeviceBlockManager:
    """The one owner of a worker's device pages. A page handed out is freed once per reference."""

    def __init__(self, num_pages: int, *, tell_tokens: bool = False) -> None:
        """`tell_tokens`: what is drained has the tokens of the pages, too."""
        self._tell_tokens = tell_tokens
        self._references = [0] * num_pages
        self._nodes: list[RadixNode[int] | None] = [None] * num_pages  # of cached pages
        self._free = deque(range(num_pages - 1, -1, -1))  # taken from the right
        self._tree: RadixTree[int] = RadixTree()
        self._lru: LeafFirstLru[int] = LeafFirstLru()
        # By the key before them: pages in the order of the packed tokens that they begin with.
        self._beginnings: dict[bytes, list[tuple[bytes, int]]] = {}
        self._begins: dict[int, tuple[bytes, bytes]] = {}  # of each of these pages the key before it, and its tokens
        self._apart: set[int] = set()  # cached pages of which others are not told
        self._changes = ChangeLog()
        self._epochs = 0  # begun so far
        self._under_way: dict[int, None] = {}  # epochs that have not ended, oldest first
        self._limbo: dict[int, int] = {}  # pages, each with the newest epoch that it waits for
        self._leaving: deque[tuple[int, int]] = deque()  # the same in the order in which they came there: epoch, page
        self._hits = self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that `grow` could hand out now: free or evictable."""
        return len(self._free) + len(self._lru)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many pages at the start of `keys` are cached. Changes nothing, not even the eviction order."""
        return len(self._tree.match(keys))

    def count_unshared(self, pages: Sequence[int], first: int = 0) -> int:
        """Return how many of these pages, in the order of their chain from number `first` on, only the caller refers
        to. Shared pages come first, so a search finds the place where they end: O(log pages). Where all layers have a
        window, another sequence may have given back what comes first, and this is an estimate."""
        return len(pages) - bisect_left(pages, True, first, key=lambda page: self._references[page] == 1)

    def new_blocks_needed(self, keys: Sequence[bytes], total: int) -> int:
        """Return by how many pages `available` shrinks if `total` are taken so: the fresh ones, and the cached ones
        without a reference now."""
        return self._new_blocks_needed(self._tree.match(keys[:total]), total)

    def allocate_with_prefix(self, keys: Sequence[bytes], total: int) -> list[int] | None:
        """`total` pages, all or nothing: those of the cached prefix of `keys`, in order, then fresh ones, each with
        one reference for the caller. None, and no change, when there is no room."""
        cached = self._tree.match(keys[:total])
        if self._new_blocks_needed(cached, total) > self.available:
            return None
        for node in cached:
            self._incref(node.value)
        self._hits += len(cached)
        return [node.value for node in cached] + self._take_free(total - len(cached))

    def allocate(self, count: int) -> list[int] | None:
        """`count` fresh pages with one reference each, or None and no change."""
        return self._take_free(count) if count <= self.available else None

    def cache_block(
        self, key: bytes, parent: bytes, page: int, tokens: Sequence[int] = (), *, apart: bool = False
    ) -> None:
        """The contents of `page`, which the caller refers to, are complete: from now on `key` finds it. `tokens` are
        what it was computed from.

        It stays private when `key` is cached under another page already, or when the page before it (`parent`, empty
        at the start of a chain) is not cached: it could not be found. Nothing follows a page `apart`, which goes before
        its parent does, and events don't tell of it."""
        assert self._references[page] > 0, "published without a reference"
        above = self._tree.find(parent) if parent != START else None
        if key in self._tree or (above is None and parent != START):
            return
        assert self._nodes[page] is None, "one page under two keys"
        node = self._tree.add_node(key, above, page)
        self._lru.insert(node)
        self._nodes[page] = node
        if apart:
            self._apart.add(page)
        else:
            self._changes.stored(key, parent, tokens if self._tell_tokens else ())

    def share_beginning(self, parent: bytes, tokens: bytes, page: int) -> None:
        """The packed `tokens` are computed at the beginning of `page`, which the caller refers to and never changes
        there. `parent` is the key of the page before it, or the root of the chain."""
        assert self._references[page] > 0, "shared without a reference"
        if page in self._begins:
            if len(self._begins[page][1]) >= len(tokens):
                return
            self._forget_beginning(page)
        self._begins[page] = (parent, tokens)
        insort(self._beginnings.setdefault(parent, []), (tokens, page))

    def find_beginning(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """Return the page after `parent` that begins with the most of the packed `tokens`, and how many these are. Copy
        it before the next step, which may write into it."""
        pages = self._beginnings.get(parent, [])
        place = bisect_left(pages, (tokens,))  # the tokens on both sides of it have the most in common
        return max(((page, _in_common(tokens, each)) for each, page in pages[max(0, place - 1) : place + 1]),
                   key=lambda pair: pair[1], default=(-1, 0))  # fmt: skip

    def deduplicate(self, key: bytes, page: int) -> int:
        """The page under which `key` is cached, in exchange for `page`, which the caller refers to and whose contents
        are the same: two that computed the same at the same time keep it once. `page` itself where it is that one, or
        none is."""
        node = self._tree.find(key)
        if node is None or node.value == page:
            return page
        self._incref(node.value)
        self.free([page])
        return node.value

    def incref(self, pages: Sequence[int]) -> None:
        """One more reference on each of `pages`: a copy outlives its sequence. They are cached, or the caller refers to
        them already."""
        for page in pages:
            assert self._references[page] > 0 or self._nodes[page] is not None, "retained without a reference"
            self._incref(page)

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference on each. Unreferenced, a private page is free again and a cached one evictable; of pages
        given in chain order the last is evicted first."""
        for page in reversed(pages):
            assert self._references[page] > 0, "freed more often than referenced"
            self._references[page] -= 1
            if self._references[page]:
                continue
            node = self._nodes[page]
            if node is not None:
                self._lru.unpin(node)
            elif self._under_way or page in self._begins:
                self._free.appendleft(page)  # to be taken last
            else:
                self._free.append(page)
            if self._under_way:
                self._limbo[page] = self._epochs
                self._leaving.append((self._epochs, page))

    def begin(self) -> int:
        """A step or a copy is launched. Return its epoch: pages freed from now on are in limbo until its end."""
        self._epochs += 1
        self._under_way[self._epochs] = None
        return self._epochs

    def end(self, epoch: int) -> None:
        """What was launched under `epoch` touches no page any more. O(pages that leave limbo)."""
        del self._under_way[epoch]
        oldest = next(iter(self._under_way), self._epochs + 1)
        while self._leaving and self._leaving[0][0] < oldest:
            newest, page = self._leaving.popleft()
            if self._limbo.get(page) == newest:  # else it has been freed again since
                del self._limbo[page]

    def in_limbo(self, pages: Sequence[int]) -> list[int]:
        """Return those of `pages` that may not get new contents yet."""
        return [page for page in pages if page in self._limbo] if self._limbo else []

    def forget(self, key: bytes) -> None:
        """Find the page of `key` no more, nor those after it. Those that are referred to become private."""
        top = self._tree.find(key)
        for node in [] if top is None else self._tree.subtree(top):
            self._lru.forget(node)
            self._forget(node)
            for page in [node.value, *(page for _, page in self._beginnings.get(node.key, ()))]:
                self._forget_beginning(page)
            if not self._references[node.value]:
                self._free.append(node.value)

    def clear(self) -> None:
        """Forget every cached page without a reference."""
        while len(self._lru):
            self._evict()

    def pages(self) -> list[CachedPage]:
        """Every cached page, parents before children, but for those apart: what a snapshot says."""
        return [
            CachedPage(node.key, node.parent_key, node.value)
            for node in self._tree.preorder()
            if node.value not in self._apart
        ]

    def find(self, key: bytes) -> CachedPage | None:
        node = self._tree.find(key)
        return None if node is None else CachedPage(key, node.parent_key, node.value, node.value in self._apart)

    def keys_by_use(self) -> list[bytes]:
        """The keys of every cached page, parents before children. Leaves are in the order in which they would be
        evicted, and those in use come last."""
        keys: dict[bytes, None] = {}
        for node in (*self._lru, *self._tree.preorder()):
            chain: list[bytes] = []
            here: RadixNode[int] | None = node
            while here is not None and here.key not in keys:
                chain.append(here.key)
                here = here.parent
            keys.update(dict.fromkeys(reversed(chain)))
        return list(keys)

    def drain_events(self) -> list[CacheChange]:
        """What has become findable or stopped being so since the last call, in order."""
        return self._changes.drain()

    def stats(self) -> DeviceBlockStats:
        return DeviceBlockStats(
            total=len(self._references),
            free=len(self._free),
            evictable=len(self._lru),
            referenced=sum(count > 0 for count in self._references),
            cached=len(self._tree),
            hits=self._hits,
            evictions=self.evictions,
        )

    def validate(self) -> None:
        self._tree.validate()
        self._lru.validate(self._tree)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, (references, node) in enumerate(zip(self._references, self._nodes, strict=True)):
            assert references >= 0
            assert (page in free) == (references == 0 and node is None), "a page is lost, or free and in use"
            if node is not None:
                assert node.value == page
                assert self._tree.find(node.key) is node
                assert node.pins == (references > 0)
        assert len(self._tree) == sum(node is not None for node in self._nodes)
        assert {(epoch, page) for page, epoch in self._limbo.items()} <= set(self._leaving)
        assert self._under_way or not self._leaving, "a page is in limbo and waits for nothing"
        begins = [(page, (parent, tokens)) for parent, pages in self._beginnings.items() for tokens, page in pages]
        assert self._begins == dict(begins)
        assert len(self._begins) == len(begins)
        assert all(pages and pages == sorted(pages) for pages in self._beginnings.values())

    def _new_blocks_needed(self, cached: Sequence[RadixNode[int]], total: int) -> int:
        return total - len(cached) + (self._lru.exempted_by(cached[-1]) if cached else 0)

    def _incref(self, page: int) -> None:
        node = self._nodes[page]
        if node is not None and not self._references[page]:
            self._lru.pin(node)  # however many refer to a page, its node is pinned once
            self._limbo.pop(page, None)  # its contents stay
        self._references[page] += 1

    def _take_free(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._incref(page)
            self._forget_beginning(page)
        return pages

    def _evict(self) -> None:
        node = self._lru.pop()
        self._forget(node)
        self._free.append(node.value)
        self.evictions += 1

    def _forget(self, node: RadixNode[int]) -> None:
        self._tree.remove_node(node)
        self._nodes[node.value] = None
        if node.value in self._apart:
            self._apart.remove(node.value)
        else:
            self._changes.removed(node.key)

    def _forget_beginning(self, page: int) -> None:
        if page not in self._begins:
            return
        parent, tokens = self._begins.pop(page)
        pages = self._beginnings[parent]
        del pages[bisect_left(pages, (tokens, page))]
        if not pages:
            del self._beginnings[parent]


def _in_common(one: bytes, other: bytes) -> int:
    """How many tokens two packed runs begin with alike."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    return bisect_left(range(most), True, key=lambda n: one[: (n + 1) * TOKEN_BYTES] != other[: (n + 1) * TOKEN_BYTES])
