"""How much of agents' prompts any order of eviction could keep: pages of one cache, without a cluster around it.

    python -m bench.store.retention traces/agentic_*.jsonl --tokens 250000 400000 730000

Users play recorded sessions as in the simulator, and each turn takes a fixed time per token. Every order sees the same
requests. `lru` is the store's. `belady` knows the future and evicts what is used last: no order keeps more. `returning`
is LRU that is told which pages never return.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log2
from pathlib import Path
from typing import TypeAlias

from baton.errors import BatonError
from bench import report
from simulator import mooncake
from simulator.mooncake import BLOCK
from simulator.sessions import Sessions
from simulator.workloads import Wishes, scripted_answer

PAGE = BLOCK  # tokens
_FIRST, _TOKEN = 0.3, 0.025  # seconds until the first token, and for each one


@dataclass(frozen=True)
class Use:
    """One request: when, its prompt in tokens, the pages of the prompt, and those of prompt and answer."""

    at: float
    session: str
    prompt: int
    read: Sequence[int]
    left: Sequence[int]


def uses(lines: Sequence[mooncake.TraceLine], users: int, seconds: float, seed: int) -> list[Use]:
    """Return the requests of users in a closed loop, in order."""
    numbers: dict[tuple[int, bytes], int] = {}
    tokens = itertools.count(1)
    coming = [(arrival.at, next(tokens), arrival) for arrival in Sessions(lines, Wishes(), seed).users(users, seconds)]
    heapq.heapify(coming)
    uses: list[Use] = []
    while coming:
        at, token, arrival = heapq.heappop(coming)
        reply = scripted_answer(arrival.output, token % 60_000, 65_535)
        left = list(_pages(arrival.tokens() + reply, numbers))
        assert arrival.play is not None
        uses.append(Use(at, arrival.play.name, arrival.prompt, left[: arrival.prompt // PAGE], left))
        end = at + _FIRST + _TOKEN * arrival.output
        if (following := arrival.play.next(arrival, reply, end)) is not None:
            heapq.heappush(coming, (end + following.at, next(tokens), following))
    return uses


def _pages(text: bytes, numbers: dict[tuple[int, bytes], int]) -> Iterator[int]:
    """Yield the number of each full page. It stands for the page's tokens and all before them."""
    page = 0
    for begin in range(0, len(text) - 4 * PAGE + 1, 4 * PAGE):
        page = numbers.setdefault((page, text[begin : begin + 4 * PAGE]), len(numbers) + 1)
        yield page


Rank: TypeAlias = Callable[[int, int, int], "float | None"]
"""From the index of a use, the place of a page in it and the page's uses so far: the page with the lowest rank goes
first. None: it is not kept."""


def hits(uses: Sequence[Use], capacity: int, rank: Rank) -> float:
    """Return the share of prompt tokens that a cache of so many pages has. Later pages go before earlier ones."""
    cached: dict[int, tuple[float, int]] = {}
    order: list[tuple[float, int, int]] = []
    count: Counter[int] = Counter()
    hit = 0
    for index, use in enumerate(uses):
        hit += min(PAGE * sum(1 for _ in itertools.takewhile(cached.__contains__, use.read)), use.prompt - 1)
        for place, page in enumerate(use.left):
            count[page] += 1
            level = rank(index, place, count[page])
            if level is None:
                cached.pop(page, None)
                continue
            cached[page] = (level, -place)
            heapq.heappush(order, (level, -place, page))
        while len(cached) > capacity:
            level, place, page = heapq.heappop(order)
            if cached.get(page) == (level, place):
                del cached[page]
    return hit / sum(use.prompt for use in uses)


def s3_fifo(uses: Sequence[Use], capacity: int) -> float:
    """Return the same for S3-FIFO (SOSP'23): a tenth of the pages is on probation, and evicted ones are remembered."""
    probation: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    gone: OrderedDict[int, None] = OrderedDict()
    again: dict[int, int] = {}
    hit = 0
    for use in uses:
        hit += min(PAGE * sum(1 for _ in itertools.takewhile(again.__contains__, use.read)), use.prompt - 1)
        for page in use.left:
            if page in again:
                again[page] = min(3, again[page] + 1)
                continue
            while len(again) >= capacity:
                if len(probation) >= max(1, capacity // 10) or not main:
                    out, _ = probation.popitem(last=False)
                    if again[out]:
                        main[out], again[out] = None, 0
                        continue
                    gone[out] = None
                    if len(gone) > capacity:
                        gone.popitem(last=False)
                else:
                    out, _ = main.popitem(last=False)
                    if again[out]:
                        main[out] = None
                        again[out] -= 1
                        continue
                del again[out]
            again[page] = 0
            (main if page in gone else probation)[page] = None
            gone.pop(page, None)
    return hit / sum(use.prompt for use in uses)


def ranks(uses: Sequence[Use]) -> Mapping[str, Rank]:
    """Return the orders of eviction by name."""
    later = _next_uses(uses)
    turns: Counter[str] = Counter()
    longest: dict[str, float] = defaultdict(float)
    last: dict[str, float] = {}
    known: list[tuple[int, float]] = []  # at each use, the turns and the longest gap of its session so far
    for use in uses:
        turns[use.session] += 1
        longest[use.session] = max(longest[use.session], use.at - last.get(use.session, use.at))
        last[use.session] = use.at
        known.append((turns[use.session], longest[use.session]))
    return {
        "lru": lambda index, place, count: uses[index].at,
        "lru, 100 s per doubling of a page's uses": lambda index, place, count: uses[index].at + 100 * log2(count),
        "lfu, aged: 5 s per use": lambda index, place, count: uses[index].at + 5 * count,
        "lru, 60 s per doubling of a session's turns": lambda index, place, count: (
            uses[index].at + 60 * log2(known[index][0])
        ),
        "lru, and half the longest gap of the session": lambda index, place, count: (
            uses[index].at + known[index][1] / 2
        ),
        "returning": lambda index, place, count: uses[index].at if later[index][place] < inf else None,
        "belady": lambda index, place, count: -later[index][place] if later[index][place] < inf else None,
    }


def _next_uses(uses: Sequence[Use]) -> list[list[float]]:
    """Return, for each page that a request leaves, the index of the next request that reads it."""
    after: dict[int, float] = {}
    later: list[list[float]] = []
    for index in range(len(uses) - 1, -1, -1):
        later.append([after.get(page, inf) for page in uses[index].left])
        after.update(dict.fromkeys(uses[index].read, float(index)))
    return later[::-1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="recorded sessions, JSON lines")
    parser.add_argument("--tokens", type=int, nargs="+", default=[250_000, 400_000, 730_000], help="sizes of the cache")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3_600.0, help="until which users begin turns")
    parser.add_argument("--seeds", type=int, default=1, help="the median of so many is reported")
    arguments = parser.parse_args(argv)
    try:
        lines = [line for path in arguments.traces for line in mooncake.read(path)]
        runs = [uses(lines, arguments.users, arguments.seconds, seed + 1) for seed in range(arguments.seeds)]
    except BatonError as error:
        report.say(f"retention: {error}")
        return 1
    orders = [ranks(uses) for uses in runs]
    for tokens in [*arguments.tokens, sys.maxsize]:
        size = "no limit" if tokens == sys.maxsize else f"{tokens // 1_000} k tokens"
        for name in ("lru",) if tokens == sys.maxsize else orders[0]:
            shares = [hits(uses, tokens // PAGE, of_run[name]) for uses, of_run in zip(runs, orders, strict=True)]
            report.emit(report.median_of("retention", f"{size}: {name}", "ratio", shares))
        if tokens < sys.maxsize:
            shares = [s3_fifo(uses, tokens // PAGE) for uses in runs]
            report.emit(report.median_of("retention", f"{size}: s3-fifo", "ratio", shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
