"""Which cached page goes first: least recently used, leaves before their parents.

A pin (a reference, a hold, a reservation) protects its node and every ancestor: a page whose prefix is gone can't be
found any more, so evicting above a page in use would waste it. Counting pinned children makes that exact and cheap:

    pinned(node) = node.pins > 0 or node.pinned_children > 0

Nodes enter the order at the moment they stop being pinned. A parent stops being pinned only after all its children
have, so it stands behind them, and the front of the order is always a leaf: no search, no heap.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvstore.arena.radix_tree import RadixNode, RadixTree

V = TypeVar("V")


class LeafFirstLru(Generic[V]):
    """The eviction order over the nodes of a tree. `len()` is how many could be evicted, one after another."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, RadixNode[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[RadixNode[V]]:
        """Those that could be evicted, in that order."""
        return iter(self._order.values())

    def insert(self, node: RadixNode[V]) -> None:
        """Take on a node that is new in the tree. It starts with one pin: an unpinned one would stand behind its
        parent in the order."""
        assert not node.pins
        assert not node.children
        self._pin_above(node)
        node.pins = 1

    def pin(self, node: RadixNode[V]) -> None:
        """Protect `node` and what is above it, until as many calls of `unpin`."""
        if not _pinned(node):
            del self._order[node.key]
            self._pin_above(node)
        node.pins += 1

    def unpin(self, node: RadixNode[V]) -> None:
        """Undo one `pin`. The last makes the node, and what above it was pinned only through it, evictable."""
        assert node.pins > 0
        node.pins -= 1
        here: RadixNode[V] | None = node
        while here is not None and not _pinned(here):
            self._order[here.key] = here
            here = here.parent
            if here is not None:
                here.pinned_children -= 1

    def exempted_by(self, node: RadixNode[V]) -> int:
        """How many evictable nodes would stop being so if `node` were pinned."""
        count = 0
        here: RadixNode[V] | None = node
        while here is not None and not _pinned(here):
            count += 1
            here = here.parent
        return count

    def pop(self) -> RadixNode[V]:
        """Strike the next one to evict off the order; the caller removes it from the tree. Something must be there."""
        _, node = self._order.popitem(last=False)
        assert not node.children
        return node

    def forget(self, node: RadixNode[V]) -> None:
        """Strike a leaf off whatever pins it has; the caller removes it from the tree."""
        assert not node.children
        if node.pins:
            node.pins = 1
            self.unpin(node)
        del self._order[node.key]

    def validate(self, tree: RadixTree[V]) -> None:
        place = {key: position for position, key in enumerate(self._order)}
        for node in tree.preorder():
            assert node.pins >= 0
            assert node.pinned_children == sum(_pinned(child) for child in node.children.values())
            assert (node.key in place) != _pinned(node)
            if node.key in place:
                assert self._order[node.key] is node
                assert all(place[child] < place[node.key] for child in node.children), "a parent before its child"
        assert all(key in tree for key in place)

    def _pin_above(self, node: RadixNode[V]) -> None:
        here = node.parent
        while here is not None:
            was_pinned = _pinned(here)
            here.pinned_children += 1
            if was_pinned:
                return
            del self._order[here.key]
            here = here.parent


def _pinned(node: RadixNode[V]) -> bool:
    return node.pins > 0 or node.pinned_children > 0
