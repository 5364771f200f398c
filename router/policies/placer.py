"""Adapt a published rule to a `PlacementPolicy`: its inputs, and the placement for its choice.

When a request arrives, the rule chooses the worker that computes its prompt. The request waits for that worker, first
come, first served, until it has room. The compared systems queue at their workers. Here the request queues in the
router. The decode worker of a split cluster is chosen just before the prompt is computed. Prefixes cached elsewhere are
fetched as far as that pays, as in Baton's own placement. If a worker goes, its requests are chosen for again. Pure.

One rule needs the cost of prefill and the bandwidth of links. In the simulator it gets the simulator's own figures:
"fitted offline", without an error. In a router it gets the costs that are fitted to the workers' steps.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.prefix_map.prefix_map import PrefixMatch
from router.members import MemberRecord
from router.members import PendingPrefill as PromptWork
from router.placement.cached_prefix import store_caches
from router.placement.cluster_view import ClusterView
from router.placement.policy import PlacementDecision, place_on
from router.placement.types import PlacementRequest, Reject, Wait
from router.placement.worker_table import CostModels
from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage

LINK = 1.25e9
"""Bytes per second between nodes that a rule reckons with, where nothing else is known: 10 Gb/s."""
_NOTHING = PrefixMatch(0)
_MISSED = Reject("the rule predicts that an objective would be missed")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in the router's queue: the worker chosen for its prompt, and its work."""

    worker: str  # incarnation
    prompt: PromptWork  # as the rule counts it
    pages: int  # of the whole request


class RulePolicy:
    """A placement policy that applies a published rule."""

    def __init__(self, rule: Rule, costs: CostModels | None = None, link: float = LINK) -> None:
        """`costs`: of the workers; none: those of the view. `link`: bytes per second between nodes."""
        self._rule = rule
        self._costs = costs
        self._link = link
        self._waiting: dict[str, _Waiting] = {}  # by request

    def place(self, ask: PlacementRequest, view: ClusterView) -> PlacementDecision:
        waiting = self._waiting.pop(ask.request, None)
        if waiting is None or waiting.worker in ask.excluded or view.members.get(waiting.worker) is None:
            waiting = self._choose(ask, view)
            if not isinstance(waiting, _Waiting):
                return PlacementDecision(waiting)
        decision = self._plan(ask, view, waiting.worker)
        if isinstance(decision.choice, Wait):
            self._waiting[ask.request] = waiting
        return decision

    def may_go(self, request: str, view: ClusterView) -> bool:
        """Whether the request's worker has room, or none is chosen yet. A full worker blocks only its own requests."""
        waiting = self._waiting.get(request)
        worker = None if waiting is None else view.members.get(waiting.worker)
        return worker is None or _has_room(worker, view)

    def request_ended(self, request: str) -> None:
        self._waiting.pop(request, None)

    def _choose(self, ask: PlacementRequest, view: ClusterView) -> _Waiting | Wait | Reject:
        """Choose the worker that computes the prompt."""
        split = bool(view.prefill_workers) and not ask.decode_only
        able = view.prefill_workers if split else _decoders(ask, view)
        able = [member for member in able if member.incarnation not in ask.excluded] or ([] if split else able)
        if not able:
            return Wait("no worker could do it")
        stage: Stage = "prefill" if split else "both"
        workers = self._shown(ask, view, able, stage)
        chosen = self._rule.choose(stage, _prompt(ask), workers)
        if chosen is None:
            return _MISSED
        whole = ask.tokens - 1 if split else ask.tokens
        prefix = min(self._rule.prefix(chosen, workers) * ask.prefix.page_size, whole)
        return _Waiting(
            worker=able[workers.index(chosen)].incarnation,
            prompt=PromptWork(whole - prefix, prefix),
            pages=ask.prefix.pages,
        )

    def _plan(self, ask: PlacementRequest, view: ClusterView, worker: str) -> PlacementDecision:
        member = view.members.require_live(worker)
        if not _has_room(member, view):
            return PlacementDecision(Wait(f"{member.peer.name} has all the prompts it takes"))
        if member.peer.role == "decode":
            return place_on(ask, view, worker)
        able = [member for member in _decoders(ask, view) if member.takes_sequences]
        if not able:
            return PlacementDecision(Wait("no decode worker takes work now"))
        workers = self._shown(ask, view, able, "decode")
        chosen = self._rule.choose("decode", _prompt(ask), workers)
        if chosen is None:
            return PlacementDecision(_MISSED)
        return place_on(ask, view, able[workers.index(chosen)].incarnation, worker)

    def _shown(
        self, ask: PlacementRequest, view: ClusterView, members: Sequence[MemberRecord], stage: Stage
    ) -> list[RuleWorker]:
        """Return these workers as the rule sees them now."""
        own = {store.node: store for store in store_caches(view.members, ask.held, ())}
        queues: dict[str, list[_Waiting]] = {}
        for waiting in self._waiting.values():
            queues.setdefault(waiting.worker, []).append(waiting)
        costs = self._costs or view.costs
        shown: list[RuleWorker] = []
        for member in members:
            prefill = costs.prefill(member.incarnation)
            store = own.get(member.peer.node)
            device = ask.held.get(member.incarnation, _NOTHING).pages
            host = max(device, store.host if store else 0)
            disk = max(host, store.pages if store else 0)
            queue = queues.get(member.incarnation, [])
            prompts = [*member.pending_prefills.values(), *(waiting.prompt for waiting in queue)]
            pages = member.pages + sum(waiting.pages for waiting in queue)
            shown.append(
                RuleWorker(
                    name=member.peer.name,
                    requests=len(queue) + len(member.pending_prefills if stage == "prefill" else member.assigned),
                    prompts=len(prompts),
                    prompt_tokens=sum(prompt.new for prompt in prompts),
                    queue=sum(prefill.seconds(prompt.new, prompt.context) for prompt in prompts),
                    pages=pages,
                    context=pages * ask.prefix.page_size,
                    pool_pages=member.hello.model.pool_pages if member.hello.model else 1,
                    device=device,
                    host=host - device,
                    disk=disk - host,
                    prefill=prefill,
                    step=costs.step(member.incarnation),
                    link=self._link if store else 0.0,
                )
            )
        return shown


def _has_room(worker: MemberRecord, view: ClusterView) -> bool:
    """Whether a worker has fewer than `prefill.max_num_seqs` prompts, whatever its role.

    Further requests wait in the router, which drops those that would miss their deadline.
    """
    takes = worker.takes_sequences or worker.peer.role != "decode"
    return takes and len(worker.pending_prefills) < view.config.prefill.max_num_seqs


def _prompt(ask: PlacementRequest) -> RulePrompt:
    return RulePrompt(ask.tokens, ask.keys, ask.prefix.page_size, ask.prefix.page_bytes, ask.ttft, ask.tpot)


def _decoders(ask: PlacementRequest, view: ClusterView) -> list[MemberRecord]:
    """Return the decode workers whose KV cache is large enough for the request."""
    return [
        each for each in view.decode_workers if each.hello.model and each.hello.model.pool_pages >= ask.pages_needed
    ]
