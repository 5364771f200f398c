"""A published rule as a `Placer`: what it is shown, and what its choice becomes.

The rule chooses the worker that computes the prompt when the request comes, and the request stays with it, first come,
first served, until that worker has room: the systems compared queue at their workers, here the queue is the router's.
The decode worker of a split cluster is chosen when the prompt is about to be computed. What is cached elsewhere is
fetched as far as that pays, as it is for Baton's own placement. A worker that goes leaves its requests to be chosen for
anew. Pure.

What computing a prompt takes, which one of the rules wants to know, are the coefficients that the simulator itself
computes with: "fitted offline", without an error.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages import AttemptName
from bench.simulator.policies.rule import Prompt, Rule, Stage, Worker
from kvstore.prefix_map import Match
from router.candidates import stores, takes_work
from router.costs import PrefillCost, StepCost
from router.peers import Member
from router.placement import Ask, Choice, Reject, Wait, plan_for
from router.view import View

_NOTHING = Match(0)


@dataclass(slots=True)
class _Given:
    """One request's prompt, and the worker that was chosen for it."""

    worker: str  # incarnation
    tokens: int  # that were not cached when it was chosen
    seconds: float  # that computing them takes
    pages: int  # of all of it
    until: float  # when it has left the router's queue, placed or not
    waits: bool = True  # in the router's queue


class Ruled:
    """Baton's router with somebody else's rule."""

    def __init__(self, rule: Rule, prefill: PrefillCost, step: StepCost) -> None:
        self._rule = rule
        self._prefill = prefill
        self._step = step
        self._given: dict[str, _Given] = {}  # by request

    def place(self, ask: Ask, view: View) -> Choice:
        given = self._given.get(ask.request)
        if given is None or not given.waits or given.worker in ask.avoid or view.members.get(given.worker) is None:
            given = self._choose(ask, view)
            if not isinstance(given, _Given):
                return given
            self._given[ask.request] = given
        plan = self._plan(ask, view, given)
        given.waits = isinstance(plan, Wait)
        return plan

    def _choose(self, ask: Ask, view: View) -> _Given | Wait | Reject:
        """Whose prompt it shall be."""
        split = bool(view.prefillers) and not ask.local
        able = view.prefillers if split else _decoders(ask, view)
        able = [member for member in able if member.incarnation not in ask.avoid] or ([] if split else able)
        if not able:
            return Wait("no worker could do it")
        stage: Stage = "prefill" if split else "both"
        workers = self._shown(ask, view, able, stage)
        chosen = self._rule.choose(stage, _prompt(ask), workers)
        if chosen is None:
            return Reject("the rule predicts that an objective would be missed")
        prefix = min(self._rule.prefix(chosen, workers) * ask.prefix.page_size, ask.tokens)
        return _Given(
            worker=able[workers.index(chosen)].incarnation,
            tokens=ask.tokens - prefix,
            seconds=chosen.prefill.seconds(ask.tokens - prefix, prefix),
            pages=ask.prefix.pages,
            until=view.now - ask.waited + view.config.router.queue_ms / 1_000,
        )

    def _plan(self, ask: Ask, view: View, given: _Given) -> Choice:
        member = view.members.get(given.worker)
        assert member is not None, given.worker
        if member.peer.role == "decode":
            return plan_for(ask, view, given.worker)
        if len(member.slots) >= view.config.prefill.max_prompts:
            return Wait("its prefill worker has all the prompts it takes")
        able = [member for member in _decoders(ask, view) if takes_work(member)]
        if not able:
            return Wait("no decode worker takes work now")
        workers = self._shown(ask, view, able, "decode")
        chosen = self._rule.choose("decode", _prompt(ask), workers)
        if chosen is None:
            return Reject("the rule predicts that an objective would be missed")
        return plan_for(ask, view, able[workers.index(chosen)].incarnation, given.worker)

    def _shown(self, ask: Ask, view: View, members: Sequence[Member], stage: Stage) -> list[Worker]:
        """These workers, as the rule sees them now."""
        self._forget(view)
        own = {store.node: store for store in stores(view.members, ask.held, ())}
        waiting: dict[str, list[_Given]] = {}
        for given in self._given.values():
            if given.waits:
                waiting.setdefault(given.worker, []).append(given)
        shown: list[Worker] = []
        for member in members:
            store = own.get(member.peer.node)
            device = ask.held.get(member.incarnation, _NOTHING).pages
            host = max(device, store.host if store else 0)
            disk = max(host, store.pages if store else 0)
            here = waiting.get(member.incarnation, [])
            prompts = here + [given for name in _uncovered(member) if (given := self._given.get(name.request))]
            pages = member.pages + sum(given.pages for given in here)
            shown.append(
                Worker(
                    name=member.peer.name,
                    requests=len(here) + len(member.slots if stage == "prefill" else member.work),
                    prompts=len(prompts),
                    prompt_tokens=sum(given.tokens for given in prompts),
                    queue=sum(given.seconds for given in prompts),
                    pages=pages,
                    context=pages * ask.prefix.page_size,
                    pool_pages=member.hello.model.pool_pages if member.hello.model else 1,
                    device=device,
                    host=host - device,
                    disk=disk - host,
                    prefill=self._prefill,
                    step=self._step,
                    link=store.remote_speed.bytes_per_second if store else 0.0,
                )
            )
        return shown

    def _forget(self, view: View) -> None:
        """Those that have left the queue unplaced, and those whose workers have done with them."""
        at_work = {name.request for member in view.members for name in (*member.work, *member.slots)}
        gone = [
            request
            for request, given in self._given.items()
            if (view.now >= given.until if given.waits else request not in at_work)
        ]
        for request in gone:
            del self._given[request]


def _prompt(ask: Ask) -> Prompt:
    return Prompt(ask.tokens, ask.keys, ask.prefix.page_size, ask.prefix.page_bytes, ask.ttft, ask.tpot)


def _decoders(ask: Ask, view: View) -> list[Member]:
    """Those whose pool could ever hold it."""
    return [each for each in view.decoders if each.hello.model and each.hello.model.pool_pages >= ask.needs]


def _uncovered(member: Member) -> list[AttemptName]:
    """What it has prompts to compute of."""
    if member.peer.role == "prefill":
        return list(member.slots)
    return [name for name, work in member.work.items() if not work.covered]
