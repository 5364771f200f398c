"""What the stores of a model cluster have, and what they tell of it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages import TOKEN_BYTES, PageSegment, Snapshot
from kvstore.events.wire_format import BlockStored, KvEventBatch
from kvstore.keys import START, page_keys, split_keys

PAGE = 4  # tokens


def chain_of(root: bytes, tokens: bytes, pages: int) -> list[bytes]:
    """The keys of the first pages of some tokens."""
    return split_keys(page_keys(root, tokens[: pages * PAGE * TOKEN_BYTES], PAGE))


class Stores:
    """Pages by the incarnation of a store: its keys, each with the one before it, parents first."""

    def __init__(self) -> None:
        self._pages: dict[str, dict[bytes, bytes]] = {}
        self._batches: dict[str, int] = {}  # published

    def seal(self, store: str, chain: Sequence[bytes]) -> KvEventBatch | None:
        """The pages of a chain are in that store now. Returns what it publishes of it."""
        pages = self._pages.setdefault(store, {})
        links = list(zip(chain, [START, *chain[:-1]], strict=True))
        new = [(key, parent) for key, parent in links if key not in pages]
        if not new:
            return None
        pages |= new
        self._batches[store] = self._batches.get(store, 0) + 1
        keys, parent = tuple(key for key, _ in new), new[0][1] or None
        return KvEventBatch(store, self._batches[store], (BlockStored(keys, parent, (), PAGE, None, "CPU", None),))

    def lose(self, store: str) -> None:
        """It drops everything, and what it says of that never arrives."""
        self._pages.pop(store, None)

    def has(self, store: str, chain: Sequence[bytes]) -> bool:
        return self._pages.get(store, {}).keys() >= set(chain)

    def snapshot(self, store: str) -> Snapshot:
        runs = tuple(PageSegment(parent, key, "CPU") for key, parent in self._pages.get(store, {}).items())
        return Snapshot(self._batches.get(store, 0), runs)
