"""Who shall do an attempt: a decode worker, perhaps a prefill worker beside it, and the stores their pages come from.

Every option is priced in seconds until the whole prefix is on the decode worker's device:

    queue     what its workers have been given already
    load      cached pages from the node's disk or from other nodes, where that is quicker than computing them
    compute   the pages that nobody has
    transfer  what the way from one node to another adds: pages travel while later ones are still being computed

Thin on purpose: what workers have been given counts as prompts to compute; rates and speeds are what workers and stores
report, and the defaults of `kvstore.cost` before that.

Pure. Pages are immutable and found by key, so a plan made from stale hints costs a recompute and never a wrong token.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, TypeAlias

from baton.messages import Source, TierRun
from kvstore.cost import load_seconds
from kvstore.prefix_map import Match
from router.candidates import DecodeCandidate, PrefillCandidate, decode_candidates, prefill_candidates, stores
from router.reach import Node, Prefix, Reach, Store, decoder_reach, nodes_of, prefiller_reach
from router.view import View


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds until the prefix is on the decode worker's device, term by term."""

    queue: float = 0.0
    load: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        return self.queue + self.load + self.compute + self.transfer

    def __str__(self) -> str:
        return (
            f"{self.total:.3f} s: queue {self.queue:.3f}, load {self.load:.3f}, compute {self.compute:.3f}, "
            f"transfer {self.transfer:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt. The decode worker takes the first `fetch` pages from its node's store as far as its device lacks
    them, and computes the rest. Nobody need compute `cached` pages; `prefill`, if named, is to make the others. `loads`
    are those cached pages that are to come from below an arena, tier by tier."""

    decode: str
    prefill: str | None = None
    fetch: int = 0
    cached: int = 0
    store: str = ""  # where the decode worker fetches: its node's; empty: it needs none
    sources: tuple[Source, ...] = ()  # where that store gets what it lacks
    prefill_sources: tuple[Source, ...] = ()  # where the prefill worker's node's store does
    loads: tuple[TierRun, ...] = ()
    predicted: Predicted = field(default=Predicted(), compare=False)

    @property
    def awaited(self) -> bool:
        """Some of the pages to fetch are only being made."""
        return self.prefill is not None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can take it now that would not be worse than waiting."""

    why: str


@dataclass(frozen=True, slots=True)
class Reject:
    """No placement meets its objectives. `retry_after`: seconds after which one might; none: nobody knows."""

    why: str
    retry_after: float | None = None


Choice: TypeAlias = Plan | Wait | Reject


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants a place, as its next attempt needs it."""

    request: str
    prefix: Prefix
    keys: Sequence[bytes]  # of the prefix's pages
    held: Mapping[str, Match]  # who has how much of the prefix, by incarnation
    tokens: int  # known: the prompt, and what earlier attempts generated
    max_tokens: int  # of output, those generated included
    prompt: int  # tokens
    ttft: float | None = None  # objective: seconds from now until the first token
    tpot: float | None = None  # objective: seconds per token after the first
    waited: float = 0.0  # seconds since it was received
    priority: int = 0  # lower is more urgent
    tenant: str = ""
    avoid: Collection[str] = ()  # incarnations that have failed it
    local: bool = False  # only a decode worker may be needed, and no store: this is how a last attempt is made
    affinity: str = ""  # requests of one key go to one decode worker while it lives

    @property
    def needs(self) -> int:
        """Device pages of a decode worker, for prompt and output."""
        return -(-(self.prompt + self.max_tokens) // self.prefix.page_size)

    def on_device(self, worker: str) -> int:
        """Pages of the prefix that this one has on its device."""
        return match.pages if (match := self.held.get(worker)) else 0


class Placer(Protocol):
    """A policy. `router.state.RouterState` takes one; `LowestTtft` is Baton's own."""

    def place(self, ask: Ask, view: View) -> Choice: ...


class LowestTtft:
    """The placement with the lowest predicted time to first token."""

    def place(self, ask: Ask, view: View) -> Choice:
        decoders = decode_candidates(view.members, ask.held, ask.needs, ask.avoid)
        prefillers = prefill_candidates(view.members, ask.held, view.config.prefill.max_prompts, ask.avoid)
        return place(ask.prefix, decoders, prefillers, stores(view.members, ask.held, ask.avoid), local=ask.local)


def plan_for(ask: Ask, view: View, decode: str, prefill: str | None = None) -> Plan | Wait:
    """The plan that uses just these workers, incarnations of live ones: what is cached is fetched as far as that pays.
    Wait: one of them takes no work now, or the two have no store between them; without `prefill`, never for the
    latter. For policies that choose workers by rules of their own."""
    decoders = decode_candidates(view.members, ask.held, ask.needs, ask.avoid)
    decoder = next((candidate for candidate in decoders if candidate.incarnation == decode), None)
    if decoder is None:
        return Wait("the decode worker takes no work now")
    nodes = {} if ask.local else nodes_of(stores(view.members, ask.held, ask.avoid))
    node = nodes.get(decoder.node)
    alone = _alone(ask.prefix, decoder, node)
    if prefill is None or alone.cached >= ask.prefix.pages:
        return alone
    prefillers = prefill_candidates(view.members, ask.held, view.config.prefill.max_prompts, ask.avoid)
    makers = [
        _Maker.of(ask.prefix, worker, nodes[worker.node])
        for worker in prefillers
        if worker.incarnation == prefill and worker.node in nodes
    ]
    makers = [maker for maker in makers if node is not None and (maker.store is node.store or maker.store.endpoint)]
    pair = _best_pair(ask.prefix, decoder, node.store, makers) if node is not None else None
    return pair or Wait("the prefill worker takes no prompt now")


def place(
    prefix: Prefix,
    decoders: Sequence[DecodeCandidate],
    prefillers: Sequence[PrefillCandidate],
    stores: Sequence[Store],
    *,
    local: bool = False,
) -> Plan | Wait:
    """Place an attempt. `stores`: at most one of each node. `local`: only a decode worker may be needed, and no store;
    this is how a last attempt is made.

    A worker pair is split only where a page is missing, and where both have a live store on their node; the prefill
    worker's must serve others if that is another node. Where all such prefill workers are full, the prompt waits here:
    it can still be placed elsewhere, and a decode worker that computes long prompts slows down everybody's tokens."""
    if not decoders:
        return Wait("no decode worker is free")
    nodes = {} if local else nodes_of(stores)
    makers = [_Maker.of(prefix, worker, nodes[worker.node]) for worker in prefillers if worker.node in nodes]
    makers.sort(key=lambda maker: (maker.seconds, maker.worker.name))
    plans = [(plan, decoder) for decoder in decoders for plan in _plans(prefix, decoder, makers, nodes)]
    if not plans:
        return Wait("every prefill worker has all the prompts it takes")
    return min(plans, key=_rank)[0]


def pick_prefill(candidates: Sequence[PrefillCandidate], node: str) -> PrefillCandidate | None:
    """The prefill worker of `node` with a free slot that has least to do."""
    free = [candidate for candidate in candidates if candidate.node == node and candidate.slots > 0]
    return min(free, key=lambda c: (c.busy_pages - c.device_pages, c.name), default=None)


def _rank(option: tuple[Plan, DecodeCandidate]) -> tuple[float, int, int, str]:
    """The quickest; of two that are alike, that which moves fewer pages from elsewhere."""
    plan, decoder = option
    return (plan.predicted.total, len(plan.sources), -decoder.device_pages, decoder.name)


@dataclass(frozen=True, slots=True)
class _Maker:
    """A prefill worker, and what it takes until the whole prefix is sealed in its node's store."""

    worker: PrefillCandidate
    store: Store
    reach: Reach
    queue: float
    compute: float

    @property
    def seconds(self) -> float:
        return self.queue + self.reach.seconds + self.compute

    @classmethod
    def of(cls, prefix: Prefix, worker: PrefillCandidate, node: Node) -> _Maker:
        reach = prefiller_reach(prefix, node, worker.device_pages, worker.rate)
        return cls(
            worker=worker,
            store=node.store,
            reach=reach,
            queue=prefix.seconds(worker.busy_pages, worker.rate),
            compute=prefix.seconds(prefix.pages - reach.pages, worker.rate),
        )


def _plans(
    prefix: Prefix, decoder: DecodeCandidate, makers: Sequence[_Maker], nodes: Mapping[str, Node]
) -> Iterator[Plan]:
    """The ways to use this decode worker that may be the best; none: wait for it."""
    node = nodes.get(decoder.node)
    pairs = [maker for maker in makers if node is not None and (maker.store is node.store or maker.store.endpoint)]
    alone = _alone(prefix, decoder, node)
    if alone.cached >= prefix.pages or not pairs:
        yield alone
    worth_it = alone.cached < prefix.pages or alone.loads
    if node is not None and worth_it and (pair := _best_pair(prefix, decoder, node.store, pairs)) is not None:
        yield pair


def _alone(prefix: Prefix, decoder: DecodeCandidate, node: Node | None) -> Plan:
    """The decode worker fetches what is cached, as far as that pays, and computes the rest itself."""
    reach = decoder_reach(prefix, node, decoder.device_pages, decoder.rate)
    fetches = node is not None and reach.pages > decoder.device_pages
    return Plan(
        decode=decoder.incarnation,
        fetch=reach.pages if fetches else 0,
        cached=reach.pages,
        store=node.store.incarnation if node is not None and fetches else "",
        sources=reach.sources,
        loads=reach.loads,
        predicted=Predicted(
            queue=prefix.seconds(decoder.busy_pages, decoder.rate),
            load=reach.seconds,
            compute=prefix.seconds(prefix.pages - reach.pages, decoder.rate),
        ),
    )


def _best_pair(prefix: Prefix, decoder: DecodeCandidate, store: Store, makers: Sequence[_Maker]) -> Plan | None:
    """With the prefill worker of those with a slot that costs least; of two alike, the nearer. `makers` come in the
    order of what the making takes, and nothing costs less than that: so the first few tell."""
    best: tuple[Predicted, _Maker] | None = None
    rank = (inf, False)
    for maker in makers:
        if maker.worker.slots <= 0:
            continue
        price = _price(prefix, decoder, store, maker)
        if price.total - price.transfer > rank[0]:
            break
        if (price.total, maker.store is not store) < rank:
            best, rank = (price, maker), (price.total, maker.store is not store)
    return None if best is None else _pair(prefix, decoder, store, best[1], best[0])


def _pair(prefix: Prefix, decoder: DecodeCandidate, store: Store, maker: _Maker, price: Predicted) -> Plan:
    """The prefill worker seals every page in the store of its node, which is `store` or serves it."""
    source = Source(maker.store.incarnation, maker.store.endpoint, prefix.pages)
    return Plan(
        decode=decoder.incarnation,
        prefill=maker.worker.incarnation,
        fetch=prefix.pages,
        cached=maker.reach.pages,
        store=store.incarnation,
        sources=() if maker.store is store else (source,),
        prefill_sources=maker.reach.sources,
        loads=maker.reach.loads,
        predicted=price,
    )


def _price(prefix: Prefix, decoder: DecodeCandidate, store: Store, maker: _Maker) -> Predicted:
    """Of a pair. The way between two nodes adds all that it takes where the link is slower than the making, and hardly
    more than its latency where it is not."""
    made_in = maker.reach.seconds + maker.compute
    missing = 0 if maker.store is store else prefix.pages - max(decoder.device_pages, store.host)
    link = TierRun(store.remote_speed, missing)
    return Predicted(
        queue=prefix.seconds(decoder.busy_pages, decoder.rate) + maker.queue,
        load=maker.reach.seconds,
        compute=maker.compute,
        transfer=max(link.speed.latency, load_seconds(link, prefix.page_bytes) - made_in) if missing > 0 else 0.0,
    )
