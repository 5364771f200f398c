"""What every way to serve a request would take, in seconds until its first token: all workers priced together.

    making     load + compute of a prefill worker, until the whole prefix is sealed in its node's store
    transfer   what the way between two nodes adds: pages travel while later ones are being computed, so that is the
               latency of the link, or what the link takes longer than loading and computing
    taking     wait until a decode worker has room and keeps everybody's objective, in the end a step with this one
    a pair     max(queue, wait) + making + transfer + step
    alone      the same of a decode worker that computes the prompt itself: nothing begins before it has room

A prompt that a decode worker computes although a prefill worker could makes all that decode there wait, and whoever
comes meanwhile: their seconds count like its own. A decode worker's time per output token is predicted as a step, and
for each token its share of the prompts to be computed there; cf. Mooncake, FAST'25, where a placement must keep both
objectives for the time that decoding starts.

Pure. Arrays have a row for each worker of the `WorkerTable`, decode workers first.
"""

# pyright: strict

from __future__ import annotations

from math import inf

import numpy as np

from router.placement.cached_prefix import CacheablePrefix
from router.placement.types import Candidate, PlacementRequest, PredictedTtft
from router.placement.worker_table import FULL, NEVER, OPEN, Flags, Floats, Indices, WorkerTable

_MANY = 16  # workers of either side that are paired, those that seem best; where there are not twice as many, all
_LEVELS = 8.0  # decode workers are told apart by so many levels of sequences
_TURN = 1e-6  # seconds at most by which those used last seem dearer: so equals are used in turn


class PlacementCosts:
    """Of one request. Nothing of it changes, so that it can be read later, when somebody asks why."""

    def __init__(self, ask: PlacementRequest, table: WorkerTable, now: float, output: float, claims: Floats) -> None:
        """`output`: tokens that the request is expected to generate; `claims`: seconds of each worker that requests
        which wait have been promised before this one."""
        self.workers, self.prefix = table.workers, ask.prefix
        self.decoders = d = table.decoders
        self.rows = table.rows[:d].copy()
        prefix = ask.prefix
        self.node, self.stored, self.serves = table.node, table.stored, table.serves.copy()
        if ask.avoid:
            self.serves[_barred(ask, table)] = 0.0
        device, host, disk = _held(ask, table)
        self._stores = not ask.local and prefix.pages > 0 and bool(table.stores)
        self.cached, self.load = device, np.zeros(len(device))  # pages that need no computing; seconds of loading
        if self._stores:
            self.cached, self.load = reach_of_all(prefix, table, device, host, disk, self.serves)
        new = (prefix.pages - self.cached) * prefix.page_size
        rest = np.zeros(len(new))
        rest[d:] = ask.rest  # whoever decodes computes it in his first step, if no prefill worker does
        made = new + rest
        steps = np.ceil(made / table.chunk)
        middle = prefix.pages * prefix.page_size + rest + 0.5 - 0.5 * made  # of what new tokens attend to
        self.compute = made * (table.token + table.pair * middle) + table.fixed * steps
        self.compute[:d] *= table.stretch[:d]
        self.queue = np.maximum(table.until - now, 0.0) + claims
        self.making = self.load + self.compute
        self.new = new
        self.open = _open(ask, table)
        self.opened = self.open == OPEN
        self.used = table.used * (_TURN / max(1, table.turn))
        self._take(ask, table, device, output)
        self.alone = np.maximum(self.queue[:d], self.wait_alone) + self.making[:d] + self.step + self.tail
        self.alone[self.open[:d] == NEVER] = inf
        self.nuisance = np.zeros(d)  # seconds that `alone` is dearer than it takes: others wait for their tokens
        self.makers = self.takers = np.zeros(0, np.int64)  # prefill and decode workers that are paired
        self.pairs = np.zeros((0, 0))  # inf: can't be
        self.best_pair = inf
        self.moved = self.pairs  # pages that go from one node to another
        self.missing = self.latency = self.link = np.zeros(d)  # of the way to a decode worker: pages, seconds
        if self._stores and 0 < d < len(self.workers):
            self._pair(table, device, host, ask.handed)

    # --- the decode side ---------------------------------------------------------------------------------------------

    def _take(self, ask: PlacementRequest, table: WorkerTable, device: Floats, output: float) -> None:
        """How long until a decode worker can take it, and its first step then."""
        d = self.decoders
        size = ask.prefix.page_size
        tail = ask.tokens - ask.prefix.pages * size
        self.step = step = table.step[:d] + table.per_context[:d] * (ask.tokens + 0.5 * output)
        self.tail = tail * (table.token[:d] + table.pair[:d] * ask.tokens)  # what the first takes longer for one alone
        lack = (ask.tokens + output) / size - device[:d] - table.room[:d]
        full = self.open[:d] == FULL
        self.wait = np.zeros(d)
        if full.any() or lack.max(initial=0.0) > 0:
            ends = np.where((lack > 0) & (self.rows > 0), np.ceil(lack / table.slack[:d]), 0.0)
            self.wait = np.maximum(ends, full) * table.turnover[:d]  # so many sequences must end first
        self.wait_alone = self.wait
        self.hopeless = np.zeros(d, np.bool_)  # slower than its objective even alone
        self.pace = step + self.queue[:d] / output  # seconds per token
        own = inf if ask.tpot is None else ask.tpot
        limit = table.tpot[:d] if ask.tpot is None else np.minimum(table.tpot[:d], own)
        if limit.min(initial=inf) == inf:
            return
        if ask.tpot is not None:
            self.hopeless = step - table.crowd[:d] > own
        late = self.pace - limit
        later = np.maximum(late, self.pace + self.compute[:d] / output - table.tpot[:d])
        if later.max() > 0:
            self.wait = np.maximum(self.wait, self._recovers(table, late, output))
            self.wait_alone = np.maximum(self.wait, self._recovers(table, later, output))

    def _recovers(self, table: WorkerTable, late: Floats, output: float) -> Floats:
        """Seconds until each decode worker brings its tokens `late` seconds sooner: prompts that it has are computed
        then, or sequences have ended."""
        d = self.decoders
        queue, rows = self.queue[:d], table.rows[:d]
        each = np.maximum(table.crowd[:d] / np.maximum(rows, 1.0), 1e-9)  # seconds of a step that a sequence takes
        ends = np.minimum(np.ceil(np.maximum(late - queue / output, 0.0) / each), rows)
        return np.clip(late * output, 0.0, queue) + ends * table.turnover[:d]

    # --- pairs -------------------------------------------------------------------------------------------------------

    def _pair(self, table: WorkerTable, device: Floats, host: Floats, handed: int) -> None:
        """Price the pairs that may be the best, for a hand-off of so many pages."""
        d, prefix, node = self.decoders, self.prefix, self.node
        at = node[:d]
        able = (self.open > NEVER) & table.has_store
        self.missing = np.maximum(prefix.pages - np.maximum(device[:d], host[at]), 0.0) + (handed - prefix.pages)
        self.latency = table.latency[at] * (self.missing > 0)
        self.link = self.latency + self.missing * (prefix.page_bytes / table.supposed[at])
        able[:d] &= self.cached[:d] < prefix.pages  # who has every full page gains nothing from a hand-off
        makers, takers = able[d:].nonzero()[0] + d, able[:d].nonzero()[0]
        if len(makers) == 0 or len(takers) == 0:
            return
        if max(len(makers), len(takers)) > 2 * _MANY:
            makers, takers = self._shortlist(table, able)
        self.makers, self.takers = makers, takers
        made = self.making[makers][:, None]
        apart = node[makers][:, None] != at[takers]
        self.moved = apart * self.missing[takers]
        transfer = self.link[takers] - made
        np.maximum(transfer, self.latency[takers], out=transfer)
        transfer *= apart
        self.pairs = np.maximum(self.queue[makers][:, None], self.wait[takers])
        self.pairs += transfer
        self.pairs += made
        self.pairs += self.step[takers]
        if self.serves[:-1].min() <= 0:
            self.pairs[apart & (self.serves[node[makers]] <= 0)[:, None]] = inf
        self.best_pair = float(self.pairs.min())
        if self.best_pair < inf:
            self.nuisance = (self.rows + 1.0) * self.compute[:d]

    def _shortlist(self, table: WorkerTable, able: Flags) -> tuple[Indices, Indices]:
        """Those of each side that seem best, and the best of the same nodes."""
        d = self.decoders
        making = np.where(able, self.queue + self.making + self.used, inf)
        taking = np.where(able[:d], self.wait + self.step + self.used[:d], inf)
        makers = _best(making[d:], self.opened[d:]) + d
        takers = _best(taking, self.opened[:d] & (self.wait <= 0))
        near = table.nearest(makers, takers, making, taking)
        makers, takers = np.union1d(makers, near[0]), np.union1d(takers, near[1])
        return makers[able[makers]], takers[able[takers]]

    # --- what to choose ----------------------------------------------------------------------------------------------

    @property
    def lowest(self) -> float:
        """Of all ways there are, also those that must be waited for; inf: there is none."""
        return float(min(self.best_pair, (self.alone + self.nuisance).min(initial=inf)))

    @property
    def soonest(self) -> tuple[int | None, int]:
        """That way: its prefill worker, none if a decode worker does it alone, and its decode worker."""
        alone = self.alone + self.nuisance
        if self.pairs.size and self.best_pair <= alone.min():
            row, column = divmod(int(self.pairs.argmin()), self.pairs.shape[1])
            return int(self.makers[row]), int(self.takers[column])
        return None, int(alone.argmin())

    def ready(self, limit: float) -> tuple[int | None, int] | None:
        """Of the ways that can be gone now and take at most `limit` seconds: the one with the fewest tokens to compute,
        then the emptiest decode worker, then the fewest pages to move, then the workers that were not used for longest.
        Where there is something to compute, a pair is preferred to a decode worker that would compute as much."""
        d = self.decoders
        opened = self.opened
        now = self.pairs <= limit
        now &= opened[self.makers][:, None] & (opened[:d] & (self.wait <= 0))[self.takers]
        made, taken = now.nonzero()
        alone = ((self.alone + self.nuisance <= limit) & opened[:d] & (self.wait_alone <= 0)).nonzero()[0]
        if len(made) + len(alone) == 0:
            return None
        makers, takers = self.makers[made], self.takers[taken]
        decode = np.concatenate((takers, alone))
        none = np.zeros(len(alone))
        turn = np.concatenate((self.used[makers], none)) + self.used[decode]
        moved = np.concatenate((self.moved[made, taken], none))
        tokens = np.concatenate((self.new[makers], self.new[alone]))
        crowd = np.floor(self.rows[decode] * _LEVELS / max(_LEVELS, self.rows.max()))
        single = np.concatenate((np.zeros(len(makers)), np.where(self.new[alone] > 0, 1.0, -1.0)))
        best = int(np.lexsort((turn, moved, crowd, single, tokens))[0])
        return (int(makers[best]), int(takers[best])) if best < len(makers) else (None, int(alone[best - len(makers)]))

    def keep_only(self, taker: int) -> None:
        """No other decode worker will do."""
        self.alone[np.arange(self.decoders) != taker] = inf
        if taker in self.takers:
            self.pairs[:, self.takers != taker] = inf
        else:
            self.pairs[:] = inf
        self.best_pair = float(self.pairs.min(initial=inf))

    def keep_split(self) -> None:
        """Nobody decodes where a prompt is computed that a prefill worker can compute."""
        if self.best_pair < inf:
            self.alone[self.new[: self.decoders] > 0] = inf

    # --- one way -----------------------------------------------------------------------------------------------------

    def joined(self, maker: int, taker: int) -> bool:
        """Whether pages can come from one to the other."""
        a, b = self.node[maker], self.node[taker]
        return bool(self._stores and self.stored[a] and self.stored[b] and (a == b or self.serves[a]))

    def effort(self, maker: int | None, taker: int) -> float:
        """Seconds of work for whoever computes the prompt."""
        row = taker if maker is None else maker
        return float(self.making[row])

    def predict(self, maker: int | None, taker: int) -> PredictedTtft:
        row = taker if maker is None else maker
        transfer, wait, step = 0.0, self.wait_alone[taker], self.step[taker] + self.tail[taker]
        if maker is not None:
            wait, step = self.wait[taker], self.step[taker]
            if self.node[maker] != self.node[taker] and self.missing[taker] > 0:
                transfer = max(float(self.latency[taker]), float(self.link[taker] - self.making[maker]))
        return PredictedTtft(
            queue=float(self.queue[row]),
            load=float(self.load[row]),
            compute=float(self.compute[row]),
            transfer=transfer,
            wait=max(0.0, float(wait - self.queue[row])),
            step=float(step),
        )

    def candidates(self) -> list[Candidate]:
        """Every decode worker alone, each worker of a pair with the best other one of those that were paired."""
        ways: list[tuple[int | None, int, float]] = [(None, row, self.alone[row]) for row in range(self.decoders)]
        if self.pairs.size:
            by_maker = {(row, int(column)) for row, column in enumerate(self.pairs.argmin(axis=1))}
            by_taker = {(int(row), column) for column, row in enumerate(self.pairs.argmin(axis=0))}
            for row, column in sorted(by_maker | by_taker):
                ways.append((int(self.makers[row]), int(self.takers[column]), self.pairs[row, column]))
        return [self._candidate(maker, taker, bool(seconds < inf)) for maker, taker, seconds in ways]

    def _candidate(self, maker: int | None, taker: int, possible: bool) -> Candidate:
        row = taker if maker is None else maker
        names = [self.workers[each].peer.name for each in (row, taker)]
        wait = self.wait_alone[taker] if maker is None else self.wait[taker]
        why = ""
        for each, name in zip((row, taker), names, strict=True):
            if self.open[each] == NEVER:
                why = why or f"{name} drains, has failed this request, or is too small for it"
            elif self.open[each] == FULL:
                why = why or f"{name} takes nothing more now"
        if wait > 0:
            why = why or f"{names[1]} has no room, or would miss an objective"
        if not possible:
            why = why or "no store joins them, another worker was asked for, or router.split is always"
        cached = int(self.cached[row]) * self.prefix.page_size
        return Candidate(names[1], "" if maker is None else names[0], cached, self.predict(maker, taker), why)


def reach_of_all(
    prefix: CacheablePrefix, table: WorkerTable, device: Floats, host: Floats, disk: Floats, serves: Floats
) -> tuple[Floats, Floats]:
    """How many pages each worker of the table need not compute, and the seconds that loads take: what `decoder_reach`
    and `prefiller_reach` (`router.placement.cached_prefix`) say of one of them, but for the few pages that are loaded
    to measure a tier. `device` pages are on each worker's device, `host` and `disk` on each node's tiers, for the
    table's rows; `serves`: whether other nodes may get pages from there."""
    at, d = table.node, table.decoders
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
    # Where nobody has more than the node itself, the latency is for nothing and nothing is saved.
    all_ = seconds + (table.latency[at] + (more - near) * (size / table.link[at]))
    take = np.maximum(more - begin - spared, 0.0) * page - all_ > saved
    return np.maximum(device, np.where(take, more, ends)), np.where(take, all_, loads)


def _held(ask: PlacementRequest, table: WorkerTable) -> tuple[Floats, Floats, Floats]:
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


def _barred(ask: PlacementRequest, table: WorkerTable) -> list[int]:
    """Nodes whose store has failed this request: other nodes are not to get pages from it."""
    return [table.stores[incarnation] for incarnation in ask.avoid if incarnation in table.stores]


def _open(ask: PlacementRequest, table: WorkerTable) -> Floats:
    """Whether each worker may be given this request: those that have failed it are asked again only where no other
    decode worker could ever take it."""
    d = table.decoders
    answer = table.open.copy()
    answer[:d][table.pool[:d] < ask.needs] = NEVER
    if not ask.avoid:
        return answer
    able = answer.copy()
    for incarnation in ask.avoid:
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
