"""A tree of page keys: which key follows which.

A page key commits to its whole chain. So a flat table from key to (parent, children) is the radix tree of all cached
prompts. A chain is looked up key by key, and nothing is ever split or merged.

Owns the shape only. What a key stands for is the caller's `value`; in which order keys go is
`kvstore.arena.eviction`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from kvstore.keys import START

V = TypeVar("V")


class RadixNode(Generic[V]):
    """One key in the tree. `pins` and `pinned_children` are kept by `kvstore.arena.eviction`."""

    __slots__ = ("children", "key", "parent", "pinned_children", "pins", "value")

    def __init__(self, key: bytes, parent: RadixNode[V] | None, value: V) -> None:
        self.key = key
        self.parent = parent
        self.value = value
        self.children: dict[bytes, RadixNode[V]] = {}
        self.pins = 0
        self.pinned_children = 0

    @property
    def parent_key(self) -> bytes:
        return START if self.parent is None else self.parent.key


class RadixTree(Generic[V]):
    """Keys with their parents. Every node's parent is in the tree or the start of a chain: no orphans."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, RadixNode[V]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def find(self, key: bytes) -> RadixNode[V] | None:
        return self._nodes.get(key)

    def match(self, keys: Sequence[bytes], under: RadixNode[V] | None = None) -> list[RadixNode[V]]:
        """The nodes of the longest prefix of `keys` that hangs, link by link, below `under` (none: a chain's start)."""
        path: list[RadixNode[V]] = []
        parent = under
        for key in keys:
            node = self._nodes.get(key)
            if node is None or node.parent is not parent:
                break
            path.append(node)
            parent = node
        return path

    def add_node(self, key: bytes, parent: RadixNode[V] | None, value: V) -> RadixNode[V]:
        """Hang a new key below `parent` (none: it starts a chain)."""
        assert key not in self._nodes
        node = RadixNode(key, parent, value)
        self._nodes[key] = node
        if parent is not None:
            parent.children[key] = node
        return node

    def remove_node(self, node: RadixNode[V]) -> None:
        """Take a leaf away."""
        assert not node.children
        del self._nodes[node.key]
        if node.parent is not None:
            del node.parent.children[node.key]

    def subtree(self, node: RadixNode[V]) -> list[RadixNode[V]]:
        """`node` and everything below it, children before parents."""
        return list(self._walk([node]))[::-1]

    def preorder(self) -> Iterator[RadixNode[V]]:
        """Every node, parents before children, each chain in one piece as far as it goes."""
        return self._walk([node for node in self._nodes.values() if node.parent is None])

    def validate(self) -> None:
        for key, node in self._nodes.items():
            assert node.key == key
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "orphan"
                assert node.parent.children.get(key) is node
            assert all(self._nodes.get(child) is below for child, below in node.children.items())
        assert sum(1 for _ in self.preorder()) == len(self._nodes), "a cycle"

    @staticmethod
    def _walk(waiting: list[RadixNode[V]]) -> Iterator[RadixNode[V]]:
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())
