"""The router's record of each process: identity, health, and the work it was given.

    (stranger) ──Hello──▶ live ──silent, stuck, dead or replaced──▶ gone ──Hello──▶ live

Names are stable and incarnations are not. One live process has a name at a time, and the newest keeps it: newest is
the incarnation that said its first Hello to this router last. So a process that was stopped, replaced, and wakes up
finds its name taken and is rejected for as long as its successor lives. After a restart of the router the first
Hellos may arrive in any order; then the older process may be the one kept, which is as sound: nothing is shared by
name, and every message names incarnations.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import msgspec

from baton import messages as msg
from baton.errors import Incompatible

_REMEMBERED = 4_096  # incarnations; far more than processes ever start while one of them is still around
_UNANSWERED = 16  # Decodes on their way to one worker; without a limit, a full worker would refuse a whole queue
_SHOWN = 600.0  # seconds for which a process that went is still listed
_SLOWEST = 1e-3  # prompt tokens per second; a lower rate is none, and a division by it may overflow

GoneReason: TypeAlias = Literal["silent", "stuck", "dead", "replaced", "rejected"]
GONE_REASONS: tuple[GoneReason, ...] = get_args(GoneReason)


@dataclass
class AssignedAttempt:
    """One attempt that a worker was given and has not been told to forget. Of a decode worker, a sequence: what it is
    going to take on average, and what it was promised."""

    sequence: int  # of the message that gave it
    pages: int  # how much work it is; 0 once it is done and merely held
    context: float = 0.0  # tokens that a step attends to
    new_pages: int = 0  # device pages that nothing had before
    growth: float = 0.0  # device pages that its output is still expected to take
    tpot: float | None = None  # objective, seconds
    missing_in_heartbeat: bool = False  # the last heartbeat should have listed it, and did not


@dataclass
class PendingPrefill:
    """Tokens of one attempt that a worker is to compute, or will be."""

    new: int
    context: int = 0  # tokens before them, that need no computing
    seconds: float = 0.0  # that the rest of it takes, as last predicted
    fills_gap: bool = False  # of the lowest class: it gives way to the next one of another class


@dataclass
class ClusterChanges:
    """What has changed in the cluster since it was last read. The records of members write it. Placement takes
    `members` and the queue's scan takes `room`; each clears what it has taken."""

    members: set[str] = field(default_factory=set[str])  # incarnations about which placement may read something new
    room: bool = False  # a worker may have room that it did not have before


@dataclass(eq=False)
class MemberRecord:
    """A live process, or one that went. What placement reads of it changes only through methods, which report the
    change in `changes`."""

    hello: msg.Hello
    heard_at: float  # when it last said anything, seconds
    load: msg.LoadReport = field(default_factory=msg.LoadReport)
    assigned: dict[msg.AttemptName, AssignedAttempt] = field(default_factory=dict[msg.AttemptName, AssignedAttempt])
    pending_prefills: dict[msg.AttemptName, PendingPrefill] = field(
        default_factory=dict[msg.AttemptName, PendingPrefill]
    )  # prompts it is to compute
    unanswered: set[msg.AttemptName] = field(default_factory=set[msg.AttemptName])  # neither accepted nor refused
    busy_since: int | None = None  # sequence of the work it had no room for; none: it may have room
    positions: dict[msg.AttemptName, int] = field(default_factory=dict[msg.AttemptName, int])  # as last reported
    gone: GoneReason | None = None
    draining: bool = False  # it is given nothing new
    unresponsive: bool = False  # by its last heartbeat its main loop reads nothing, in a long step or because it hangs
    delay: float = 0.0  # seconds for which orders wait there, and factors: see `router.placement.slowness`
    pace: float = 1.0
    slowdown: float = 1.0
    changes: ClusterChanges = field(default_factory=ClusterChanges, repr=False)  # shared by all members
    prefill_busy_since: float = 0.0  # its prompts are being computed as from then, seconds
    context: float = 0.0  # of all its work
    growth: float = 0.0  # of all its work, pages
    # free device pages: told by the last heartbeat, less what it was given since; below 0 by mistake
    free_pages: int = 0
    reported_at: float = float("-inf")  # when its last heartbeat came, seconds
    other_routers_requests: int = 0  # sequences or prompts of other routers, as the last heartbeat told
    other_routers_context: float = 0.0  # and tokens of theirs that run
    other_routers_tokens: int = 0  # and those that are to be computed
    tracing: str = ""  # the mark of the trace that it makes, as it was asked for or as the last heartbeat told
    asked_to_trace: int = 0  # sequence of the message that asked; heartbeats that do not reflect it tell nothing

    def __post_init__(self) -> None:
        self.free_pages = self.hello.model.pool_pages if self.hello.model else 0
        self.mark_changed()

    @property
    def peer(self) -> msg.Peer:
        return self.hello.peer

    @property
    def incarnation(self) -> str:
        return self.hello.peer.incarnation

    @property
    def pages(self) -> int:
        """How much work it has, in pages: what it has been given from here, and what other routers' prompts lack."""
        strange = self.other_routers_tokens // self.hello.model.namespace.page_size if self.hello.model else 0
        return sum(work.pages for work in self.assigned.values()) + strange

    def mark_changed(self, *, room: bool = False) -> None:
        """Something that placement reads is different now. `room`: there may be room that was not there before."""
        self.changes.members.add(self.incarnation)
        self.changes.room |= room

    def drain(self, *, draining: bool) -> None:
        """Give it nothing new, or work again."""
        self.draining = draining
        self.mark_changed(room=not draining)

    def rate_slowness(self, delay: float, pace: float, slowdown: float) -> None:
        """Take how slow it is in the router's eyes."""
        self.delay, self.pace, self.slowdown = delay, pace, slowdown
        self.mark_changed()

    # --- work --------------------------------------------------------------------------------------------------------

    def assign_prefill(self, name: msg.AttemptName, prompt: PendingPrefill, now: float) -> None:
        """It is to compute a prompt, at once or when another worker has room for the pages."""
        if not self.pending_prefills:
            self.prefill_busy_since = now
        self.pending_prefills[name] = prompt
        self.mark_changed()

    def assign(self, name: msg.AttemptName, work: AssignedAttempt) -> None:
        """A message to it begins an attempt."""
        self.assigned[name] = work
        self.context += work.context
        self.growth += work.growth
        self.free_pages -= work.new_pages
        self.mark_changed()

    def prefill_done(self, name: msg.AttemptName, now: float | None = None) -> None:
        """It has computed that prompt, at `now`, or need not any more: there is a slot for another."""
        if (prompt := self.pending_prefills.pop(name, None)) is None:
            return
        if now is not None and self.peer.role == "decode":
            # it never tells how far a prompt is, and what decodes beside it makes each take longer
            self.prefill_busy_since = now
        else:
            self.prefill_busy_since += prompt.seconds  # that went into this one; the next report tells better
        self.mark_changed()

    def unassign(self, name: msg.AttemptName) -> bool:
        """It has nothing to do with this attempt any more. False: it was never given it."""
        self.mark_changed(room=name in self.pending_prefills or name in self.assigned)
        self.prefill_done(name)
        self.unanswered.discard(name)
        self.positions.pop(name, None)
        if (work := self.assigned.pop(name, None)) is None:
            return False
        self.context = self.context - work.context if self.assigned else 0.0
        self.growth = self.growth - work.growth if self.assigned else 0.0
        self.free_pages += work.new_pages
        return True

    def answered(self, name: msg.AttemptName) -> None:
        """It has said whether it takes it."""
        self.unanswered.discard(name)
        self.mark_changed(room=True)

    def mark_busy(self, name: msg.AttemptName) -> None:
        """It had no room for this."""
        self.busy_since = self.assigned[name].sequence
        self.mark_changed()

    @property
    def is_empty(self) -> bool:
        """Whether it has no work, of any router."""
        return not (self.assigned or self.pending_prefills or self.other_routers_requests)

    def clear_busy(self) -> None:
        self.busy_since = None
        self.mark_changed(room=True)

    @property
    def takes_sequences(self) -> bool:
        """Whether this decode worker may have room."""
        return not self.unresponsive and self.busy_since is None and len(self.unanswered) < _UNANSWERED

    def free_prefill_slots(self, most: int) -> int:
        """Return how many more prompts this worker may be given, of `most`, other routers' counted. A router without a
        prompt there may always ask for one: after a refusal the worker keeps the next room for it
        (`baton.router_fairness`)."""
        if self.unresponsive or self.busy_since is not None:
            return 0
        own = sum(not prompt.fills_gap for prompt in self.pending_prefills.values())
        return max(most - own - self.other_routers_requests, 0 if own else 1)

    def traces(self, mark: str, sequence: int) -> None:
        """That message asks it for a trace."""
        self.tracing, self.asked_to_trace = mark, sequence

    def reports_trace(self, mark: str, heard: int) -> None:
        """A heartbeat: which trace it makes, if any, once it has heard up to that message."""
        if heard >= self.asked_to_trace:
            self.tracing = mark

    def update_load(
        self, load: msg.LoadReport, heard: int, others: msg.LoadReport, now: float, *, unresponsive: bool = False
    ) -> None:
        """A heartbeat: what it says of itself holds for everything that was given up to the message `heard`. `others`
        is what other routers' work makes of `load`. If that has changed, or if the loop goes on again, there may be
        room."""
        before = (self.other_routers_requests, self.other_routers_context, self.other_routers_tokens)
        goes_on = self.unresponsive and not unresponsive
        if load.prefill_rate < _SLOWEST:
            load = msgspec.structs.replace(load, prefill_rate=0.0)
        self.load, self.unresponsive, self.reported_at = load, unresponsive, now
        if self.peer.role == "prefill" or not self.pending_prefills:  # how far ours are, only prefill workers tell
            self.prefill_busy_since = now
        self.other_routers_requests = others.running + others.waiting
        self.other_routers_context, self.other_routers_tokens = others.context, others.tokens_queued
        if load.pages_total:
            self.free_pages = load.pages_free - sum(
                work.new_pages for work in self.assigned.values() if work.sequence > heard
            )
        others_changed = before != (self.other_routers_requests, self.other_routers_context, self.other_routers_tokens)
        self.mark_changed(room=goes_on or others_changed)


@dataclass
class _LinkCounter:
    order: int  # of first Hellos
    sent: int = 0  # messages


class ClusterMembership:
    """Every process that said Hello. It decides which may join. The consequences of a leave are its owner's
    business."""

    def __init__(self, page_size: int, adapters: Iterable[str] = ()) -> None:
        """`adapters`: the names of the LoRA adapters of the configuration. Every worker has them all."""
        self._page_size, self._configured = page_size, sorted(adapters)
        self.adapters: dict[str, msg.AdapterCard] = {}  # all that were loaded and not unloaded, by name
        self._live: dict[str, MemberRecord] = {}  # by incarnation
        self._by_role: dict[msg.Role, dict[str, MemberRecord]] = {
            "router": {},
            "prefill": {},
            "decode": {},
            "store": {},
        }
        self._gone: dict[str, MemberRecord] = {}  # by name, until replaced
        self._known: dict[str, _LinkCounter] = {}  # by incarnation, oldest first
        self._met = 0
        self.reloading: set[str] = set()  # incarnations that are to end: the weights that they serve are replaced
        self.lost: Counter[tuple[msg.Role, GoneReason]] = Counter()  # processes that went, since the start
        self.changes = ClusterChanges()

    def get(self, incarnation: str) -> MemberRecord | None:
        """The live process of that incarnation."""
        return self._live.get(incarnation)

    def require_live(self, incarnation: str) -> MemberRecord:
        """Return the live process of that incarnation. It must be live: it has a current attempt."""
        member = self._live.get(incarnation)
        assert member is not None, f"{incarnation} has an attempt and is not live"
        return member

    def __iter__(self) -> Iterator[MemberRecord]:
        """The live ones; members may leave meanwhile."""
        return iter(list(self._live.values()))

    def with_role(self, role: msg.Role) -> list[MemberRecord]:
        return list(self._by_role[role].values())

    def schedulable(self, role: msg.Role) -> list[MemberRecord]:
        """The live ones that may be given something."""
        return [member for member in self.with_role(role) if not member.draining]

    def store_of(self, node: str) -> MemberRecord | None:
        return next((member for member in self.with_role("store") if member.peer.node == node), None)

    def another_prefill(self, node: str, most: int, avoid: Collection[str]) -> MemberRecord | None:
        """Return the prefill worker of `node` with the fewest tokens to compute, of those that take a prompt now. Each
        takes `most` prompts."""
        able = [
            member
            for member in self.schedulable("prefill")
            if member.peer.node == node and member.incarnation not in avoid and member.free_prefill_slots(most) > 0
        ]
        return min(
            able, key=lambda m: (sum(prompt.new for prompt in m.pending_prefills.values()), m.peer.name), default=None
        )

    def named(self, name: str) -> MemberRecord | None:
        """The live process of that name."""
        return next((member for member in self._live.values() if member.peer.name == name), None)

    def tracing(self) -> MemberRecord | None:
        """A live process that makes a trace."""
        return next((member for member in self._live.values() if member.tracing), None)

    def listed(self, now: float) -> list[MemberRecord]:
        """The live ones, and those that went not long ago and have no successor."""
        self._gone = {name: member for name, member in self._gone.items() if now - member.heard_at < _SHOWN}
        return sorted([*self._live.values(), *self._gone.values()], key=lambda member: member.peer.name)

    def may_return(self, incarnation: str) -> bool:
        """Whether that incarnation went and has no successor yet: it may only have been silent."""
        return any(member.incarnation == incarnation for member in self._gone.values())

    def note_stuck(self, incarnation: str) -> None:
        """An incarnation that went beats again, and says that it is stuck. It may have gone for its silence: its heart
        was late on a busy machine, or the loop that hangs kept it from beating."""
        for member in self._gone.values():
            if member.incarnation == incarnation and member.gone == "silent":
                member.gone = "stuck"

    @property
    def card(self) -> msg.ModelCard | None:
        """The model that is served, with all its adapters: that of the first live worker whose weights stay."""
        staying = (member for member in self._live.values() if member.incarnation not in self.reloading)
        card = next((member.hello.model for member in staying if member.hello.model), None)
        if card is None or len(card.adapters) == len(self.adapters):
            return card
        return msgspec.structs.replace(card, adapters=tuple(self.adapters[name] for name in sorted(self.adapters)))

    @property
    def longest_context(self) -> int | None:
        """The most pages that a context may have on any decode worker; none while none is live."""
        return max((m.hello.model.context_pages for m in self.with_role("decode") if m.hello.model), default=None)

    # --- coming and going -------------------------------------------------------------------------------------------

    def check(self, hello: msg.Hello) -> None:
        """Raises Incompatible, naming what differs and both values, for a process that can't join."""
        peer = hello.peer
        if hello.protocol != msg.PROTOCOL_VERSION:
            raise Incompatible(f"protocol is {hello.protocol} and this cluster speaks {msg.PROTOCOL_VERSION}")
        if peer.role == "router":
            raise Incompatible(f"role of {peer.name} is router, and so is mine; connect to a cluster of your own")
        if peer.role == "store":
            if (other := self.store_of(peer.node)) and other.peer.name != peer.name:
                raise Incompatible(f"node {peer.node} has the store {other.peer.name}; {peer.name} would be a second")
        elif hello.model is None:
            raise Incompatible(f"model of {peer.name} is missing; a worker says Hello once it has loaded its model")
        else:
            self._check_card(hello.model)
        known = self._live.get(peer.incarnation)
        if known and (known.peer.role, known.peer.name, known.peer.node) != (peer.role, peer.name, peer.node):
            raise Incompatible(
                f"incarnation {peer.incarnation} is the {known.peer.role} {known.peer.name} on {known.peer.node} and "
                f"can't be the {peer.role} {peer.name} on {peer.node}; a process in another role is another incarnation"
            )
        rival = self.named(peer.name)
        if rival and rival.incarnation != peer.incarnation and self._older(peer.incarnation, rival.incarnation):
            raise Incompatible(
                f"incarnation {peer.incarnation} of {peer.name} has been replaced by {rival.incarnation}, "
                f"pid {rival.peer.pid} on node {rival.peer.node}; end this process"
            )

    def join(self, hello: msg.Hello, now: float) -> MemberRecord:
        """A process that has passed `check`; again for one that is live and says Hello again."""
        mine = {one.name: one for one in hello.model.adapters} if hello.model else {}
        if (member := self._live.get(hello.peer.incarnation)) is not None:
            before = {one.name for one in member.hello.model.adapters} if member.hello.model else set[str]()
            self.adapters = {name: card for name, card in self.adapters.items() if name not in before - mine.keys()}
            self.adapters |= mine
            member.hello, member.heard_at = hello, now
            member.mark_changed(room=True)
            return member
        self.adapters |= mine
        self._meet(hello.peer.incarnation)
        before = self._gone.pop(hello.peer.name, None)
        member = self._live[hello.peer.incarnation] = MemberRecord(hello, now, changes=self.changes)
        member.mark_changed(room=True)
        self._by_role[hello.peer.role][hello.peer.incarnation] = member
        member.draining = before is not None and before.incarnation == member.incarnation and before.draining
        return member

    def leave(self, member: MemberRecord, why: GoneReason) -> None:
        del self._live[member.incarnation]
        del self._by_role[member.peer.role][member.incarnation]
        member.gone = why
        self.lost[member.peer.role, why] += 1
        member.mark_changed()
        if why != "replaced":
            self._gone[member.peer.name] = member

    def extend(self, seconds: float) -> None:
        """Count no silence for so long: this router did not listen."""
        for member in self._live.values():
            member.heard_at += seconds
            member.prefill_busy_since += seconds
            member.mark_changed()

    def _check_card(self, card: msg.ModelCard) -> None:
        if card.namespace.page_size != self._page_size:
            raise Incompatible(f"page_size is {card.namespace.page_size} and this cluster has {self._page_size}")
        theirs = [one.name for one in card.adapters]
        if missing := {*self._configured} - {*theirs}:
            names, ours = ", ".join(theirs) or "none", ", ".join(self._configured)
            raise Incompatible(
                f"LoRA adapters are {names} and this cluster has {ours}: {', '.join(missing)} is missing"
            )
        served = self.card
        if served is None:
            return
        for one in card.adapters:
            if (other := self.adapters.get(one.name, one)).digest != one.digest:
                raise Incompatible(f"LoRA adapter {one.name} is {one.digest} and this cluster has {other.digest}")
        if mismatch := msg.difference(card.namespace, served.namespace):
            raise Incompatible(mismatch)
        if card.page_bytes != served.page_bytes:
            raise Incompatible(f"page_bytes is {card.page_bytes} and this cluster has {served.page_bytes}")

    # --- counting along ---------------------------------------------------------------------------------------------

    def next_sequence(self, incarnation: str) -> int | None:
        """The sequence of the message that is sent to it now; none for a stranger."""
        if (known := self._known.get(incarnation)) is None:
            return None
        known.sent += 1
        return known.sent

    def forgettable(self) -> list[str]:
        """Incarnations that went so long ago that nothing of theirs can still be on its way; they are strangers now."""
        excess = len(self._known) - _REMEMBERED
        old = [incarnation for incarnation in self._known if incarnation not in self._live][: max(0, excess)]
        for incarnation in old:
            del self._known[incarnation]
        return old

    def _meet(self, incarnation: str) -> None:
        # A process that comes back keeps its order and its count. A heartbeat from before may still be on its way, and
        # the messages it reflects must not count for those sent from now on.
        self._met += 1
        self._known.setdefault(incarnation, _LinkCounter(self._met))

    def _older(self, incarnation: str, than: str) -> bool:
        mine, other = self._known.get(incarnation), self._known.get(than)
        return mine is not None and other is not None and mine.order < other.order

    def validate(self) -> None:
        names = [member.peer.name for member in self._live.values()]
        assert len(names) == len(set(names)), f"two live processes of one name: {names}"
        assert sum(map(len, self._by_role.values())) == len(self._live)
        for member in self._live.values():
            assert self._by_role[member.peer.role][member.incarnation] is member
            assert member.gone is None
            assert member.incarnation in self._known
            assert member.unanswered <= set(member.assigned), member.unanswered
            assert abs(member.context - sum(work.context for work in member.assigned.values())) < 1e-3
            assert abs(member.growth - sum(work.growth for work in member.assigned.values())) < 1e-3
