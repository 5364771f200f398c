"""Long prompts that several prefill workers of a node compute at a time, and how many of them are worth it
(`engine.step.ring`).

Chunks of equal length are computed by the workers in turn, layer behind layer. So the prompt takes what the chunks of
the worker with the last one take. That is the worker's part of the prompt, and what the last of as many chunks as there
are workers takes longer than their mean:

    w workers, n chunks of c tokens    c · ⌈n / w⌉ · seconds / tokens  +  c · tokens · pair · (w − 1) / 2w

The slowest of them sets the pace. None may have another prompt, and their store must have all that is cached of this
one. All leave the ring when another prompt comes to one of them, so each must save some time. Pure.
"""

# pyright: strict

from math import ceil, inf

from msgspec import Struct

from baton.messages import MAX_KEYS_PER_CALL, MAX_RING
from router.placement.types import PlacementRequest
from router.placement.worker_table import Flags, Floats, WorkerTable

_WORTH = 0.05  # seconds that each worker more must save
_BEGIN = 0.01  # seconds until all have come
FIRST_LAYER = 1 / 8  # of a chunk, at most, that each waits for the one before it
_LEAST = 256  # tokens of a chunk, unless the prompt has less than two such: smaller ones are computed slowly
_ALONE = 4  # times `prefill.step_ms` lasts a chunk, as the step of a prompt that is alone


class RingOffer(Struct, frozen=True):
    """What a worker's prompt takes with the help of others."""

    helpers: tuple[int, ...]  # their rows, in the order of their places
    pages: int  # of a chunk
    seconds: tuple[float, ...]  # with 1, 2, … workers; inf: the prompt has too few chunks for so many


def find_rings(
    ask: PlacementRequest,
    table: WorkerTable,
    able: Flags,
    cached: Floats,
    device: Floats,
    compute: Floats,
    step: float,
) -> dict[int, RingOffer]:
    """Return for the rows of prefill workers what others' help is worth, where it is worth anything. `able`: they have
    no prompt, and their store has all that is cached of this one. `step`: `prefill.step_ms` in seconds."""
    rows = able.nonzero()[0]
    if len(rows) < 2 or ask.decode_only:
        return {}
    offers: dict[int, RingOffer] = {}
    for row in rows:
        near = rows[(table.node[rows] == table.node[row]) & (rows != row) & (device[rows] <= cached[row])]
        near = near[compute[near].argsort(kind="stable")][: MAX_RING - 1]
        pages, size = ask.hand_off_pages - int(cached[row]), ask.prefix.page_size
        most = min(MAX_KEYS_PER_CALL, int(table.chunk[row]) // size)
        if pages < 2 or not most:
            continue
        ways = [(float(compute[row]), 0)]
        for workers, slowest in enumerate(compute[near], 2):
            ways.append(
                _with(workers, max(ways[0][0], float(slowest)), float(table.pair[row]), pages, size, most, step)
            )
        seconds = [ways[0][0], *(each * table.ring_ratio(w) + _BEGIN for w, (each, _) in enumerate(ways[1:], 2))]
        helpers = min(range(len(ways)), key=lambda number: seconds[number] + number * _WORTH)
        if helpers:
            offers[int(row)] = RingOffer(tuple(map(int, near[:helpers])), ways[helpers][1], tuple(seconds))
    return offers


def _with(workers: int, alone: float, pair: float, pages: int, size: int, most: int, step: float) -> tuple[float, int]:
    """Return the seconds with so many workers that each would take `alone`, and the pages of a chunk."""
    rounds = max(ceil(alone / (workers * _ALONE * step)), ceil(pages / (workers * most)))
    chunk = min(max(ceil(pages / (workers * rounds)), min(_LEAST // size, ceil(pages / 2))), most)
    if (count := ceil(pages / chunk)) < workers:
        return inf, 0
    last = alone * ceil(count / workers) + pair * (pages * size) ** 2 * (workers - 1) / (2 * workers)
    return (last + (workers - 1) * FIRST_LAYER * alone) * chunk / pages, chunk
