"""Moves of work from a live worker to another one: because it drains, is slow, or has more prompts than others.

A move ends the attempt, and the next one goes on with every token and every sealed page so far. It doesn't count as a
failed attempt. Moves that are made for speed use the common retry budget (`router.queueing.admission`), and none is
made while requests wait: a free place is theirs. Pure.
"""

# pyright: strict

from baton.config import Config
from router.members import ClusterMembership, MemberRecord
from router.placement.step_costs import FittedCosts
from router.queueing.admission import AdmissionControl
from router.request import Attempt, Request, RequestPhase
from router.requests.counts import RequestCounts
from router.requests.lifecycle import RequestManager

_LATE = 0.1  # seconds: of a shorter delay nothing is moved, nor for a smaller gain
_SETTLED = 0.5  # seconds for which an attempt that runs stays where it was placed
_MOVES = 4  # requests that are moved, or looked at, at a time
_WORTH = 1.5  # times what a request takes elsewhere, or the rest of its prompt
_CHUNK = 4  # times `prefill.step_ms`, at most: the chunk under way, which a heartbeat does not tell and a move loses


class Moves:
    """Which work leaves its worker. `router.requests.lifecycle` places it anew."""

    def __init__(
        self,
        config: Config,
        members: ClusterMembership,
        costs: FittedCosts,
        manager: RequestManager,
        admission: AdmissionControl,
        counts: RequestCounts,
    ) -> None:
        self._config = config
        self._members = members
        self._costs = costs
        self._manager = manager
        self._admission = admission
        self._counts = counts

    def move_work_off(self, member: MemberRecord, now: float) -> None:
        """Place the unfinished work of a live worker anew."""
        for name in sorted({*member.assigned, *member.pending_prefills}):
            if (current := self._manager.find_attempt(name.request, name.attempt)) is None:
                continue
            request, attempt = current
            if member.incarnation in attempt.helpers:
                self._manager.release_helpers(request, attempt, f"{member.peer.name} drains")
            elif attempt.decode == member.incarnation or attempt.needs_prefill:
                self._manager.retry(request, f"{member.peer.name} drains", now, free=True)

    def move_slow_work(self, member: MemberRecord, now: float) -> None:
        """Place requests of a decode worker that is an outlier anew, where that ends them sooner by far. If its steps
        are slow these are the sequences that run, and if it is late now the orders that it has not answered. A request
        leaves a worker once."""
        slow = {
            RequestPhase.RUNNING: max(member.pace, member.slowdown) > 1,
            RequestPhase.PLACED: member.delay > _LATE,
            RequestPhase.PREPARING: False,  # for long only where pages are late
        }
        if not any(slow.values()) or member.peer.role != "decode" or self._admission.queue:
            return
        self._manager.view.now = now
        before = self._counts.moved
        for name in sorted(member.assigned):
            if (current := self._manager.find_attempt(name.request, name.attempt)) is None:
                continue
            request, attempt = current
            if not slow[attempt.phase]:
                continue
            if self._counts.moved - before >= _MOVES or not self._admission.retry_budget.allow(now):
                return
            if (gain := self._gain_of_move(request, attempt, member, now)) is not None:
                self._admission.retry_budget.take_retry(now)
                self._counts.moved += 1
                request.history.excluded.add(member.incarnation)
                self._manager.retry(request, f"{member.peer.name} is slow: {gain}", now, free=True)

    def _gain_of_move(self, request: Request, attempt: Attempt, member: MemberRecord, now: float) -> str | None:
        """Say what a move is worth; none: too little, or the attempt is too new."""
        placed = request.timeline.placed
        assert request.max_tokens is not None, request.name
        settled = _SETTLED if attempt.phase is RequestPhase.RUNNING else _LATE
        if placed is None or now - placed < settled or not (left := request.max_tokens - request.generated):
            return None
        choice = self._manager.place_elsewhere(request, member, now)
        if choice is None or choice.decode == member.incarnation:
            return None
        tokens = self._manager.view.expected_output(left)
        step = member.pace * self._costs.step(member.incarnation).seconds(len(member.assigned), int(member.context))
        here, there = member.delay + tokens * step, choice.predicted.total + tokens * choice.tpot
        return f"{here:.2f} s to the end, {there:.2f} s elsewhere" if here > _WORTH * there + _LATE else None

    def move_prompts(self, member: MemberRecord, now: float) -> None:
        """Give the rest of a prompt of this prefill worker to another one, where its first token comes sooner by far.
        The other worker begins behind the pages that are sealed. A prompt leaves a worker once, and one at a time, of
        the few longest."""
        most = self._config.prefill.max_num_seqs
        if not self._config.router.move_prompts or self._admission.queue or not member.pending_prefills:
            return
        others = (other for other in self._members.schedulable("prefill") if other is not member)
        free = any(other.free_prefill_slots(most) > 0 for other in others)
        if not free or not self._admission.retry_budget.allow(now):
            return
        self._manager.view.now = now
        self._manager.view.refreshed_table()
        rests = sorted(member.pending_prefills.items(), key=lambda item: (-item[1].seconds, item[0]))
        for name, _ in rests[:_MOVES]:
            if (current := self._manager.find_attempt(name.request, name.attempt)) is None:
                continue
            request, attempt = current
            if request.lowest or member.incarnation in request.history.prompt_left:
                continue
            if (gain := self._gain_of_other_prefill(request, attempt, member, now)) is not None:
                self._admission.retry_budget.take_retry(now)
                self._counts.prompts_moved += 1
                request.history.prompt_left.add(member.incarnation)
                why = f"another prefill worker computes the rest of its prompt: {gain}"
                self._manager.retry(request, why, now, free=True)
                return

    def _gain_of_other_prefill(
        self, request: Request, attempt: Attempt, member: MemberRecord, now: float
    ) -> str | None:
        """Say what a move of the rest of a prompt is worth; none: too little. Equally urgent prompts share a worker's
        time, so each of them delays this one by no more than this one's own rest."""
        if not attempt.prefill_sent or not attempt.needs_prefill or attempt.helpers:
            return None
        rest, here = member.pending_prefills[attempt.name].seconds, 0.0
        page = member.positions.get(attempt.name, 0) // self._config.pages.page_size  # the one that is made next
        for name, prompt in member.pending_prefills.items():
            other = self._manager.find(name.request)
            if other is None or other.level > request.level:
                continue
            if other is not request and other.keys[: page + 1] == request.keys[: page + 1]:
                return None  # one computes it for both
            here += min(prompt.seconds, rest) if other.level == request.level else prompt.seconds
        if (here := here - _CHUNK * self._config.prefill.step_ms / 1_000) <= _LATE:
            return None
        choice = self._manager.place_elsewhere(request, member, now)
        if choice is None or choice.prefill is None:
            return None
        there, name = choice.predicted.total, self._members.require_live(choice.prefill).peer.name
        if here <= _WORTH * there + _LATE:
            return None
        return f"{here:.2f} s at {member.peer.name}, {there:.2f} s at {name} behind {choice.cached_pages} pages"
