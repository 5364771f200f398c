"""The choice of workers for an attempt: a decode worker, perhaps a prefill worker, and the stores of their pages.

The rule: the lowest predicted time to first token that keeps every objective for the time per output token
(`router.placement.cost_matrix`). What follows from it, without a rule of its own:

- A cached prefix is worth the time that it saves, less the time that loading it takes; so requests go where their
  prefix is until the queue there costs more than computing or fetching it elsewhere. A hot prefix spreads.
- What a worker was given counts at once; a fresh worker gets work until its queue is as long as the others'.
- Samples of one prompt go where its first sample runs, if that worker takes more. There they share its pages by
  reference, and other workers would need copies.
- Waiting is a choice: where a worker that is full now would be done sooner than any that is not, the request stays in
  the router, where it can still go elsewhere. What it waits for counts for those behind it.

Predictions are not exact: among ways that take almost the same time, that one is chosen which has the fewest tokens to
compute, then has the emptiest decode worker, then moves the fewest pages; and equals take turns.

Pure. Pages are immutable and found by key, so a plan made from stale hints costs a recompute and never a wrong token.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Protocol

from baton.messages import LOWEST_CLASS, PageSource
from router.placement.cached_prefix import (
    NodeCache,
    node_cache,
    reusable_on_decode_worker,
    reusable_on_prefill_worker,
)
from router.placement.cluster_view import ClusterView
from router.placement.cost_matrix import PlacementCosts
from router.placement.types import Placement, PlacementChoice, PlacementRequest, Reject, SecondsReservation, Wait
from router.placement.worker_table import NEVER, OPEN

_NEARLY = 0.02  # of the lowest time: what takes no longer than so much more is as good
_AT_ONCE = 0.001  # seconds: the same for short times


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """What a policy decides about one request. The policy changes nothing: its caller carries the decision out."""

    choice: PlacementChoice
    considered: PlacementCosts | None = None  # what the choice was made from; none: there was nothing to choose from
    reservation: SecondsReservation | None = None  # what the request waits for


class PlacementPolicy(Protocol):
    """A policy. `router.state.RouterState` takes one; `LowestTtft` is Baton's own."""

    def place(self, ask: PlacementRequest, view: ClusterView) -> PlacementDecision: ...

    def may_go(self, request: str, view: ClusterView) -> bool:
        """Whether to try a request that waits. One that certainly can't go now is passed by, however many there are."""
        ...

    def request_ended(self, request: str) -> None: ...


class LowestTtft:
    """The placement with the lowest predicted time to first token."""

    def place(self, ask: PlacementRequest, view: ClusterView) -> PlacementDecision:
        if ask.shares_with and _is_quick(view, ask.shares_with):
            decision = place_on(ask, view, ask.shares_with)
            if isinstance(decision.choice, Placement):
                return decision
        costs = _placement_costs(ask, view)
        if costs.num_decode == 0:
            return PlacementDecision(Wait("no decode worker is live"), costs)
        if ask.affinity:
            # Tenants may use one key by chance: it need not bring all their requests to one worker.
            whose = f"{ask.tenant}\0" if ask.tenant else ""
            costs.restrict_decode_to(_affinity_row(whose + ask.affinity, costs))
        if view.config.router.disaggregation == "always":
            costs.require_disaggregation()
        best = costs.lowest
        if best == inf:
            return PlacementDecision(Wait("no live decode worker could hold it"), costs)
        if (problem := _unreachable_objective(ask, costs)) is not None:
            return PlacementDecision(problem, costs)
        option = costs.best_within(best + max(_AT_ONCE, _NEARLY * best))
        if option is None:
            prefill_row, decode_row = costs.best_row_pair
            worker = costs.workers[decode_row if prefill_row is None else prefill_row].incarnation
            wait = Wait(_wait_reason(costs, prefill_row, decode_row), costs.predict(prefill_row, decode_row).total)
            return PlacementDecision(
                wait, costs, SecondsReservation(worker, costs.seconds_of_prefill(prefill_row, decode_row))
            )
        return PlacementDecision(_placement(ask, view, costs, *option), costs)

    def may_go(self, request: str, view: ClusterView) -> bool:
        """It may go anywhere."""
        return True

    def request_ended(self, request: str) -> None:
        """Nothing is kept of any."""


def _is_quick(view: ClusterView, decode: str) -> bool:
    """Whether that is a live decode worker, and no slower than others."""
    table = view.refreshed_table()
    row = table.index.get(decode, table.num_decode)
    return row < table.num_decode and table.delay[row] == 0 and table.workers[row].pace == 1


def place_on(ask: PlacementRequest, view: ClusterView, decode: str, prefill: str | None = None) -> PlacementDecision:
    """The plan that uses just these workers, incarnations of live ones: what is cached is fetched as far as that pays.
    Wait: one of them takes no work now, or the two have no store between them; without `prefill`, never for the
    latter. For policies that choose workers by rules of their own."""
    costs = _placement_costs(ask, view)
    index = view.table.index
    decode_row = index[decode]
    if costs.open[decode_row] != OPEN:
        return PlacementDecision(Wait("the decode worker takes no work now"), costs)
    if prefill is None or costs.cached[decode_row] >= ask.prefix.pages:
        return PlacementDecision(_placement(ask, view, costs, None, decode_row), costs)
    prefill_row = index[prefill]
    if costs.open[prefill_row] != OPEN or not costs.share_stores(prefill_row, decode_row):
        return PlacementDecision(Wait("the prefill worker takes no prompt now"), costs)
    return PlacementDecision(_placement(ask, view, costs, prefill_row, decode_row), costs)


def _placement_costs(ask: PlacementRequest, view: ClusterView) -> PlacementCosts:
    rings = view.config.router.pipeline_prompts and ask.priority < LOWEST_CLASS
    return PlacementCosts(
        ask,
        view.refreshed_table(),
        view.now,
        view.expected_output(ask.output_left),
        view.reserved_seconds,
        view.config.prefill.step_ms / 1_000 if rings else 0.0,
    )


def _unreachable_objective(ask: PlacementRequest, costs: PlacementCosts) -> Reject | None:
    """An objective that no placement meets."""
    able = costs.open[: costs.num_decode] > NEVER
    if ask.tpot is not None and bool(costs.misses_tpot_alone[able].all()):
        return Reject(f"no decode worker brings a token every {ask.tpot * 1_000:.0f} ms, even with nothing else to do")
    if ask.ttft is not None and (soonest := costs.predict(*costs.best_row_pair).total) > ask.ttft:
        return Reject(
            f"the first token would come in {soonest:.3f} s, and {ask.ttft:.3f} s are left", soonest - ask.ttft
        )
    return None


def _wait_reason(costs: PlacementCosts, prefill_row: int | None, decode_row: int) -> str:
    """Name the worker that the request waits for, and the reason."""
    if prefill_row is not None and costs.open[prefill_row] != OPEN:
        return f"{costs.workers[prefill_row].peer.name} has all the prompts it takes, and is worth waiting for"
    name = costs.workers[decode_row].peer.name
    if costs.open[decode_row] != OPEN:
        return f"{name} takes no more now"
    return f"{name} has no room for it, or could not keep an objective"


def _affinity_row(affinity: str, costs: PlacementCosts) -> int:
    """The decode worker of a key: by rendezvous hashing (Thaler and Ravishankar, 1998), so that one that goes takes
    only its own keys along, and they are back when one of its name is."""
    able = [row for row in range(costs.num_decode) if costs.open[row] > NEVER] or list(range(costs.num_decode))

    def weight(row: int) -> bytes:
        return blake2b(f"{costs.workers[row].peer.name}\0{affinity}".encode(), digest_size=8).digest()

    return max(able, key=weight)


# --- plans -----------------------------------------------------------------------------------------------------------


def _placement(
    ask: PlacementRequest, view: ClusterView, costs: PlacementCosts, prefill_row: int | None, decode_row: int
) -> Placement:
    decoder = costs.workers[decode_row]
    predicted, tpot = costs.predict(prefill_row, decode_row), float(costs.tpot[decode_row])
    if prefill_row is None:
        node = _node(ask, view, decoder.peer.node)
        device = ask.device_pages(decoder.incarnation)
        reach = reusable_on_decode_worker(ask.prefix, node, device, decoder.load.prefill_rate)
        fetches = node is not None and reach.pages > device
        return Placement(
            decode=decoder.incarnation,
            fetch_pages=reach.pages if fetches else 0,
            cached_pages=reach.pages,
            store=node.store.incarnation if node is not None and fetches else "",
            sources=reach.sources,
            loads=reach.loads,
            predicted=predicted,
            tpot=tpot,
        )
    worker = costs.workers[prefill_row]
    store, theirs = view.table.store_on[decoder.peer.node], _node(ask, view, worker.peer.node)
    assert theirs is not None, f"no store on node {worker.peer.node}"
    reach = reusable_on_prefill_worker(
        ask.prefix, theirs, ask.device_pages(worker.incarnation), worker.load.prefill_rate
    )
    ring = costs.rings.get(prefill_row)
    source = PageSource(theirs.store.incarnation, theirs.store.endpoint, ask.hand_off_pages)
    return Placement(
        decode=decoder.incarnation,
        prefill=worker.incarnation,
        fetch_pages=ask.hand_off_pages,
        cached_pages=reach.pages,
        store=store,
        sources=() if theirs.store.incarnation == store else (source,),
        prefill_sources=reach.sources,
        loads=reach.loads,
        predicted=predicted,
        tpot=tpot,
        helpers=() if ring is None else tuple(costs.workers[row].incarnation for row in ring.helpers),
        chunk_pages=0 if ring is None else ring.pages,
        ring_seconds=() if ring is None else ring.seconds,
    )


def _node(ask: PlacementRequest, view: ClusterView, name: str) -> NodeCache | None:
    store = view.members.get(view.table.store_on.get(name, ""))
    return None if store is None or ask.decode_only else node_cache(view.members, store, ask.held, ask.excluded)
