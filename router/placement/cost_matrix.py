"""What every way to serve a request would take, in seconds until its first token: all workers priced together.

    making     load + compute of a prefill worker, until the whole prefix is sealed in its node's store
    transfer   what the way between two nodes adds: pages travel while later ones are being computed, so that is the
               latency of the link, or what the link takes longer than loading and computing
    taking     wait until a decode worker has room and keeps everybody's objective, in the end a step with this one
    delay      how much later than others a worker reads its orders, and each of its times is longer by its pace where
               it is slower than it says (`router.placement.slowness`)
    a pair     max(queue, wait) + making + transfer + step + delay
    alone      the same of a decode worker that computes the prompt itself: nothing begins before it has room

Prefilling on a decode worker delays every sequence that decodes there. That delay is charged to the placement: (running
sequences + 1) × prefill seconds. A decode worker's time per output token is predicted as a step, and for each token its
share of the prompts to be computed there. Compare Mooncake, FAST'25, where a placement must keep both objectives for
the time that decoding starts.

Pure. Arrays have a row for each worker of the `WorkerTable`, decode workers first.
"""

# pyright: strict

from __future__ import annotations

from math import inf

import numpy as np

from router.placement.cached_prefix import CacheablePrefix
from router.placement.ring import RingOffer, find_rings
from router.placement.types import Candidate, PlacementRequest, PredictedTtft
from router.placement.worker_table import FULL, NEVER, OPEN, Flags, Floats, Indices, WorkerTable

_MANY = 16  # workers of either side that are paired, those that seem best; where there are not twice as many, all
_LEVELS = 8.0  # decode workers are told apart by so many levels of sequences
_TURN = 1e-6  # seconds at most by which those used last seem dearer: so equals are used in turn


class PlacementCosts:
    """The costs of one request. They never change, so that they can be read later for an explanation."""

    def __init__(
        self,
        ask: PlacementRequest,
        table: WorkerTable,
        now: float,
        output: float,
        reserved: Floats,
        ring_step: float = 0.0,
    ) -> None:
        """`output`: tokens that the request is expected to generate; `reserved`: seconds of each worker, promised to
        requests that wait before this one. `ring_step`: that of `find_rings`."""
        self.workers, self.prefix = table.workers, ask.prefix
        self.num_decode = d = table.num_decode
        self.num_sequences = table.num_sequences[:d].copy()
        prefix = ask.prefix
        self.node, self.stored, self.serves = table.node, table.stored, table.serves.copy()
        if ask.excluded:
            self.serves[_excluded_stores(ask, table)] = 0.0
        device, host, disk = _cached_pages(ask, table)
        self._stores = not ask.decode_only and prefix.pages > 0 and bool(table.stores)
        self.cached, self.load = device, np.zeros(len(device))  # pages that need no computing; seconds of loading
        if self._stores:
            self.cached, self.load = reusable_pages(prefix, table, device, host, disk, self.serves)
        new = (prefix.pages - self.cached) * prefix.page_size
        rest = np.zeros(len(new))
        rest[d:] = ask.partial_page_tokens  # if no prefill worker computes it, the decode worker does in its first step
        tokens = new + rest
        steps = np.ceil(tokens / table.chunk)
        middle = prefix.pages * prefix.page_size + rest + 0.5 - 0.5 * tokens  # of what new tokens attend to
        self.compute = tokens * (table.token + table.pair * middle) + table.fixed * steps
        self.compute[:d] *= table.slowdown[:d]
        self.open = _open(ask, table)
        self.opened = self.open == OPEN
        self.rings: dict[int, RingOffer] = {}
        if ring_step and np.count_nonzero(table.rings) > 1:
            able = (table.rings > 0) & self.opened & table.has_store & (self.cached <= host[table.node])
            self.rings = find_rings(ask, table, able, self.cached, device, self.compute, ring_step)
            for row, offer in self.rings.items():
                self.compute[row] = offer.seconds[len(offer.helpers)]
        self.queue = np.maximum(table.prefills_done_at - now, 0.0) + reserved
        self.prefill_seconds = self.load + self.compute
        self.new_tokens = new
        self.delay, self.any_delay = table.delay.copy(), np.count_nonzero(table.delay) > 0
        self.used = table.last_used * (_TURN / max(1, table.use_count))
        self._price_decode(ask, table, device, output)
        self.local_seconds = (
            np.maximum(self.queue[:d], self.local_wait)
            + self.prefill_seconds[:d]
            + self.step
            + self.last_tokens_seconds
        )
        if self.any_delay:
            self.local_seconds += self.delay[:d]
        self.local_seconds[self.open[:d] == NEVER] = inf
        # seconds that `alone` is dearer than it takes: others wait for their tokens
        self.interference_seconds = np.zeros(d)
        self.prefill_rows = self.decode_rows = np.zeros(0, np.int64)  # prefill and decode workers that are paired
        self.pair_seconds = np.zeros((0, 0))  # inf: can't be
        self.best_pair_seconds = inf
        self.pair_pages_moved = self.pair_seconds  # pages that go from one node to another
        self.pages_to_move = self.latency = self.link = np.zeros(d)  # of the way to a decode worker: pages, seconds
        if self._stores and 0 < d < len(self.workers):
            self._price_pairs(table, device, host, ask.hand_off_pages)

    # --- the decode side ---------------------------------------------------------------------------------------------

    def _price_decode(self, ask: PlacementRequest, table: WorkerTable, device: Floats, output: float) -> None:
        """How long until a decode worker can take it, and its first step then."""
        d = self.num_decode
        size = ask.prefix.page_size
        tail = ask.tokens - ask.prefix.pages * size
        self.step = step = table.step[:d] + table.per_context[:d] * (ask.tokens + 0.5 * output)
        # what the first takes longer for one alone
        self.last_tokens_seconds = tail * (table.token[:d] + table.pair[:d] * ask.tokens)
        lack = min((ask.tokens + output) / size, ask.most_pages) - device[:d] - table.free_pages[:d]
        full = self.open[:d] == FULL
        self.wait = np.zeros(d)
        if full.any() or lack.max(initial=0.0) > 0:
            ends = np.where((lack > 0) & (self.num_sequences > 0), np.ceil(lack / table.slack[:d]), 0.0)
            self.wait = np.maximum(ends, full) * table.turnover[:d]  # so many sequences must end first
        self.local_wait = self.wait
        self.misses_tpot_alone = np.zeros(d, np.bool_)  # slower than its objective even alone
        self.tpot = step + self.queue[:d] / output  # seconds per token
        own = inf if ask.tpot is None else ask.tpot
        limit = table.tightest_tpot[:d] if ask.tpot is None else np.minimum(table.tightest_tpot[:d], own)
        if limit.min(initial=inf) == inf:
            return
        if ask.tpot is not None:
            self.misses_tpot_alone = step - table.others_step_seconds[:d] > own
        late = self.tpot - limit
        later = np.maximum(late, self.tpot + self.compute[:d] / output - table.tightest_tpot[:d])
        if later.max() > 0:
            self.wait = np.maximum(self.wait, self._seconds_until_tpot_holds(table, late, output))
            self.local_wait = np.maximum(self.wait, self._seconds_until_tpot_holds(table, later, output))

    def _seconds_until_tpot_holds(self, table: WorkerTable, late: Floats, output: float) -> Floats:
        """Seconds until each decode worker brings its tokens `late` seconds sooner: prompts that it has are computed
        then, or sequences have ended."""
        d = self.num_decode
        queue, rows = self.queue[:d], table.num_sequences[:d]
        # seconds of a step that a sequence takes
        each = np.maximum(table.others_step_seconds[:d] / np.maximum(rows, 1.0), 1e-9)
        ends = np.minimum(np.ceil(np.maximum(late - queue / output, 0.0) / each), rows)
        return np.clip(late * output, 0.0, queue) + ends * table.turnover[:d]

    # --- pairs -------------------------------------------------------------------------------------------------------

    def _price_pairs(self, table: WorkerTable, device: Floats, host: Floats, handed: int) -> None:
        """Price the pairs that may be the best, for a hand-off of so many pages."""
        d, prefix, node = self.num_decode, self.prefix, self.node
        at = node[:d]
        able = (self.open > NEVER) & table.has_store
        self.pages_to_move = np.maximum(prefix.pages - np.maximum(device[:d], host[at]), 0.0) + (handed - prefix.pages)
        self.latency = table.latency[at] * (self.pages_to_move > 0)
        self.link = self.latency + self.pages_to_move * (prefix.page_bytes / table.assumed_bandwidth[at])
        able[:d] &= self.cached[:d] < prefix.pages  # a worker with every full page gains nothing from a hand-off
        prefill_rows, decode_rows = able[d:].nonzero()[0] + d, able[:d].nonzero()[0]
        if len(prefill_rows) == 0 or len(decode_rows) == 0:
            return
        if max(len(prefill_rows), len(decode_rows)) > 2 * _MANY:
            prefill_rows, decode_rows = self._shortlist(table, able)
        self.prefill_rows, self.decode_rows = prefill_rows, decode_rows
        prefill = self.prefill_seconds[prefill_rows][:, None]
        apart = node[prefill_rows][:, None] != at[decode_rows]
        self.pair_pages_moved = apart * self.pages_to_move[decode_rows]
        transfer = self.link[decode_rows] - prefill
        np.maximum(transfer, self.latency[decode_rows], out=transfer)
        transfer *= apart
        self.pair_seconds = np.maximum(self.queue[prefill_rows][:, None], self.wait[decode_rows])
        self.pair_seconds += transfer
        self.pair_seconds += prefill
        self.pair_seconds += self.step[decode_rows]
        if self.any_delay:
            self.pair_seconds += self.delay[prefill_rows][:, None] + self.delay[decode_rows]
        if self.serves[:-1].min() <= 0:
            self.pair_seconds[apart & (self.serves[node[prefill_rows]] <= 0)[:, None]] = inf
        self.best_pair_seconds = float(self.pair_seconds.min())
        if self.best_pair_seconds < inf:
            self.interference_seconds = (self.num_sequences + 1.0) * self.compute[:d]

    def _shortlist(self, table: WorkerTable, able: Flags) -> tuple[Indices, Indices]:
        """Those of each side that seem best, and the best of the same nodes."""
        d = self.num_decode
        prefill_seconds = np.where(able, self.queue + self.prefill_seconds + self.delay + self.used, inf)
        decode_seconds = np.where(able[:d], self.wait + self.step + self.delay[:d] + self.used[:d], inf)
        prefill_rows = _best(prefill_seconds[d:], self.opened[d:]) + d
        decode_rows = _best(decode_seconds, self.opened[:d] & (self.wait <= 0))
        near = table.nearest(prefill_rows, decode_rows, prefill_seconds, decode_seconds)
        prefill_rows, decode_rows = np.union1d(prefill_rows, near[0]), np.union1d(decode_rows, near[1])
        return prefill_rows[able[prefill_rows]], decode_rows[able[decode_rows]]

    # --- what to choose ----------------------------------------------------------------------------------------------

    @property
    def lowest(self) -> float:
        """Of all ways there are, also those that must be waited for; inf: there is none."""
        return float(min(self.best_pair_seconds, (self.local_seconds + self.interference_seconds).min(initial=inf)))

    @property
    def best_row_pair(self) -> tuple[int | None, int]:
        """That way: its prefill worker, none if a decode worker does it alone, and its decode worker."""
        alone = self.local_seconds + self.interference_seconds
        if self.pair_seconds.size and self.best_pair_seconds <= alone.min():
            row, column = divmod(int(self.pair_seconds.argmin()), self.pair_seconds.shape[1])
            return int(self.prefill_rows[row]), int(self.decode_rows[column])
        return None, int(alone.argmin())

    def best_within(self, limit: float) -> tuple[int | None, int] | None:
        """Return the best placement that can start now and takes at most `limit` seconds. It has the fewest tokens to
        compute, then the emptiest decode worker, then the fewest pages to move, then the workers unused for longest.
        If there is something to compute, a pair is preferred to a decode worker that would compute as much."""
        d = self.num_decode
        opened = self.opened
        now = self.pair_seconds <= limit
        now &= opened[self.prefill_rows][:, None] & (opened[:d] & (self.wait <= 0))[self.decode_rows]
        i, j = now.nonzero()
        alone = (
            (self.local_seconds + self.interference_seconds <= limit) & opened[:d] & (self.local_wait <= 0)
        ).nonzero()[0]
        if len(i) + len(alone) == 0:
            return None
        prefill_rows, decode_rows = self.prefill_rows[i], self.decode_rows[j]
        decode = np.concatenate((decode_rows, alone))
        none = np.zeros(len(alone))
        turn = np.concatenate((self.used[prefill_rows], none)) + self.used[decode]
        moved = np.concatenate((self.pair_pages_moved[i, j], none))
        tokens = np.concatenate((self.new_tokens[prefill_rows], self.new_tokens[alone]))
        crowd = np.floor(self.num_sequences[decode] * _LEVELS / max(_LEVELS, self.num_sequences.max()))
        single = np.concatenate((np.zeros(len(prefill_rows)), np.where(self.new_tokens[alone] > 0, 1.0, -1.0)))
        best = int(np.lexsort((turn, moved, crowd, single, tokens))[0])
        return (
            (int(prefill_rows[best]), int(decode_rows[best]))
            if best < len(prefill_rows)
            else (None, int(alone[best - len(prefill_rows)]))
        )

    def restrict_decode_to(self, decode_row: int) -> None:
        """No other decode worker will do."""
        self.local_seconds[np.arange(self.num_decode) != decode_row] = inf
        if decode_row in self.decode_rows:
            self.pair_seconds[:, self.decode_rows != decode_row] = inf
        else:
            self.pair_seconds[:] = inf
        self.best_pair_seconds = float(self.pair_seconds.min(initial=inf))

    def require_disaggregation(self) -> None:
        """Exclude decode workers that would compute a prompt which a prefill worker can compute."""
        if self.best_pair_seconds < inf:
            self.local_seconds[self.new_tokens[: self.num_decode] > 0] = inf

    # --- one way -----------------------------------------------------------------------------------------------------

    def share_stores(self, prefill_row: int, decode_row: int) -> bool:
        """Whether pages can come from one to the other."""
        a, b = self.node[prefill_row], self.node[decode_row]
        return bool(self._stores and self.stored[a] and self.stored[b] and (a == b or self.serves[a]))

    def seconds_of_prefill(self, prefill_row: int | None, decode_row: int) -> float:
        """Return the seconds of work for the worker that computes the prompt."""
        row = decode_row if prefill_row is None else prefill_row
        return float(self.prefill_seconds[row])

    def predict(self, prefill_row: int | None, decode_row: int) -> PredictedTtft:
        row = decode_row if prefill_row is None else prefill_row
        transfer, wait = 0.0, self.local_wait[decode_row]
        step = self.step[decode_row] + self.last_tokens_seconds[decode_row]
        if prefill_row is not None:
            wait, step = self.wait[decode_row], self.step[decode_row]
            if self.node[prefill_row] != self.node[decode_row] and self.pages_to_move[decode_row] > 0:
                transfer = max(
                    float(self.latency[decode_row]), float(self.link[decode_row] - self.prefill_seconds[prefill_row])
                )
        return PredictedTtft(
            queue=float(self.queue[row]),
            load=float(self.load[row]),
            compute=float(self.compute[row]),
            transfer=transfer,
            wait=max(0.0, float(wait - self.queue[row])),
            step=float(step),
            delay=float(self.delay[decode_row] + (0.0 if prefill_row is None else self.delay[prefill_row])),
        )

    def candidates(self) -> list[Candidate]:
        """Every decode worker alone, each worker of a pair with the best other one of those that were paired."""
        ways: list[tuple[int | None, int, float]] = [
            (None, row, self.local_seconds[row]) for row in range(self.num_decode)
        ]
        if self.pair_seconds.size:
            by_maker = {(row, int(column)) for row, column in enumerate(self.pair_seconds.argmin(axis=1))}
            by_taker = {(int(row), column) for column, row in enumerate(self.pair_seconds.argmin(axis=0))}
            for row, column in sorted(by_maker | by_taker):
                ways.append(
                    (int(self.prefill_rows[row]), int(self.decode_rows[column]), self.pair_seconds[row, column])
                )
        return [
            self._candidate(prefill_row, decode_row, bool(seconds < inf)) for prefill_row, decode_row, seconds in ways
        ]

    def _candidate(self, prefill_row: int | None, decode_row: int, possible: bool) -> Candidate:
        row = decode_row if prefill_row is None else prefill_row
        names = [self.workers[each].peer.name for each in (row, decode_row)]
        wait = self.local_wait[decode_row] if prefill_row is None else self.wait[decode_row]
        why = ""
        for each, name in zip((row, decode_row), names, strict=True):
            if self.open[each] == NEVER:
                why = why or f"{name} drains, has failed this request, or is too small for it"
            elif self.open[each] == FULL:
                why = why or f"{name} takes nothing more now"
        if wait > 0:
            why = why or f"{names[1]} has no room, or would miss an objective"
        if not possible:
            why = why or "no store joins them, another worker was asked for, or router.disaggregation is always"
        cached = int(self.cached[row]) * self.prefix.page_size
        return Candidate(
            names[1], "" if prefill_row is None else names[0], cached, self.predict(prefill_row, decode_row), why
        )


def reusable_pages(
    prefix: CacheablePrefix, table: WorkerTable, device: Floats, host: Floats, disk: Floats, serves: Floats
) -> tuple[Floats, Floats]:
    """Return how many pages each worker of the table need not compute, and the seconds that loads take. It agrees
    with `reusable_on_decode_worker` and `reusable_on_prefill_worker`, except for the few pages loaded to measure a
    tier. `device` pages are on each worker's device, `host` and `disk` on each node's tiers, for the table's rows.
    `serves`: whether other nodes may get pages from there."""
    at, d = table.node, table.num_decode
    begin = host[at]
    begin[:d] = np.maximum(begin[:d], device[:d])
    has = (host + disk) * serves
    longest = has.argmax() if len(has) else 0
    most, on_disk = has[longest], disk.any()
    if most == 0 and not on_disk:
        return np.maximum(device, begin), np.zeros(len(device))
    far = table.stored * min(float(most), prefix.pages)  # pages that some other node can send
    has[longest] = 0.0
    far[longest] = min(float(has.max()), prefix.pages)
    page, size = prefix.page_size / table.rate, prefix.page_bytes
    spared = np.maximum(device - begin, 0.0)  # pages that need no computing, whether or not they are loaded
    ends, loads, saved = begin, np.zeros(len(device)), np.zeros(len(device))  # with the node's disk, where it pays
    near, seconds = begin, loads  # with all of the disk
    if on_disk:
        near = np.maximum((host + disk)[at], begin)
        seconds = (near > begin) * table.disk_latency[at] + (near - begin) * size / table.disk_rate[at]
        saved = np.maximum(np.maximum(near - begin - spared, 0.0) * page - seconds, 0.0)
        ends, loads = np.where(saved > 0, near, begin), np.where(saved > 0, seconds, 0.0)
    more = np.maximum(far[at], near)
    # Where no node has more than this one, the latency is for nothing and nothing is saved.
    all_ = seconds + (table.latency[at] + (more - near) * (size / table.link[at]))
    take = np.maximum(more - begin - spared, 0.0) * page - all_ > saved
    return np.maximum(device, np.where(take, more, ends)), np.where(take, all_, loads)


def _cached_pages(ask: PlacementRequest, table: WorkerTable) -> tuple[Floats, Floats, Floats]:
    """Pages of the prefix, without a gap from its first: on each worker's device, in each node's arena, and after
    those on its disk."""
    device = np.zeros(len(table.workers))
    host, disk = np.zeros(len(table.stores) + 1), np.zeros(len(table.stores) + 1)
    index, stores = table.index, table.stores
    for incarnation, match in ask.held.items():
        if (row := index.get(incarnation)) is not None:
            device[row] = match.pages
        elif (row := stores.get(incarnation)) is not None:
            disk[row] = on_disk = match.tiers.get("DISK", 0)
            host[row] = match.pages - on_disk
    return device, host, disk


def _excluded_stores(ask: PlacementRequest, table: WorkerTable) -> list[int]:
    """Nodes whose store has failed this request: other nodes are not to get pages from it."""
    return [table.stores[incarnation] for incarnation in ask.excluded if incarnation in table.stores]


def _open(ask: PlacementRequest, table: WorkerTable) -> Floats:
    """Whether each worker may be given this request: those that have failed it are asked again only where no other
    decode worker could ever take it."""
    d = table.num_decode
    answer = table.open.copy()
    answer[:d][table.context_pages[:d] < ask.pages_needed] = NEVER
    if not ask.excluded:
        return answer
    able = answer.copy()
    for incarnation in ask.excluded:
        if (row := table.index.get(incarnation)) is not None:
            answer[row] = NEVER
    if d and answer[:d].max() == NEVER:
        answer[:d] = able[:d]
    return answer


def _best(seconds: Floats, open_now: Flags) -> Indices:
    """Rows with the least seconds, and those that are open now among them. inf: never."""
    if len(seconds) <= 2 * _MANY:
        return np.isfinite(seconds).nonzero()[0]
    rows = np.argpartition(seconds, _MANY)[:_MANY]
    if not open_now.all():
        rows = np.union1d(rows, np.argpartition(np.where(open_now, seconds, inf), _MANY)[:_MANY])
    return rows[np.isfinite(seconds[rows])]
