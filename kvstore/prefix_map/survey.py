"""A picture of the tree of cached prefixes, made in small steps beside the work of the map's owner.

    start                      pages →
    ┌───────────────────────┬──────────┬────────┐
    │ a prefix that all     │ one chat │ turn 2 │   a rectangle is a stretch of pages with the same holders,
    │ chats share           ├──────────┴──┬─────┘   as wide as it has pages, and as high as the number of
    │                       │ another one │         chains that go through it
    └───────────────────────┴─────────────┘

A `Survey` looks at every run of a `KeyRuns`, a bounded number at each step. The map may change between two steps, so
the picture may mix instants a second apart. It is a picture, and nothing is decided by it. Of a large map, every n-th
run is drawn, each with all runs above it. `draw` needs the map no more and may run on a thread.
"""

# pyright: strict

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from kvstore.keys import START
from kvstore.prefix_map.key_runs import KeyRun, KeyRuns

MAX_NODES = 240
"""Rectangles in a picture. The largest are drawn one by one, and what remains below each is drawn as one."""

_DRAWN_RUNS = 4_096


class PrefixNode(Struct, frozen=True, array_like=True):
    """A stretch of pages. `parent` is the index of the node that it follows (-1: a chain's start). It begins after
    `depth` pages and is `length` pages long. `chains` end in it or below it, and `pages` are in it and below it. `mask`
    names its holders. `merged` nodes were too small to be drawn one by one: then `length` is their mean."""

    parent: int
    depth: int
    length: int
    chains: int
    pages: int
    mask: int
    merged: int = 0


class PrefixPicture(Struct, frozen=True):
    """Nodes, parents before children. `drawn` of all `runs` of the map were looked at."""

    nodes: Sequence[PrefixNode]
    runs: int
    drawn: int


class Survey:
    """One look at the whole map. Call `step` until it returns True, then `draw`."""

    def __init__(self, runs: KeyRuns) -> None:
        self._runs = runs
        self._masks = list(runs.groups)[::-1]  # still to be looked at
        self._left: list[KeyRun] = []  # of the mask that is looked at now
        self._total = sum(len(group.runs) for group in runs.groups.values())
        self._stride = -(-self._total // _DRAWN_RUNS) or 1
        self._seen = 0
        self._positions: dict[KeyRun, _RunPosition] = {}
        self.pages = Counter[int]()
        """Pages of each mask, once `step` has returned True."""

    def step(self, most: int) -> bool:
        """Look at about `most` more runs. True: all have been looked at."""
        for _ in range(most):
            while not self._left:
                if not self._masks:
                    return True
                group = self._runs.groups.get(self._masks.pop())
                self._left = list(group.runs) if group is not None else []
            run = self._left.pop()
            self.pages[run.mask] += len(run.keys)
            if self._seen % self._stride == 0:
                self._find(run)
            self._seen += 1
        return False

    def _find(self, run: KeyRun) -> None:
        """Note the run, and every run above it that is not noted yet."""
        while run.keys and run not in self._positions:
            above = self._runs.index.get(run.above) if run.above != START else None
            at = 0 if above is None or above is run else above.keys.index(run.above) + 1
            self._positions[run] = _RunPosition(len(run.keys), run.mask, above if at else None, at)
            if not at or above is None:
                return
            run = above

    def draw(self, nodes: int = MAX_NODES) -> PrefixPicture:
        """The picture, of about so many nodes. It reads nothing but what `step` has noted."""
        return PrefixPicture(_drawn(_stretches(self._positions), nodes), self._total, len(self._positions))


@dataclass(slots=True)
class _RunPosition:
    """A run as it was: it follows the first `at` pages of the run `above`."""

    length: int
    mask: int
    above: KeyRun | None
    at: int


@dataclass(slots=True, eq=False)
class _Stretch:
    """Pages of one run between two places where other chains branch off."""

    depth: int
    length: int
    mask: int
    below: list[_Stretch] = field(default_factory=list["_Stretch"])
    chains: int = 0
    pages: int = 0


def _stretches(positions: Mapping[KeyRun, _RunPosition]) -> _Stretch:
    """The tree: a root of no pages, and below it the first stretch of every chain."""
    branches: defaultdict[KeyRun | None, list[tuple[int, KeyRun]]] = defaultdict(list)
    for run, one in positions.items():
        branches[one.above if one.above in positions else None].append((one.at, run))
    root = _Stretch(0, 0, 0)
    order = [root]
    todo = [(run, root) for _, run in branches[None]]
    while todo:
        run, above = todo.pop()
        one = positions[run]
        begin, depth, parent = 0, above.depth + above.length, above
        children = sorted(branches.get(run, ()), key=lambda branch: branch[0])
        cuts = sorted({min(at, one.length) for at, _ in children} | {one.length})
        at_cut: dict[int, _Stretch] = {}
        for cut in cuts:
            stretch = _Stretch(depth + begin, cut - begin, one.mask)
            parent.below.append(stretch)
            order.append(stretch)
            parent = at_cut[cut] = stretch
            begin = cut
        todo += [(child, at_cut[min(at, one.length)]) for at, child in children]
    for stretch in reversed(order):  # children first
        while len(stretch.below) == 1 and stretch.below[0].mask == stretch.mask:  # one chain, cut where a run ends
            only = stretch.below[0]
            stretch.length, stretch.below = stretch.length + only.length, only.below
        stretch.chains = sum(below.chains for below in stretch.below) or 1
        stretch.pages = stretch.length + sum(below.pages for below in stretch.below)
    return root


def _drawn(root: _Stretch, most: int) -> list[PrefixNode]:
    """The nodes of the largest subtrees, and one for all others below the same parent."""
    nodes: list[PrefixNode] = []
    heap: list[tuple[int, int, int, _Stretch]] = []  # pages (negative), tie-breaker, parent, stretch
    waiting: dict[int, list[_Stretch]] = {}  # by parent: those that are not drawn
    ties = iter(range(1 << 62))

    def offer(stretches: Sequence[_Stretch], parent: int) -> None:
        waiting[parent] = list(stretches)
        for each in stretches:
            heapq.heappush(heap, (-each.pages, next(ties), parent, each))

    offer(root.below, -1)
    while heap and len(nodes) < most:
        _, _, parent, stretch = heapq.heappop(heap)
        waiting[parent].remove(stretch)
        nodes.append(PrefixNode(parent, stretch.depth, stretch.length, stretch.chains, stretch.pages, stretch.mask))
        offer(stretch.below, len(nodes) - 1)
    nodes += _merged(waiting)
    return nodes


def _merged(waiting: Mapping[int, Sequence[_Stretch]]) -> Iterator[PrefixNode]:
    for parent, rest in waiting.items():
        if rest:
            pages = sum(each.pages for each in rest)
            chains = sum(each.chains for each in rest)
            mask = max(rest, key=lambda each: each.pages).mask
            yield PrefixNode(parent, rest[0].depth, max(1, pages // chains), chains, pages, mask, len(rest))
