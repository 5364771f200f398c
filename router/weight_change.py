"""A change of weights: all workers get those of another checkpoint of the same model, without a restart.

    (serve) ──ReloadWeights──▶ all drain ──all are empty, or the time is up──▶ all told to LoadWeights ──▶ gone: new
                                                                                incarnations serve the new weights

A cluster serves one model at a time: its page keys, its stores and the texts under way are of one. So no worker loads
before all are empty, and requests that come meanwhile wait in the queue. The first worker with the new weights decides
what is served from then on. A request that is still under way when the time is up fails if it has tokens: its text
would be of two models.

Every router is asked, and each waits for the attempts of all: of others' it knows by heartbeats. So only those count
that come two intervals or more after the order, when every router has heard of it. Should a router die, another has
told the workers, or the operator asks again. Pure.
"""

# pyright: strict

from __future__ import annotations

from baton.config import Config
from baton.errors import InvalidRequest
from baton.messages import LoadWeights
from router.events import ReloadWeights
from router.members import ClusterMembership, MemberRecord
from router.outbox import Outbox
from router.prefix_pinning.pinner import PrefixPinner
from router.requests.moves import Moves


class WeightChange:
    """The change that is under way, if one is."""

    def __init__(
        self, config: Config, members: ClusterMembership, moves: Moves, pinner: PrefixPinner, outbox: Outbox
    ) -> None:
        self._again = config.cluster.heartbeat_ms / 1_000  # seconds until workers are told again
        self._members = members
        self._moves, self._pinner = moves, pinner
        self._out = outbox
        self._order: ReloadWeights | None = None
        self._until = self._next_order = self._known_by = 0.0

    @property
    def under_way(self) -> bool:
        return self._order is not None

    def ask_reload(self, order: ReloadWeights, now: float) -> None:
        """Begin with a change, or change the time limit and the path of one for which workers still drain. Raises
        InvalidRequest where none can be made."""
        if adapters := self._members.adapters:
            names = ", ".join(sorted(adapters))
            raise InvalidRequest(f"the LoRA adapters {names} belong to the present weights; unload them, or restart")
        if self._order is not None and self._members.reloading:
            raise InvalidRequest(
                f"the weights of {self._order.path} are being loaded; wait until all workers have them"
            )
        if not self._workers():
            raise InvalidRequest("no worker is live, so none can load weights; `baton status` lists the processes")
        self._order, self._until, self._known_by = order, now + order.patience, now + 2 * self._again
        self._out.log(f"all workers drain, and load the weights of {order.path} then", kind="weights")

    def settle(self, now: float) -> None:
        """Tell the workers once all are empty, or the time is up: call when an event has been handled."""
        if self._order is None:
            return
        reloading = self._members.reloading
        if not reloading:
            workers = self._workers()
            for member in workers:
                if not member.draining:  # it has joined meanwhile
                    member.drain(draining=True)
            empty = all(member.is_empty and member.reported_at >= self._known_by for member in workers)
            if now < self._until and not empty:
                return
            reloading |= {member.incarnation for member in workers}
            self._next_order = now
            self._pinner.renew(now)
        left = [member for member in map(self._members.get, reloading) if member is not None]
        if not left:
            self._out.log(f"all workers have left the weights before {self._order.path}", kind="weights")
            self._order = None
            reloading.clear()
        elif now >= self._next_order:
            self._next_order = now + self._again
            for member in left:
                self._moves.move_work_off(member, now)
                self._out.send(member.incarnation, LoadWeights(self._order.path))

    def _workers(self) -> list[MemberRecord]:
        return [*self._members.with_role("prefill"), *self._members.with_role("decode")]
