"""Requests of the lowest class that run: they fill gaps, and leave where they slow more urgent ones. Pure."""

# pyright: strict

from collections.abc import Iterator
from math import inf

from baton.config import Config
from router.members import ClusterMembership, MemberRecord
from router.placement.step_costs import FittedCosts
from router.placement.types import Placement
from router.request import Request

_SLOWER = 0.03  # of a step's time that they may add for more urgent ones
_STEPS_BETWEEN = 200  # beside more urgent ones, from one of them that joins to the next: its pages make a step longer


class GapFillers:
    """Those that have an attempt. Iteration gives the newest first, and any of them may be taken out in it."""

    def __init__(self, config: Config, members: ClusterMembership, costs: FittedCosts) -> None:
        self._most_prompts, self._members, self._costs = config.prefill.max_num_seqs, members, costs
        self._requests: dict[str, Request] = {}
        self._joined: dict[str, float] = {}  # when one was last given to a decode worker, by incarnation

    def __iter__(self) -> Iterator[Request]:
        return reversed(list(self._requests.values()))

    def fits(self, request: Request, plan: Placement, now: float) -> bool:
        """Whether a request of the lowest class would slow no more urgent one by more than `_SLOWER`."""
        for worker in filter(None, (plan.decode, plan.prefill)):
            prompts = self._members.require_live(worker).pending_prefills
            if len(prompts) >= self._most_prompts or not all(prompt.fills_gap for prompt in prompts.values()):
                return False
        decoder = self._members.require_live(plan.decode)
        if not self._urgent_rows(decoder)[0]:
            return True
        rows = len(decoder.assigned) + decoder.other_routers_requests
        pause = _STEPS_BETWEEN * self._costs.step(plan.decode).seconds(rows, int(decoder.context))
        rested = now - self._joined.get(plan.decode, -inf) > pause
        return rested and plan.prefill is not None and not self._slow(decoder, 1, request.known)

    def add_placed(self, request: Request, plan: Placement, now: float) -> None:
        """One has been placed."""
        self._requests[request.name] = request
        self._joined[plan.decode] = now

    def in_the_way(self, request: Request, plan: Placement) -> Iterator[Request]:
        """Those that slow a request that has been placed, each seen when those before it have left."""
        if request.lowest or not self._requests:
            return
        decoder = self._members.require_live(plan.decode)
        for other in self:
            attempt = other.attempt
            assert attempt is not None, other.name
            computes = attempt.needs_prefill and (attempt.prefill or attempt.decode) in (plan.prefill, plan.decode)
            if computes or (attempt.decode == plan.decode and self._slow(decoder)):
                yield other

    def discard(self, request: Request) -> None:
        """Its attempt is over, if it is one."""
        self._requests.pop(request.name, None)

    def forget(self, worker: str) -> None:
        """The process of that incarnation is gone."""
        self._joined.pop(worker, None)

    def _urgent_rows(self, member: MemberRecord) -> tuple[int, float]:
        """Sequences of a decode worker that are not of the lowest class, other routers' included, and their tokens."""
        mine = [work.context for name, work in member.assigned.items() if name.request not in self._requests]
        return len(mine) + member.other_routers_requests, sum(mine) + member.other_routers_context

    def _slow(self, member: MemberRecord, rows: int = 0, context: int = 0) -> bool:
        """Whether the lowest class, with so many more rows, makes steps of a decode worker too long for the others.
        While nothing is known of its steps, it does."""
        urgent, tokens = self._urgent_rows(member)
        if not urgent:
            return False
        cost = self._costs.step(member.incarnation)
        all_rows = len(member.assigned) + member.other_routers_requests + rows
        seconds = cost.seconds(all_rows, int(member.context + member.other_routers_context) + context)
        return seconds >= (1 + _SLOWER) * cost.seconds(urgent, int(tokens))
