"""The global prefix map: how quickly it is filled, asked and kept up to date, and how much memory it takes.

    bench/prefix_map.py [--quick] [--pages N] [--holders N]

Everything comes from the wire, decoded within the time that is measured: snapshots through the tracker that a router
has, events as their publishers encode them. docs/lab/benchmarks.md says what the cases are.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from baton.messages import Medium, Snapshot
from bench import report
from bench.neighbours import Neighbours
from kvstore.events.changes import CacheChange, PagesRemoved, PagesStored, page_runs, snapshot_parts
from kvstore.events.wire_format import EncodedKvEventBatch, KvEventLog, decode
from router.placement.kv_index import KvIndex

_PROMPT = 131_072 // 16  # pages of 128k tokens
_PAGES_AN_EVENT, _EVENTS_A_BATCH = 64, 16
_SHARED = 0.2  # of the chains, each on this many holders:
_ON = 3

_decoder = msgspec.msgpack.Decoder(Snapshot)


@dataclass(frozen=True)
class World:
    """What each holder has: its snapshot, encoded, in parts. `pages` counts different ones, `entries` all held."""

    snapshots: dict[str, list[bytes]]
    pages: int
    entries: int


def main(argv: Sequence[str] | None = None) -> int:
    asked = parse(argv)
    report.say(report.machine())
    neighbours = Neighbours()
    random_ = random.Random(asked.seed)
    report.say(f"making {asked.pages} pages for {asked.holders} holders")
    world = make(asked.pages, asked.holders, random_)
    where = f"{world.pages} pages, {asked.holders} holders"
    for result in measure(world, asked.runs, asked.events, random_):
        report.emit(replace(result, case=f"{where}: {result.case}"))
    report.emit(report.Result("prefix_map", f"{where}: used by others meanwhile", neighbours.lap(), "cores"))
    return 0


def measure(world: World, runs: int, events: int, random_: random.Random) -> Iterator[report.Result]:
    report.say("restoring it")
    taken: list[tuple[float, float]] = []
    full = KvIndex()
    for _ in range(runs):
        full = KvIndex()  # the last one goes before the next is made
        taken.append(restore(full, world))
    walls, cpus = zip(*taken, strict=True)
    yield _judged(report.median_of("prefix_map", "restore from snapshots", "s", walls), 5.0, "low")
    yield report.median_of("prefix_map", "restore from snapshots, CPU time", "s", cpus)
    report.say("asking it")
    yield from matches(full, list(world.snapshots), random_)
    report.say("telling it")
    for name, rates in event_rates(full, list(world.snapshots)[:2], events, runs, random_).items():
        yield _judged(report.median_of("prefix_map", name, "pages/s", rates), 300_000, "high")
    for name, rates in single_rates(full, list(world.snapshots)[:2], events // 8, runs, random_).items():
        yield report.median_of("prefix_map", name, "pages/s", rates)
    report.say("removing holders")
    removals = [_timed(partial(full.forget, holder)) for holder in list(world.snapshots)[: 2 * runs]]
    yield _judged(report.median_of("prefix_map", "removal of a holder", "s", removals), 1.0, "low")
    full = KvIndex()
    report.say("weighing it")
    yield _judged(report.Result("prefix_map", "memory a page (tracemalloc)", weigh(world), "bytes"), 300, "low")


# --- the cases --------------------------------------------------------------------------------------------------------


def restore(prefixes: KvIndex, world: World) -> tuple[float, float]:
    """Return the seconds until an empty map holds the pages of all holders, and the CPU seconds among them."""
    gc.collect()
    for holder in world.snapshots:
        prefixes.follow(holder, 0.0)
    started, busy = time.perf_counter(), time.process_time()
    for holder, parts in world.snapshots.items():
        for part in parts:
            prefixes.apply_snapshot(holder, _decoder.decode(part), 0.0)
    return time.perf_counter() - started, time.process_time() - busy


def matches(prefixes: KvIndex, holders: Sequence[str], random_: random.Random) -> Iterator[report.Result]:
    """The longest match of a long prompt: where holders have more or less of it, and where tiers change at every page,
    so that there is nothing to compress."""
    for name, scattered, target in (
        ("match of 128k tokens", False, 2e-3),
        ("the same, no two pages alike", True, None),
    ):
        prompt = chain(_PROMPT, random_)
        for place, holder in enumerate(holders):
            has = prompt[: _PROMPT - 16 * place]
            prefixes._map.stored(holder, b"", has, "CPU")
            for page in range(place % 2, len(has), 2) if scattered else ():
                prefixes._map.stored(holder, b"", has[page : page + 1], "DISK")
        asked = [bytes(bytearray(key)) for key in prompt]  # other objects than the map's: a request derives its own
        times = [_timed(partial(prefixes.match, asked)) for _ in range(5 if scattered else 101)]
        found = prefixes.match(asked)
        assert [found[holder].pages for holder in holders] == [_PROMPT - 16 * p for p in range(len(holders))]
        result = report.Result("prefix_map", name, statistics.median(times), "s")
        yield result if target is None else _judged(result, target, "low")
        for holder in holders:
            for medium in ("CPU", "DISK"):
                prefixes._map.removed(holder, prompt[::-1], medium)


def event_rates(
    prefixes: KvIndex, holders: Sequence[str], pages: int, runs: int, random_: random.Random
) -> dict[str, list[float]]:
    """Pages a second, in batches as a busy publisher sends them: chains of pages of its own, pages that another holder
    has as well, and both removed again, children first."""
    rates: dict[str, list[float]] = {}
    for _ in range(runs):
        chains = [chain(_PAGES_AN_EVENT, random_) for _ in range(pages // _PAGES_AN_EVENT)]
        stored: list[CacheChange] = [PagesStored(b"", tuple(each)) for each in chains]
        removed: list[CacheChange] = [PagesRemoved(tuple(reversed(each))) for each in chains]
        for name, holder, changes in (
            ("events in batches, stored", holders[0], stored),
            ("events in batches, stored where another has them", holders[1], stored),
            ("events in batches, removed where another has them", holders[1], removed),
            ("events in batches, removed", holders[0], removed),
        ):
            batches = [changes[at : at + _EVENTS_A_BATCH] for at in range(0, len(changes), _EVENTS_A_BATCH)]
            rates.setdefault(name, []).append(pages / told(prefixes, encoded(holder, batches)))
    return rates


def single_rates(
    prefixes: KvIndex, holders: Sequence[str], pages: int, runs: int, random_: random.Random
) -> dict[str, list[float]]:
    """The same where each batch has one event of one page: all that it costs is overhead."""
    rates: dict[str, list[float]] = {}
    for _ in range(runs):
        told_of: list[tuple[bytes, bytes]] = []  # parent and key
        for _ in range(pages // _PAGES_AN_EVENT):
            keys = chain(_PAGES_AN_EVENT, random_)
            told_of += zip([b"", *keys], keys, strict=False)
        stored = [[PagesStored(above, (key,))] for above, key in told_of]
        removed = [[PagesRemoved((key,))] for _, key in reversed(told_of)]
        for name, holder, batches in (
            ("single-page events, stored", holders[0], stored),
            ("single-page events, stored where another has them", holders[1], stored),
            ("single-page events, removed where another has them", holders[1], removed),
            ("single-page events, removed", holders[0], removed),
        ):
            rates.setdefault(name, []).append(len(stored) / told(prefixes, encoded(holder, batches)))
    return rates


def weigh(world: World) -> float:
    """Bytes that the map allocates for each page, all tables included."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        prefixes = KvIndex()
        restore(prefixes, world)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        assert prefixes.stats().pages == world.pages
    finally:
        tracemalloc.stop()
    return (after - before) / world.pages


# --- what is told -----------------------------------------------------------------------------------------------------


def make(pages: int, holders: int, random_: random.Random) -> World:
    """Conversations of 1 to a few thousand pages, most of them on one holder."""
    held: dict[str, list[list[bytes]]] = {f"holder-{number}": [] for number in range(holders)}
    left, entries = pages, 0
    while left:
        keys = chain(min(left, 1 + int(random_.lognormvariate(4.0, 1.2))), random_)
        left -= len(keys)
        on = random_.sample(list(held), min(holders, _ON if random_.random() < _SHARED else 1))
        entries += len(on) * len(keys)
        for holder in on:
            held[holder].append(keys)
    return World({holder: encoded_snapshot(chains, "CPU") for holder, chains in held.items()}, pages, entries)


def encoded_snapshot(chains: Iterable[list[bytes]], medium: Medium) -> list[bytes]:
    pages = ((key, above) for keys in chains for above, key in zip([b"", *keys], keys, strict=False))
    return [msgspec.msgpack.encode(part) for part in snapshot_parts(0, page_runs(pages, medium))]


def chain(pages: int, random_: random.Random) -> list[bytes]:
    """Return random keys: real keys look random too, and no code here checks their derivation."""
    packed = random_.randbytes(16 * pages)
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def encoded(holder: str, batches: Iterable[Sequence[CacheChange]]) -> list[EncodedKvEventBatch]:
    log = KvEventLog(holder, "model", 0.0)
    return [log.append([("CPU", changes)], 16, 0.0) for changes in batches]


def told(prefixes: KvIndex, batches: Sequence[EncodedKvEventBatch]) -> float:
    """Seconds until the map has taken these."""
    gc.collect()
    holder = decode(batches[0].topic, 0, batches[0].payload).holder
    tracker = prefixes._tracker._sources[holder]
    tracker.next = batches[0].sequence  # each list of batches is numbered from 1
    started = time.perf_counter()
    for batch in batches:
        asks = prefixes.apply_batch(decode(batch.topic, batch.sequence, batch.payload), 0.0)
        assert not asks
    return time.perf_counter() - started


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _judged(result: report.Result, target: float, better: Literal["low", "high"]) -> report.Result:
    return replace(result, target=target, ok=result.value <= target if better == "low" else result.value >= target)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 runs of everything, with fewer events")
    parser.add_argument("--pages", type=int, default=2_300_000, help="different ones")
    parser.add_argument("--holders", type=int, default=16)
    parser.add_argument("--runs", type=int, help="default: 7, and 3 with --quick")
    parser.add_argument("--events", type=int, help="pages told of in each run (default: 400,000, and 200,000)")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    asked.runs = asked.runs or (3 if asked.quick else 7)
    asked.events = asked.events or (200_000 if asked.quick else 400_000)
    if min(asked.pages, asked.runs) < 1 or asked.holders < 2 or asked.events < 8 * _PAGES_AN_EVENT:
        parser.error(f"at least one page and run, two holders, and {8 * _PAGES_AN_EVENT} pages of events")
    return asked


if __name__ == "__main__":
    sys.exit(main())
