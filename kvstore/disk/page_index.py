"""The pages on disk or on their way there, their order of eviction, and which of them are published.

Pages are closed under prefix, as everywhere: each hangs from its parent, and one that goes takes its subtree along. A
page is *placed* once its file is written, and *readable* once it and all before it are placed. A pin protects a page
and its prefix from eviction. What becomes of files and their bytes is the index's to see to.
"""

# pyright: strict

from collections.abc import Iterator, Sequence

from kvstore.arena.eviction import LeafFirstLru
from kvstore.arena.radix_tree import RadixNode, RadixTree
from kvstore.disk.file_names import PageFile
from kvstore.events.changes import CacheChange, ChangeLog
from kvstore.keys import START


class StoredPage:
    """A page that is written or being written. `node` is none once it can't be found any more."""

    __slots__ = ("file", "node", "placed", "readable")

    def __init__(self, file: PageFile) -> None:
        self.file = file
        self.placed = False
        self.readable = False
        self.node: RadixNode[StoredPage] | None = None


class DiskPages:
    """The tree of pages. `readable` counts those that can be read."""

    def __init__(self) -> None:
        self.readable = 0
        self._changes = ChangeLog()
        self._tree: RadixTree[StoredPage] = RadixTree()
        self._lru: LeafFirstLru[StoredPage] = LeafFirstLru()

    def __contains__(self, key: bytes) -> bool:
        return key in self._tree

    @property
    def evictable(self) -> bool:
        """Whether any page could go."""
        return len(self._lru) > 0

    def find(self, key: bytes) -> RadixNode[StoredPage] | None:
        """A page that can be read."""
        node = self._tree.find(key)
        return node if node is not None and node.value.readable else None

    def prefix(self, keys: Sequence[bytes], parent: bytes) -> int:
        """How many of the first `keys`, which follow `parent`, can be read."""
        above = self._tree.find(parent) if parent != START else None
        if above is None and parent != START:
            return 0
        for count, key in enumerate(keys):
            node = self.find(key)
            if node is None or node.parent is not above:
                return count
            above = node
        return len(keys)

    def can_follow(self, parent: bytes) -> bool:
        return parent == START or parent in self._tree

    def plant(self, page: StoredPage) -> None:
        """Take on a page that is new and may follow its parent. It is pinned once."""
        key, parent, _ = page.file
        page.node = self._tree.add_node(key, self._tree.find(parent) if parent != START else None, page)
        self._lru.insert(page.node)

    def place(self, page: StoredPage) -> None:
        """Its file is written: if all before it can be read, so can it, and what waited below it."""
        page.placed = True
        node = page.node
        assert node is not None
        if node.parent is not None and not node.parent.value.readable:
            return
        waiting = [node]
        while waiting:
            here = waiting.pop()
            here.value.readable = True
            self.readable += 1
            self._changes.stored(here.key, here.parent_key)
            waiting.extend(child for child in here.children.values() if child.value.placed)

    def pin(self, page: StoredPage) -> None:
        assert page.node is not None
        self._lru.pin(page.node)

    def unpin(self, page: StoredPage) -> None:
        """Undo one pin, that of `plant` too, if the page is still here; it counts as used now."""
        if page.node is not None:
            self._lru.unpin(page.node)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages, parents first, were useful: they go later."""
        nodes = [node for node in map(self._tree.find, keys) if node is not None]
        for node in reversed(nodes):  # the deepest first: it moves the others along
            self._lru.pin(node)
        for node in nodes:
            self._lru.unpin(node)

    def evict(self) -> StoredPage:
        """Strike out the page that is missed least; something must be evictable."""
        node = self._lru.pop()
        self._strike(node)
        return node.value

    def drop(self, page: StoredPage) -> list[StoredPage]:
        """Strike out a page and its subtree, even if they are pinned. Return them; none if the page had gone before."""
        if page.node is None:
            return []
        nodes = self._tree.subtree(page.node)
        for node in nodes:
            self._lru.forget(node)
            self._strike(node)
        return [node.value for node in nodes]

    def clear(self) -> None:
        for node in reversed(list(self._tree.preorder())):
            if node.value.readable:
                self._changes.removed(node.key)  # not Cleared, which would be of every tier
        self._tree = RadixTree()
        self._lru = LeafFirstLru()
        self.readable = 0

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and parent of every page that can be read, parents first."""
        return ((node.key, node.parent_key) for node in self._tree.preorder() if node.value.readable)

    def drain_events(self) -> list[CacheChange]:
        """What has become readable or stopped being so since the last call, in order."""
        return self._changes.drain()

    def validate(self) -> dict[bytes, StoredPage]:
        """Check every invariant that this can see; for tests. Returns the pages that are placed."""
        self._tree.validate()
        self._lru.validate(self._tree)
        for node in self._tree.preorder():
            page = node.value
            assert page.node is node
            assert page.readable == (page.placed and (node.parent is None or node.parent.value.readable))
        assert self.readable == sum(node.value.readable for node in self._tree.preorder())
        return {node.key: node.value for node in self._tree.preorder() if node.value.placed}

    def _strike(self, node: RadixNode[StoredPage]) -> None:
        page = node.value
        self._tree.remove_node(node)
        page.node = None
        if page.readable:
            page.readable = False
            self.readable -= 1
            self._changes.removed(node.key)
