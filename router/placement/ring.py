"""Long prompts that two prefill workers of a node compute at a time, and when that is worth it (`engine.step.ring`).

Chunks of equal length are computed by the two in turn, layer behind layer. So the prompt takes what the chunks of the
worker with the last one take. That is half of the prompt, and half of what the second of two chunks takes longer:

    c tokens, p pairs, n chunks    seconds / 2 + p · tokens² / 4n

Neither may have another prompt, and their store must have all that is cached of this one. Both leave the ring when
another prompt comes. Pure.
"""

# pyright: strict

from math import ceil

from msgspec import Struct

from baton.messages import MAX_KEYS_PER_CALL
from router.placement.types import PlacementRequest
from router.placement.worker_table import Flags, Floats, WorkerTable

_WORTH = 0.05  # seconds that must be saved
_BEGIN = 0.01  # seconds until both have come
_FIRST_LAYER = 1 / 8  # of a chunk, at most, that one waits for the other
_LEAST = 256  # tokens of a chunk, unless the prompt has less than two such: smaller ones are computed slowly
_ALONE = 4  # times `prefill.step_ms` lasts a chunk, as the step of a prompt that is alone


class RingOffer(Struct, frozen=True):
    """What a worker's prompt takes with another one's help."""

    helper: int  # its row
    pages: int  # of a chunk
    seconds: float
    alone: float  # what it takes without


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
        pages = ask.hand_off_pages - int(cached[row])
        if near.size and (offer := _offer(table, int(row), int(near[0]), pages, ask.prefix.page_size, compute, step)):
            offers[int(row)] = offer
    return offers


def _offer(
    table: WorkerTable, row: int, helper: int, pages: int, size: int, compute: Floats, step: float
) -> RingOffer | None:
    alone, most = float(compute[row]), min(MAX_KEYS_PER_CALL, int(table.chunk[row]) // size)
    if pages < 2 or not most:
        return None
    chunk = ceil(pages / max(2 * ceil(alone / (2 * _ALONE * step)), 2))
    chunk = min(max(chunk, min(_LEAST // size, ceil(pages / 2))), most)
    count = ceil(pages / chunk)
    last = alone / 2 + float(table.pair[row]) * (pages * size) ** 2 / (4 * count) + count % 2 * alone / (2 * count)
    seconds = (last + _FIRST_LAYER * alone / count) * table.ring_ratio + _BEGIN
    return RingOffer(helper, chunk, seconds, alone) if count > 1 and alone - seconds > _WORTH else None
