"""The prefix map: how much of a prefix each process holds, and on which tier.

A holder is one incarnation of a worker or a store. Its KV events and snapshots fill the map. The map is a hint: a stale
entry costs a recompute, never a wrong token, because the holder itself finds a page by its key.

Keys are hash-chained, so a table of keys is a radix tree; `kvstore.prefix_map.key_runs` keeps it small. Here the bits
of a run's mask get their meaning: three for each holder, one for each tier. Beside them each holder has a count of its
pages and the digest of all that it has, which its publisher keeps too (`kvstore.events.changes.digest`): so the two can
be compared.

Pure, and nothing here ever fails on what a holder says: what can't be is kept out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from msgspec import Struct, field

from baton.errors import MalformedMessage
from baton.messages import Medium, PageSegment
from kvstore.events.changes import digest
from kvstore.keys import START, split_keys
from kvstore.prefix_map.key_runs import KeyRun, KeyRuns
from kvstore.prefix_map.survey import Survey

MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "DISK")
"""Every tier, fastest first."""

_BITS: Mapping[Medium, int] = {medium: 1 << place for place, medium in enumerate(MEDIA)}
_WIDTH = len(MEDIA)  # bits of a mask for each holder
_ALL = (1 << _WIDTH) - 1
_FASTEST = tuple((bits & -bits).bit_length() - 1 for bits in range(_ALL + 1))  # by a holder's bits; -1 for none
_CHUNK = 1_024  # keys looked at together


class PrefixMatch(Struct, frozen=True):
    """How much of a chain one holder has: its first `pages` pages without a gap, each counted in `tiers` under the
    fastest tier that has it."""

    pages: int
    tiers: Mapping[Medium, int] = field(default_factory=dict[Medium, int])


@dataclass(frozen=True, slots=True)
class PrefixMapStats:
    """Counts: `entries` are pairs of holder and page, `runs` what the pages are kept in; `gaps` counts what was kept
    out for want of its parent."""

    holders: int
    pages: int
    entries: int
    runs: int
    gaps: int


@dataclass(slots=True, eq=False)
class _Holder:
    name: str
    place: int  # no two holders have the same; used again when its holder has gone
    shift: int  # of its bits in a mask
    field: int  # all of them
    pages: int = 0
    digest: int = 0


class PrefixMap:
    """Pages by key, with their holders."""

    def __init__(self) -> None:
        self._runs = KeyRuns()
        self._holders: dict[str, _Holder] = {}
        self._by_place: dict[int, _Holder] = {}
        self._vacant: list[int] = []  # places
        self._places = count()
        self._gaps = 0

    # --- what holders say -------------------------------------------------------------------------------------------

    def stored(self, holder: str, parent: bytes, keys: Sequence[bytes], medium: Medium) -> bool:
        """`holder` has `keys`, which follow `parent` (empty at the start of a chain). False when it is not known to
        have `parent`: an event was missed, the pages stay out, and a snapshot is due."""
        me, runs = self._enter(holder), self._runs
        if parent != START and not ((above := runs.index.get(parent)) and above.mask & me.field):
            self._gaps += 1
            return False
        bit = _BITS[medium] << me.shift
        keys = list(keys)
        at = one_by_one = 0
        while at < len(keys):
            if (run := runs.index.get(keys[at])) is not None:
                start, end = run.ahead(keys, at)
                new, mask = run.keys[start:end], run.mask
                if not mask & bit:
                    me.pages += 0 if mask & me.field else len(new)
                    me.digest ^= digest(new, medium)
                    runs.put(run, start, end, mask | bit)
            else:
                # Most often all are new, and go in at once. Where some are not, or come twice, one goes in at a time
                # until those are behind us: no key is looked at more than twice.
                new = keys[at : at + _CHUNK] if at >= one_by_one else keys[at : at + 1]
                if len(new) > 1 and not self._are_new(new):
                    one_by_one = at + len(new)
                    new = new[:1]
                me.pages += len(new)
                me.digest ^= digest(new, medium)
                runs.add_keys(keys[at - 1] if at else parent, new, bit)
            at += len(new)
        return True

    def removed(self, holder: str, keys: Sequence[bytes], medium: Medium) -> None:
        """`holder` no longer has `keys` on that tier; it may still on another."""
        if (me := self._holders.get(holder)) is None:
            return
        bit = _BITS[medium] << me.shift
        keys = list(keys)
        at = 0
        while at < len(keys):
            run = self._runs.index.get(keys[at])
            if run is None or not run.mask & bit:
                at += 1
                continue
            start, end = run.back(keys, at)
            mask = run.mask & ~bit
            me.pages -= 0 if mask & me.field else end - start
            me.digest ^= digest(run.keys[start:end], medium)
            self._runs.put(run, start, end, mask)
            at += end - start

    def cleared(self, holder: str) -> None:
        """`holder` is there, with nothing."""
        me = self._enter(holder)
        if me.pages:
            self._runs.strip(me.field)
        me.pages = me.digest = 0

    def remove_holder(self, holder: str) -> None:
        """`holder` is gone: no match names it from now on."""
        if holder in self._holders:
            self.cleared(holder)
            place = self._holders.pop(holder).place
            del self._by_place[place]
            self._vacant.append(place)

    def load_snapshot(self, holder: str, runs: Iterable[PageSegment]) -> bool:
        """Replace all that is known of `holder`. Parents stand before their children."""
        self.cleared(holder)
        return self.extend(holder, runs)

    def extend(self, holder: str, runs: Iterable[PageSegment]) -> bool:
        """More of a snapshot. False when a part of it makes no sense, and was left out."""
        whole = True
        for run in runs:
            try:
                whole &= self.stored(holder, run.parent, split_keys(run.keys), run.medium)
            except MalformedMessage:
                whole = False
        return whole

    # --- what is asked ----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> dict[str, PrefixMatch]:
        """For each holder of the first key, how far it has the chain `keys` without a gap."""
        ended: dict[str, PrefixMatch] = {}
        going: dict[_Holder, list[int]] | None = None  # pages per fastest tier, of holders without a gap so far
        for mask, pages in self._stretches(list(keys)):
            if going is None:
                going = {me: [0] * _WIDTH for me in self._in(mask)}
            for me, counts in list(going.items()):
                if bits := mask >> me.shift & _ALL:
                    counts[_FASTEST[bits]] += pages
                else:
                    ended[me.name] = _match(*counts)
                    del going[me]
            if not going:
                break
        return ended | {me.name: _match(*counts) for me, counts in (going or {}).items()}

    def holders(self) -> list[str]:
        return list(self._holders)

    def pages(self, holder: str) -> int:
        """How many pages `holder` has, on whatever tier."""
        me = self._holders.get(holder)
        return 0 if me is None else me.pages

    def digest(self, holder: str) -> int:
        """Of all that `holder` has: see `kvstore.events.changes.digest`."""
        me = self._holders.get(holder)
        return 0 if me is None else me.digest

    def stats(self) -> PrefixMapStats:
        return PrefixMapStats(
            holders=len(self._holders),
            pages=len(self._runs.index),
            entries=sum(me.pages for me in self._holders.values()),
            runs=sum(len(group.runs) for group in self._runs.groups.values()),
            gaps=self._gaps,
        )

    def survey(self) -> Survey:
        """Begin a look at the whole tree of prefixes."""
        return Survey(self._runs)

    def holders_of(self, mask: int) -> dict[str, tuple[Medium, ...]]:
        """The holders that a mask names, each with its tiers, the fastest first. A holder that has gone is left out."""
        return {
            me.name: tuple(medium for medium, bit in _BITS.items() if mask >> me.shift & bit)
            for me in self._holders.values()
            if mask & me.field
        }

    def validate(self) -> None:
        self._runs.validate()
        assert len({me.shift for me in self._holders.values()}) == len(self._holders), "two holders in one place"
        everybody = sum(me.field for me in self._holders.values())
        assert not any(mask & ~everybody for mask in self._runs.groups), "pages of a holder that is gone"
        for me in self._holders.values():
            mine = [(run, run.mask >> me.shift & _ALL) for run in self._all_runs() if run.mask & me.field]
            assert me.pages == sum(len(run.keys) for run, _ in mine)
            expected = 0
            for run, bits in mine:
                for medium in MEDIA:
                    expected ^= digest(run.keys, medium) if bits & _BITS[medium] else 0
            assert me.digest == expected, "a digest of something else"

    # --- small parts ------------------------------------------------------------------------------------------------

    def _enter(self, holder: str) -> _Holder:
        me = self._holders.get(holder)
        if me is None:
            place = self._vacant.pop() if self._vacant else next(self._places)
            shift = _WIDTH * place
            me = self._holders[holder] = self._by_place[place] = _Holder(holder, place, shift, _ALL << shift)
        return me

    def _are_new(self, keys: list[bytes]) -> bool:
        """Whether no holder has any of `keys`, and none of them comes twice."""
        once = dict.fromkeys(keys)
        return len(once) == len(keys) and self._runs.index.keys().isdisjoint(once.keys())

    def _stretches(self, keys: list[bytes]) -> Iterator[tuple[int, int]]:
        """Return the holders of the start of `keys`: masks, each with the number of pages in a row that it holds
        for."""
        at = pages = mask = 0
        while at < len(keys) and (run := self._runs.index.get(keys[at])) is not None:
            if run.mask != mask:
                if pages:
                    yield mask, pages
                mask, pages = run.mask, 0
            start, end = run.ahead(keys, at)
            at += end - start
            pages += end - start
        if pages:
            yield mask, pages

    def _in(self, mask: int) -> Iterator[_Holder]:
        while mask:
            me = self._by_place[((mask & -mask).bit_length() - 1) // _WIDTH]
            yield me
            mask &= ~me.field

    def _all_runs(self) -> list[KeyRun]:
        return [run for group in self._runs.groups.values() for run in group.runs]


@lru_cache(maxsize=4_096)
def _match(*counts: int) -> PrefixMatch:
    """Of so many pages on each tier. Remembered, for most holders have as much as many others."""
    tiers: dict[Medium, int] = {medium: count for medium, count in zip(MEDIA, counts, strict=True) if count}
    return PrefixMatch(sum(counts), tiers)
