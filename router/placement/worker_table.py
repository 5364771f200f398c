"""Live workers as columns of numbers, a row each: what pricing a placement reads, kept up to date as it changes.

Decode workers come first. Rows are written anew for members that have changed since the last look, all of them when one
has joined or left; between two decisions that is most often two or three. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from baton.config import Config
from baton.messages import LowerTier, TierSpeed
from kvstore.load_or_recompute import DEFAULT_PREFILL_RATE, DEFAULT_SPEEDS
from router.members import ClusterMembership, MemberRecord
from router.placement.step_costs import DecodeCost, PrefillCost

Floats: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

NEVER, FULL, OPEN = -1.0, 0.0, 1.0  # may a worker be given work: not any more, later, now

_LEARNED = 0.3  # of a ratio's error, from each prompt
_MIXED = 8.0  # times a step without prompts: what one with prompts may take, unless decode.itl_ms says
_COLUMNS = (
    "open", "until", "rate", "fixed", "token", "pair", "chunk", "stretch", "delay", "rings",
    "rows", "step", "crowd", "per_context", "turnover", "room", "context_pages", "tpot", "slack",
)  # fmt: skip
_NODE_COLUMNS = ("stored", "serves", "disk_latency", "disk_rate", "latency", "rate", "measured")


class CostModels(Protocol):
    """What work costs on each worker."""

    def prefill(self, incarnation: str) -> PrefillCost: ...

    def step(self, incarnation: str) -> DecodeCost: ...


class ReportedRates:
    """All that is known before a cost has been measured: the rates that workers tell, and before that a default."""

    def __init__(self, members: ClusterMembership) -> None:
        self._members = members

    def prefill(self, incarnation: str) -> PrefillCost:
        rate = self._members.require_live(incarnation).load.prefill_rate
        return PrefillCost(0.0, 1 / (rate or DEFAULT_PREFILL_RATE), 0.0)

    def step(self, incarnation: str) -> DecodeCost:
        return DecodeCost(0.0, 0.0, 0.0)


class WorkerTable:
    """The columns as of the last `refresh`: seconds, tokens, pages. What only decode workers have is 0 elsewhere."""

    def __init__(self, config: Config, members: ClusterMembership, costs: CostModels) -> None:
        self._config, self._members, self._costs = config, members, costs
        self._cells: Floats = np.zeros((len(_COLUMNS), 0))
        self._node_cells: Floats = np.zeros((len(_NODE_COLUMNS), 0))
        # replaced, never changed in place: a row keeps its meaning for its reader
        self.workers: Sequence[MemberRecord] = ()
        self.num_decode = 0  # so many come first
        self.index: dict[str, int] = {}  # rows by incarnation
        self.stores: dict[str, int] = {}  # rows of nodes, by incarnation of their store
        self.store_on: dict[str, str] = {}  # that incarnation, by node
        self.node: Indices = np.zeros(0, np.int64)  # of each worker; the last one stands for nodes without a store
        self.has_store = np.zeros(0, np.bool_)  # whether the node of each worker has one
        self.decode_rows_on: Sequence[Indices] = ()  # decode workers of each node
        self.prefill_rows_on: Sequence[Indices] = ()  # prefill workers
        self.last_used: Floats = np.zeros(0)  # the turn in which each worker was last chosen
        self.use_count = 0  # the last one
        self._ring_ratios: dict[int, float] = {}
        """Of what prompts have taken on so many workers to what was predicted."""
        self._name_columns()

    def _name_columns(self) -> None:
        c = dict(zip(_COLUMNS, self._cells, strict=True))
        self.open: Floats = c["open"]
        self.prefills_done_at: Floats = c["until"]  # when it will have computed all prompts that it has
        self.rate: Floats = c["rate"]  # tokens per second, by which it decides what to load
        self.fixed: Floats = c["fixed"]  # seconds of a step, of a token, of a pair: see `router.placement.step_costs`
        self.token: Floats = c["token"]
        self.pair: Floats = c["pair"]
        self.chunk: Floats = c["chunk"]  # tokens of a prompt in a step
        self.slowdown: Floats = c["stretch"]  # by which computing beside decoding sequences takes longer
        self.delay: Floats = c["delay"]  # seconds for which an order waits there longer than elsewhere
        self.rings: Floats = c["rings"]  # 1: it has no prompt, and can compute one beside another worker
        self.num_sequences: Floats = c["rows"]  # sequences
        self.step: Floats = c["step"]  # seconds of a step with one more, but for that one's context
        self.others_step_seconds: Floats = c["crowd"]  # seconds of that step that are due to the others
        self.per_context: Floats = c["per_context"]  # seconds of a step for each token of that
        self.turnover: Floats = c["turnover"]  # seconds until one of the sequences has ended
        self.free_pages: Floats = c["room"]  # pages that are free, and will be
        self.context_pages: Floats = c["context_pages"]  # of the longest context that it takes
        self.tightest_tpot: Floats = c["tpot"]  # the tightest objective of its sequences
        self.slack: Floats = c["slack"]  # pages that one of its sequences gives back
        n = dict(zip(_NODE_COLUMNS, self._node_cells, strict=True))
        self.stored: Floats = n["stored"]  # whether the node has a store
        self.serves: Floats = n["serves"]  # and other nodes may get pages from that
        self.disk_latency: Floats = n["disk_latency"]
        self.disk_rate: Floats = n["disk_rate"]  # bytes per second
        self.latency: Floats = n["latency"]  # of pages from other nodes
        self.link: Floats = n["rate"]  # bytes per second
        self._measured: Floats = n["measured"]
        # the same of the way to a decode worker, whether measured or not
        self.assumed_bandwidth: Floats = self._assume_bandwidth()

    def _assume_bandwidth(self) -> Floats:
        """What is not measured may be quicker than it is taken for, which only its use can tell. It passes for the
        quickest of all: or it would look slow beside a link that was used, and everything would take that one."""
        quickest = self.link[:-1].max(initial=0.0) or inf  # the last belongs to no store
        return np.where(self._measured > 0, self.link, quickest)

    def refresh(self, now: float, output: float) -> None:
        """Take in what has changed. `output`: tokens that a request is expected to generate."""
        changed = self._members.changes.members
        if not changed:
            return
        if any(self._membership_changed(incarnation) for incarnation in changed):
            self._rebuild(now, output)
        else:
            for incarnation in changed:
                if (row := self.index.get(incarnation)) is not None:
                    self._cells[:, row] = self._worker(self.workers[row], now, output)
                elif (row := self.stores.get(incarnation)) is not None:
                    member = self._members.get(incarnation)
                    assert member is not None
                    self._node_cells[:, row] = _store(member)
            if not changed.isdisjoint(self.stores):
                self.assumed_bandwidth = self._assume_bandwidth()
        changed.clear()

    def ring_ratio(self, workers: int) -> float:
        """How many times what is predicted a prompt takes on so many workers, which may share cores. More workers are
        no slower in all, and no more use each, than the numbers of them that were seen."""
        known = self._ring_ratios
        seen = (ratio * min(1.0, workers / others) for others, ratio in known.items())
        return known.get(workers) or max(seen, default=1.0)

    def ring_took(self, workers: int, seconds: float, predicted: float) -> None:
        """Learn from a prompt that several workers have computed. What was learned is forgotten when a worker comes or
        goes."""
        before = self.ring_ratio(workers)
        ratio = before * min(max(seconds / max(predicted, 1e-6), 0.5), 2.0)
        self._ring_ratios[workers] = before + _LEARNED * (ratio - before)

    def mark_used(self, rows: Iterable[int]) -> None:
        self.use_count += 1
        for row in rows:
            self.last_used[row] = self.use_count

    def nearest(
        self, prefill_rows: Indices, decode_rows: Indices, prefill_seconds: Floats, decode_seconds: Floats
    ) -> tuple[Indices, Indices]:
        """The workers of the same nodes that make soonest for these takers, and that take soonest from these makers."""
        near_makers: list[int] = []
        near_takers: list[int] = []
        for node in {int(self.node[row]) for row in decode_rows}:
            if (rows := self.prefill_rows_on[node]).size:
                near_makers.append(int(rows[prefill_seconds[rows].argmin()]))
        for node in {int(self.node[row]) for row in prefill_rows}:
            if (rows := self.decode_rows_on[node]).size:
                near_takers.append(int(rows[decode_seconds[rows].argmin()]))
        return np.array(near_makers, np.int64), np.array(near_takers, np.int64)

    def _membership_changed(self, incarnation: str) -> bool:
        """Whether it has joined, or left, or both since the last look; a store whose loop hangs is not there."""
        member = self._members.get(incarnation)
        if member is None or member.peer.role == "store":
            known = incarnation in self.index or incarnation in self.stores
            return known != (member is not None and not member.unresponsive)
        row = self.index.get(incarnation)
        return row is None or self.workers[row] is not member

    def _rebuild(self, now: float, output: float) -> None:
        self._ring_ratios.clear()
        used = {worker.incarnation: self.last_used[row] for row, worker in enumerate(self.workers)}
        decoders = self._members.with_role("decode")
        stores = [store for store in self._members.with_role("store") if not store.unresponsive]
        self.workers = (*decoders, *self._members.with_role("prefill"))
        self.num_decode = len(decoders)
        self.index = {worker.incarnation: row for row, worker in enumerate(self.workers)}
        self.stores = {store.incarnation: row for row, store in enumerate(stores)}
        self.store_on = {store.peer.node: store.incarnation for store in stores}
        at = [self.stores.get(self.store_on.get(w.peer.node, ""), len(stores)) for w in self.workers]
        self.node = np.array(at, np.int64)
        self.has_store = self.node < len(stores)
        on = [np.flatnonzero(self.node == node) for node in range(len(stores) + 1)]
        self.decode_rows_on = [rows[rows < self.num_decode] for rows in on]
        self.prefill_rows_on = [rows[rows >= self.num_decode] for rows in on]
        self.last_used = np.array([used.get(worker.incarnation, 0.0) for worker in self.workers])
        self._cells = np.array([self._worker(w, now, output) for w in self.workers]).reshape(-1, len(_COLUMNS)).T.copy()
        self._node_cells = np.array([*map(_store, stores), _NO_STORE]).T.copy()
        self._name_columns()

    def _worker(self, member: MemberRecord, now: float, output: float) -> Sequence[float]:
        """Its row, in the order of the columns."""
        cost = self._costs.prefill(member.incarnation)
        rate = member.load.prefill_rate or DEFAULT_PREFILL_RATE
        decodes = member.peer.role == "decode"
        chunk = self._config.decode.max_num_batched_tokens if decodes else self._config.prefill.max_num_batched_tokens
        seconds = self._prompts(member, cost, chunk)
        member.prefill_busy_since = min(member.prefill_busy_since, now)
        if not decodes:
            full = member.free_prefill_slots(self._config.prefill.max_num_seqs) <= 0
            open_ = NEVER if member.draining or member.unresponsive else FULL if full else OPEN
            until = member.prefill_busy_since + seconds
            idle = not (member.pending_prefills or member.other_routers_requests)
            rings = float(idle and member.hello.model is not None and member.hello.model.rings)
            return (
                open_, until, rate, cost.fixed, cost.token, cost.pair, chunk, 1.0, member.delay, rings, *_NO_DECODING
            )  # fmt: skip
        step = self._costs.step(member.incarnation)
        rows = len(member.assigned) + member.other_routers_requests
        context = member.context + member.other_routers_context
        plain = member.pace * (step.seconds(rows + 1, 0) + context * step.context)
        longest = self._config.decode.itl_ms / 1_000 or _MIXED * plain
        stretch = 1.0 if not rows or not plain else longest / max(longest - plain, longest / _MIXED)
        stretch *= member.pace
        pool = member.hello.model.pool_pages if member.hello.model else 0
        room = member.free_pages - member.growth
        return (
            NEVER if member.draining or member.unresponsive else OPEN if member.takes_sequences else FULL,
            member.prefill_busy_since + seconds * stretch,
            rate,
            cost.fixed,
            cost.token,
            cost.pair,
            chunk,
            stretch,
            member.delay,
            0.0,
            rows,
            plain,
            plain - member.pace * step.seconds(1, 0),
            member.pace * step.context,
            output * plain / max(1, rows),
            room if rows else pool,
            member.hello.model.context_pages if member.hello.model else 0,
            min((work.tpot for work in member.assigned.values() if work.tpot is not None), default=inf),
            max(1.0, (pool - room) / max(1, rows)),
        )

    def _prompts(self, member: MemberRecord, cost: PrefillCost, chunk: int) -> float:
        """Seconds until it has computed the prompts that it has, other routers' among them, from when it last told how
        far it is. Those that fill gaps give way."""
        for name, prompt in member.pending_prefills.items():
            done = min(prompt.new, max(0, member.positions.get(name, 0) - prompt.context))
            prompt.seconds = cost.seconds(prompt.new - done, prompt.context + done, chunk)
        ours = sum(prompt.seconds for prompt in member.pending_prefills.values() if not prompt.fills_gap)
        return ours + (cost.seconds(member.other_routers_tokens, 0, chunk) if member.other_routers_tokens else 0.0)


_NO_DECODING = (0.0,) * 9
_NO_STORE = (0.0, 0.0, 0.0, inf, 0.0, inf, 0.0)


def _store(member: MemberRecord) -> Sequence[float]:
    """Its node's row."""
    speeds: dict[LowerTier, TierSpeed] = {**DEFAULT_SPEEDS, **{speed.tier: speed for speed in member.load.tiers}}
    disk, remote = speeds["disk"], speeds["remote"]
    return (
        1.0,
        float(bool(member.hello.data)),
        disk.latency,
        disk.bytes_per_second,
        remote.latency,
        remote.bytes_per_second,
        float(remote.measured),
    )
