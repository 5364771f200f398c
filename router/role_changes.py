"""Role changes: a worker that is to be the other kind of worker.

    (serves) ──SetRole──▶ drains ──empty, or the time is up──▶ told to ChangeRole ──▶ gone: a new incarnation serves
        ▲                   │                                      │ repeated
        └──────undone───────┘                                      ▼ until it is gone

What it has goes on there for a while, then elsewhere as with `baton drain --now`. The wish is for one incarnation:
should that die meanwhile, its successor begins in the role that it is configured with. Should this router die, the
worker goes on as it is, or as what it has become; a router that comes later learns that from its Hello.

Other routers are not asked. Their attempts are waited for like our own; what is left of them when the time is up is
lost as by a death, and they place it anew. Pure.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass

from baton.config import Config
from baton.errors import InvalidRequest
from baton.messages import ChangeRole, WorkerRole
from router.events import SetRole
from router.members import ClusterMembership, MemberRecord
from router.outbox import Outbox
from router.placement.step_costs import DecodeCost, FittedCosts
from router.placement.utilization import PoolCapacity, PoolUtilization, RoleAdvice, UtilizationMonitor
from router.requests.moves import Moves

PATIENCE = 30.0  # seconds that a worker gets to finish what it has
_LOOK = 1.0  # seconds between two looks at what is asked of the cluster


@dataclass
class _Change:
    role: WorkerRole
    until: float  # when what is left goes elsewhere, seconds
    last_order: float = float("-inf")  # when it was last told


class RoleChanges:
    """The changes that are under way, and the one that is advised."""

    def __init__(
        self,
        config: Config,
        members: ClusterMembership,
        costs: FittedCosts,
        moves: Moves,
        utilization: UtilizationMonitor,
        outbox: Outbox,
    ) -> None:
        self._again = config.cluster.heartbeat_ms / 1_000  # seconds until a worker is told again
        self._auto = config.router.roles == "auto"
        self._page_size = config.pages.page_size
        tpots = [each.tpot_ms / 1_000 for each in config.router.slo_classes.values() if each.enforce and each.tpot_ms]
        self._tpot = min(tpots, default=None)
        self._costs = costs
        self._next_look = float("-inf")
        self.advice: RoleAdvice | None = None
        self._members = members
        self._moves = moves
        self._utilization = utilization
        self._out = outbox
        self._changes: dict[str, _Change] = {}  # by incarnation

    def ask_role(self, order: SetRole, member: MemberRecord, now: float) -> None:
        """Begin with a change, or change its time limit. Raises InvalidRequest where the worker has that role, can't
        have it, or is the last decode worker that takes work."""
        name, role = member.peer.name, member.peer.role
        if role == order.role:
            raise InvalidRequest(f"{name} is a {role} worker already")
        if order.role == "decode" and not (member.hello.model and member.hello.model.lm_head):
            raise InvalidRequest(f"{name} has loaded no output head; start it anew with prefill.lm_head=true")
        if self._is_last(member):
            raise InvalidRequest(f"no decode worker but {name} takes work: no process would generate tokens")
        member.drain(draining=True)
        self._changes[member.incarnation] = _Change(order.role, now + order.patience)
        self._out.log(f"{name} drains, and is a {order.role} worker then", kind="role")

    def target_role(self, incarnation: str) -> WorkerRole | None:
        """What this incarnation is to become, if anything."""
        change = self._changes.get(incarnation)
        return None if change is None else change.role

    def call_off(self) -> None:
        """End all changes. The workers go on as they are."""
        self._changes.clear()

    def settle(self, now: float) -> None:
        """Tell those that are empty, or whose time is up: call when an event has been handled."""
        for incarnation, change in list(self._changes.items()):
            member = self._members.get(incarnation)
            if member is None:
                if not self._members.may_return(incarnation):
                    del self._changes[incarnation]
            elif not member.draining:  # that has been undone
                del self._changes[incarnation]
            elif self._is_last(member):
                del self._changes[incarnation]
                member.drain(draining=False)
                self._out.log(
                    f"{member.peer.name} stays a decode worker: there is no other now", warning=True, kind="role kept"
                )
            elif now >= change.last_order + self._again and (now >= change.until or member.is_empty):
                self._moves.move_work_off(member, now)
                self._out.send(incarnation, ChangeRole(change.role))
                change.last_order = now

    # --- advice ------------------------------------------------------------------------------------------------------

    @property
    def utilization(self) -> PoolUtilization | None:
        """Of both sides lately; none before there has been a worker of each kind."""
        return self._utilization.now

    def tick(self, now: float) -> None:
        """Look, once a second, whether another role for some worker would help; with `router.roles: auto`, see to
        it."""
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        prefill, decode = self._members.schedulable("prefill"), self._members.schedulable("decode")
        self.advice = None
        if not prefill or not decode or self._changes:
            self._utilization.demand(now)  # what was asked of one role alone fades as well
            return
        steps = [self._costs.step(member.incarnation) for member in decode]
        pools = [member.hello.model.pool_pages for member in decode if member.hello.model]
        mean = DecodeCost(
            sum(step.fixed for step in steps) / len(steps),
            sum(step.row for step in steps) / len(steps),
            sum(step.context for step in steps) / len(steps),
        )
        pool = sum(pools) / len(decode) * self._page_size
        self.advice = self._utilization.assess(PoolCapacity(len(prefill), len(decode), mean, pool, self._tpot), now)
        if self.advice is None or not self._auto:
            return
        able = (
            decode if self.advice.role == "prefill" else [m for m in prefill if m.hello.model and m.hello.model.lm_head]
        )
        if able:
            member = min(able, key=lambda member: (member.pages, member.peer.name))
            self.ask_role(SetRole(member.peer.name, self.advice.role, PATIENCE), member, now)

    def _is_last(self, member: MemberRecord) -> bool:
        """Whether no other decode worker takes work."""
        return member.peer.role == "decode" and all(other is member for other in self._members.schedulable("decode"))
