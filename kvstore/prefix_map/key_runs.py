"""Page keys in runs: what makes a map of millions of pages small and quick to search.

    run   a b c d   group {x, y}  ──next──▶  run   e f   group {x}  ──next──▶ …
                └─ above of ─▶  run   g h i   group {y}

A *run* is consecutive keys of one chain that belong to the same group. A *group* is a set of holders with their tiers,
written as the bits of a number, the `mask`. A table finds the run of every key. Where another chain branches off, a run
goes on. So the runs are paths that the radix tree of all chains is cut into.

Runs are cut where masks part ways and joined again when these agree. Cutting and joining touch the smaller part only,
and no run is longer than `MAX_RUN`: so whatever a holder says about one page costs a bounded time.

Owns keys, runs and groups. What the bits of a mask mean is the business of `kvstore.prefix_map.prefix_map`.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence

from kvstore.keys import START

MAX_RUN = 256
"""Keys in a run at most. Longer ones would save nothing: what a run costs besides its keys is under a byte each."""


class KeyRunGroup:
    """Every run of one mask. There is none without a run."""

    __slots__ = ("mask", "runs")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.runs: set[KeyRun] = set()


class KeyRun:
    """`keys`, of which the first follows the key `above` (empty: a chain's start, or unknown).

    `next` is one run, if there is any, that follows the last key and might be joined to this one: where several follow,
    it is the one that came first."""

    __slots__ = ("above", "group", "keys", "next")

    def __init__(self, keys: list[bytes], group: KeyRunGroup, above: bytes, after: KeyRun | None = None) -> None:
        self.keys = keys
        self.group = group
        self.above = above
        self.next = after
        group.runs.add(self)

    @property
    def mask(self) -> int:
        return self.group.mask

    def ahead(self, keys: list[bytes], at: int) -> tuple[int, int]:
        """Where keys[at], which is in this run, stands and how far `keys` goes along with it from there: [start, end)
        of this run."""
        mine = self.keys
        start = self._place(keys[at])
        length = min(len(mine) - start, len(keys) - at)
        if length > 1 and mine[start : start + length] != keys[at : at + length]:
            length = next(i for i in range(length) if mine[start + i] != keys[at + i])
        return start, start + length

    def back(self, keys: list[bytes], at: int) -> tuple[int, int]:
        """The same for `keys` that may go backwards, children before parents."""
        mine = self.keys
        last = self._place(keys[at])
        if not last or at + 1 == len(keys) or mine[last - 1] != keys[at + 1]:
            return self.ahead(keys, at)
        length = min(last + 1, len(keys) - at)
        if mine[last + 1 - length : last + 1] != keys[at : at + length][::-1]:
            length = next(i for i in range(length) if mine[last - i] != keys[at + i])
        return last + 1 - length, last + 1

    def _place(self, key: bytes) -> int:
        if self.keys[0] == key:  # as nearly always
            return 0
        if self.keys[-1] == key:
            return len(self.keys) - 1
        return self.keys.index(key)


class KeyRuns:
    """All keys that any holder has, each in one run."""

    def __init__(self) -> None:
        self.index: dict[bytes, KeyRun] = {}  # its keys are the very objects in the runs: each exists once
        self.groups: dict[int, KeyRunGroup] = {}

    def add_keys(self, above: bytes, keys: list[bytes], mask: int) -> None:
        """Add keys without a holder yet, none of them twice, each following the one before."""
        group = self._group(mask)
        before = self.index.get(above)
        if before is not None and (before.next is not None or before.keys[-1] != above):
            before = None  # another chain goes on there: this one branches off
        room = MAX_RUN - len(before.keys) if before is not None and before.group is group else 0
        if before is not None and room:
            head = keys[:room]
            before.keys += head
            self._point(head, before)
        for start in range(room, len(keys), MAX_RUN):
            run = KeyRun(keys[start : start + MAX_RUN], group, above if before is None else before.keys[-1])
            self._point(run.keys, run)
            if before is not None:
                before.next = run
            before = run

    def put(self, run: KeyRun, start: int, end: int, mask: int) -> None:
        """The pages [start, end) of `run` get another mask; 0 forgets them."""
        if start and end == len(run.keys) and not mask:  # as pages are evicted: no need to cut what goes
            self._unpoint(run.keys[start:])
            del run.keys[start:]
            run.next = None
            self._settle(run)
            return
        head = tail = None
        if end < len(run.keys):
            run, tail = self._cut(run, end)
        if start:
            head, run = self._cut(run, start)
        if mask:
            self._leave(run)
            run.group = self._group(mask)
            run.group.runs.add(run)
        else:
            self._forget(run)
        for part in (head, run, tail):
            if part is not None and part.keys:
                self._settle(part)

    def strip(self, field: int) -> None:
        """No mask has any bit of `field` any more."""
        changed: list[KeyRun] = []
        for group in [group for mask, group in self.groups.items() if mask & field]:
            if mask := group.mask & ~field:
                target = self._group(mask)
                target.runs |= group.runs
                changed += group.runs
                for run in group.runs:
                    run.group = target
                del self.groups[group.mask]
            else:
                for run in list(group.runs):
                    self._forget(run)
        for run in changed:
            if run.keys:
                self._settle(run)

    # --- cutting and joining ----------------------------------------------------------------------------------------

    def _cut(self, run: KeyRun, at: int) -> tuple[KeyRun, KeyRun]:
        """Two runs of one; the longer keeps its place in the table."""
        keys = run.keys
        if 2 * at > len(keys):
            tail = run.next = KeyRun(keys[at:], run.group, keys[at - 1], run.next)
            del keys[at:]
            self._point(tail.keys, tail)
            return run, tail
        before = self._before(run)
        head = KeyRun(keys[:at], run.group, run.above, run)
        del keys[:at]
        run.above = head.keys[-1]
        if before is not None:
            before.next = head
        self._point(head.keys, head)
        return head, run

    def _settle(self, run: KeyRun) -> None:
        """Join a run that has changed with its neighbours, as far as that is possible: where several have changed at
        once, those next to them may have to follow."""
        while (after := run.next) is not None and _fit(run, after):
            run = self._join(run, after)
        while (before := self._before(run)) is not None and _fit(before, run):
            run = self._join(before, run)

    def _join(self, run: KeyRun, after: KeyRun) -> KeyRun:
        """Make `after`, which is next to `run`, part of it; returns what `run` is now."""
        if len(run.keys) >= len(after.keys):
            self._point(after.keys, run)
            run.keys += after.keys
            run.next = after.next
            return self._drop(after, run)
        if (before := self._before(run)) is not None:
            before.next = after
        self._point(run.keys, after)
        after.keys[:0] = run.keys
        after.above = run.above
        return self._drop(run, after)

    def _drop(self, run: KeyRun, into: KeyRun) -> KeyRun:
        run.group.runs.discard(run)
        run.keys = []
        return into

    def _forget(self, run: KeyRun) -> None:
        if (before := self._before(run)) is not None:
            before.next = None
        self._leave(run)
        self._unpoint(run.keys)
        run.keys = []

    # --- small parts ------------------------------------------------------------------------------------------------

    def _before(self, run: KeyRun) -> KeyRun | None:
        """The run that has this one for its `next`."""
        before = self.index.get(run.above)
        return before if before is not None and before.next is run else None

    def _point(self, keys: Sequence[bytes], run: KeyRun) -> None:
        if len(keys) == 1:
            self.index[keys[0]] = run
        else:
            self.index.update(dict.fromkeys(keys, run))

    def _unpoint(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.index[key]

    def _group(self, mask: int) -> KeyRunGroup:
        group = self.groups.get(mask)
        if group is None:
            group = self.groups[mask] = KeyRunGroup(mask)
        return group

    def _leave(self, run: KeyRun) -> None:
        group = run.group
        group.runs.discard(run)
        if not group.runs:
            del self.groups[group.mask]

    def validate(self) -> None:
        runs = {run for group in self.groups.values() for run in group.runs}
        for mask, group in self.groups.items():
            assert mask == group.mask
            assert mask, "pages that nobody has"
            assert group.runs, "a group of no runs"
            assert all(run.group is group for run in group.runs)
        assert sum(len(run.keys) for run in runs) == len(self.index), "a key in two runs, or twice in one"
        for run in runs:
            assert 1 <= len(run.keys) <= MAX_RUN
            assert all(self.index.get(key) is run for key in run.keys), "the table points elsewhere"
            if (after := run.next) is not None:
                assert after in runs, "next to a run that is gone"
                assert after is not run
                assert after.above == run.keys[-1] != START
                apart = after.group is not run.group or len(run.keys) + len(after.keys) > MAX_RUN
                assert apart, "two runs that could be one"


def _fit(run: KeyRun, after: KeyRun) -> bool:
    """Whether the two, one next to the other, may be one."""
    return run.group is after.group and len(run.keys) + len(after.keys) <= MAX_RUN
