"""The router's knowledge and decisions: live processes, their work, and what each heartbeat proves.

Pure: `handle(event, now) -> list[Command]`. The parts: `members` (processes), `placement.kv_index` (pages),
`requests.lifecycle` (requests), `requests.moves` (work that leaves a live worker), `requests.worker_messages` (workers'
messages about attempts), `heartbeats` (the attempts that a worker lists), `prefix_pinning` (the same for pinned
prefixes). This module judges: it checks every message for its sender, incarnation and attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from zlib import crc32

from baton import messages
from baton.clock import Tick
from baton.config import Config
from baton.errors import BatonError, InvalidRequest, ProcessNotFound, RequestNotFound, shown
from baton.operator_api import Pin
from baton.waits import WaitEdge
from router import events
from router.adapters import RuntimeAdapters, served
from router.generation_request import GenerationRequest
from router.heartbeats import AttemptCheck
from router.members import ClusterMembership, GoneReason, MemberRecord
from router.outbox import Outbox
from router.placement.kv_index import KvIndex
from router.placement.policy import PlacementPolicy
from router.placement.prediction_error import PredictionErrors
from router.placement.prompt_history import PromptHistory
from router.placement.reuse_ceiling import ReuseCeiling
from router.placement.slowness import Slowness
from router.placement.step_costs import FittedCosts
from router.placement.utilization import UtilizationMonitor
from router.policies import policy_named
from router.prefix_pinning.pin import PinPhase as PinPhase
from router.prefix_pinning.pinner import PrefixPinner
from router.prefix_pinning.worker_messages import PinMessageHandler
from router.profiles import Profiles
from router.queueing.admission import AdmissionControl, ModelLimits
from router.requests.counts import RequestCounts
from router.requests.explain import Explanations, RequestRecord
from router.requests.lifecycle import RequestManager, cached_share
from router.requests.moves import Moves
from router.requests.slo_attainment import SloAttainment
from router.requests.worker_messages import WorkerMessageHandler
from router.role_changes import RoleChanges
from router.views import ProcessView, RouterStats
from router.weight_change import WeightChange


class RouterState:
    """One router's whole knowledge."""

    def __init__(
        self, me: messages.Peer, config: Config, limits: ModelLimits, placer: PlacementPolicy | None = None
    ) -> None:
        """`placer`: the policy that places requests; that of the configuration unless told otherwise."""
        self._me = me
        self._config = config
        self._members = ClusterMembership(config.pages.page_size, config.model.lora_modules)
        self._kv_index = KvIndex()
        self._out = Outbox(self._members)
        self.adapters = RuntimeAdapters(config.model, self._members, self._out)
        self.profiles = Profiles(self._members, self._out)
        self._prediction_errors = PredictionErrors()
        self._costs, self._slowness = FittedCosts(self._prediction_errors), Slowness()
        seed = crc32(me.incarnation.encode())
        placer = placer or policy_named(config.router.policy, seed=seed)
        warmth = partial(cached_share, self._members, self._kv_index)
        self._admission = AdmissionControl(config.router, warmth)
        self._explanations = Explanations(config.router.explain_requests)
        self._utilization = UtilizationMonitor()
        self._counts = RequestCounts()
        self._attainment = SloAttainment(config.router.slo_classes)
        self._reuse_ceiling = ReuseCeiling(config.pages.page_size)
        self._prompts = PromptHistory(config.pages.page_size, seed)
        self._manager = RequestManager(
            *(config, limits, self._members, self._kv_index, self._costs, self._out, placer),
            admission=self._admission,
            explanations=self._explanations,
            utilization=self._utilization,
            counts=self._counts,
            attainment=self._attainment,
            reuse_ceiling=self._reuse_ceiling,
            prompts=self._prompts,
            adapters=self.adapters,
        )
        self._moves = Moves(config, self._members, self._costs, self._manager, self._admission, self._counts)
        self._worker_messages = WorkerMessageHandler(
            *(config, limits, self._members, self._manager, self._prediction_errors, self._out),
            admission=self._admission,
            explanations=self._explanations,
            utilization=self._utilization,
            counts=self._counts,
        )
        self._pinner = PrefixPinner(config, limits, self._members, self._kv_index, self._admission.queue, self._out)
        self._pin_messages = PinMessageHandler(config, self._pinner, self._out)
        self._attempt_check = AttemptCheck(
            config, self._members, self._manager, self._worker_messages, self._pin_messages, self._out
        )
        self._role_changes = RoleChanges(config, self._members, self._costs, self._moves, self._utilization, self._out)
        self._weight_change = WeightChange(config, self._members, self._moves, self._pinner, self._out)
        self._next_beat = float("-inf")

    def handle(self, event: events.RouterEvent, now: float) -> list[events.RouterCommand]:
        """Take one event and return the commands, in order. Raises InvalidRequest for a GenerationRequest with a name
        in use and for an impossible DrainWorker, SetRole or ReloadWeights. Raises PinNotFound for an UnpinPrefix that
        has no pin. Raises ProcessNotFound where a ProfileProcess, DrainWorker or SetRole names no live process."""
        match event:
            case events.MessageReceived(envelope=envelope):
                self._message_received(envelope, now)
            case events.KvEvents(batch=batch):
                self._prompts.note_removals(batch.events, now)
                self._request_snapshots(self._kv_index.apply_batch(batch, now))
            case events.KvSnapshot(holder=holder, part=part):
                self._request_snapshots(self._kv_index.apply_snapshot(holder, part, now))
            case GenerationRequest():
                self._manager.submit(event, now)
            case events.PinPrefix():
                self._pinner.pin_prefix(event, now)
            case events.UnpinPrefix():
                self._pinner.unpin_prefix(event, now)
            case events.ProfileProcess():
                self.profiles.start(event)
            case events.StopProfile(process=process):
                self.profiles.stop(process)
            case events.DrainWorker():
                self._drain(event, now)
            case events.LoadAdapter(name=name, path=path):
                self.adapters.load(name, path)
            case events.UnloadAdapter(name=name):
                self.adapters.unload(name)
            case events.SetRole():
                if self._weight_change.under_way:
                    raise InvalidRequest("all workers load new weights; ask again once they serve")
                self._role_changes.ask_role(event, self._worker(event.worker), now)
            case events.ReloadWeights():
                self._weight_change.ask_reload(event, now)
                self._role_changes.call_off()
            case events.ClientGone(request=name, why=why):
                self._pinner.abandon(name, why)
                if (request := self._manager.find(name)) is not None:
                    self._manager.end(request, events.Cancelled(why), now)
            case events.StopMatched(request=name, completion=completion):
                if (request := self._manager.find(name)) is not None:
                    self._manager.end(request, events.Finished("stop"), now, completion)
            case events.CascadeDecided(request=name, choice=choice):
                self._explanations.decided(name, choice)
            case Tick(paused=paused):
                self._tick(paused, now)
            case events.Shutdown():
                self._manager.shut(now)
                self._pinner.shut()
        self._role_changes.settle(now)
        self._weight_change.settle(now)
        self._manager.place_waiting(now)
        self._pinner.start_waiting(now)
        return self._out.take_commands()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _message_received(self, envelope: messages.Envelope[messages.ToRouter], now: float) -> None:
        message, sender = envelope.message, envelope.sender
        if isinstance(message, messages.Hello):
            self._hello(message, sender, now)
            return
        member = self._members.get(sender)
        if member is None:
            if self._is_stuck(message):  # it could not answer
                self._members.note_stuck(sender)
            else:
                self._out.send(sender, messages.RequestHello())
            return
        if envelope.addressee != self._me.incarnation:
            return
        member.heard_at = now
        match message:
            case messages.Heartbeat():
                self._heartbeat(member, message, now)
            case messages.WorkerDied(incarnation=incarnation, pid=pid):
                departed = self._members.get(incarnation)
                of_its_node = departed is not None and departed.peer.node == member.peer.node
                if departed is not None and of_its_node and departed.peer.pid == pid:
                    self._gone(departed, "dead", now)
            case messages.AdapterFailed():
                self.adapters.failed(member, message)
            case messages.PagesPinned():
                self._pin_messages.pinned(member, message, now)
            case messages.Prefilled() | messages.Refused() | messages.AttemptFailed() if message.request.startswith(
                events.PIN
            ):
                self._pin_messages.answer(member, message, now)
            case messages.Tokens(deltas=deltas):
                self._time_tokens(member, deltas, now)
                for delta in deltas:
                    if current := self._manager.find_served(member, delta.request, delta.attempt, "decode"):
                        self._worker_messages.delta(*current, delta, now)
            case _:
                self._about_attempt(member, message, now)

    def _about_attempt(
        self,
        member: MemberRecord,
        message: messages.Accepted
        | messages.Refused
        | messages.FetchIncomplete
        | messages.Started
        | messages.PromptLogprobs
        | messages.Prefilled
        | messages.AttemptFailed,
        now: float,
    ) -> None:
        if current := self._manager.find_served(member, message.request, message.attempt, "decode"):
            request, attempt = current
            match message:
                case messages.Accepted(device=device):
                    self._worker_messages.accepted(request, attempt, device, now)
                case messages.Refused():
                    self._worker_messages.refused(request, attempt, message, now)
                case messages.Started():
                    self._worker_messages.started(request, attempt, message, now)
                case messages.PromptLogprobs():
                    self._worker_messages.prompt_scored(request, attempt, message, now)
                case messages.FetchIncomplete():
                    self._worker_messages.fetch_incomplete(request, attempt, message, now)
                case messages.AttemptFailed():
                    self._worker_messages.worker_failed(request, attempt, member, message, now)
                case messages.Prefilled():
                    pass
        elif current := self._manager.find_served(member, message.request, message.attempt, "prefill"):
            match message:
                case messages.Prefilled():
                    self._worker_messages.prefilled(*current, message, now)
                case messages.Refused():
                    self._worker_messages.prefill_refused(*current, message, now)
                case messages.AttemptFailed():
                    self._worker_messages.worker_failed(*current, member, message, now)
                case _:
                    pass
        elif current := self._manager.find_helped(member, message.request, message.attempt):
            if isinstance(message, messages.Prefilled):
                current[1].helped += message.computed
                self._manager.release_helper(*current, member.incarnation)
            else:
                self._manager.release_helpers(*current, f"{member.peer.name} gives its part up")

    # --- coming and going --------------------------------------------------------------------------------------------

    def _hello(self, hello: messages.Hello, sender: str, now: float) -> None:
        peer = hello.peer
        if peer.incarnation != sender:
            self._out.log(f"{sender} says Hello as {peer.incarnation}: dropped", warning=True, kind="hello")
            return
        member = self._members.get(sender)
        try:
            self._members.check(hello)
        except BatonError as error:
            self._out.log(f"rejected {peer.name}: {error}", warning=True, kind="rejected")
            if member is not None:
                self._gone(member, "rejected", now)
            self._out.send(sender, messages.Rejected(error.reason, str(error)))
            return
        if (predecessor := self._members.named(peer.name)) is not None and predecessor.incarnation != sender:
            self._gone(predecessor, "replaced", now)
        new = member is None
        member = self._members.join(hello, now)
        cluster = self._config.cluster
        self._out.send(sender, messages.Welcome(self._me, cluster.heartbeat_ms, cluster.heartbeat_timeout_ms))
        self.adapters.greeted(member, new=new)
        if new:
            if hello.model is not None:
                self._costs.join(sender, peer.role, hello.model.steps)
                self._slowness.join(sender, peer.role)
            what = "store" if peer.role == "store" else f"{peer.role} worker"
            text = f"{peer.name} joins as a {what} on node {peer.node}, pid {peer.pid}, incarnation {sender}"
            self._out.log(text, kind="joins")
            if hello.events:
                self._out.put(events.Subscribe(sender, hello.events, hello.replay))
                self._request_snapshots(self._kv_index.follow(sender, now))

    def _gone(self, member: MemberRecord, why: GoneReason, now: float) -> None:
        """In one step it is no candidate any more, nothing of it is in the map, and its work goes elsewhere."""
        self._out.log(f"{member.peer.name} ({member.incarnation}) is gone: {why}", warning=True, kind="gone")
        self._members.leave(member, why)
        self._kv_index.forget(member.incarnation)
        self._costs.forget(member.incarnation)
        self._slowness.forget(member.incarnation)
        if member.hello.events:
            self._out.put(events.Unsubscribe(member.incarnation))
        self._pinner.member_gone(member, now)
        self._manager.member_gone(member, now)

    def _is_stuck(self, message: messages.ToRouter) -> bool:
        if not isinstance(message, messages.Heartbeat):
            return False
        return max(message.step_age_ms, message.loop_age_ms) > self._config.cluster.step_timeout_ms

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def _heartbeat(self, member: MemberRecord, beat: messages.Heartbeat, now: float) -> None:
        """Compare what it has with what it should have, and repair the difference."""
        member.reports_trace(beat.tracing, beat.heard)
        standing = max(beat.step_age_ms, beat.loop_age_ms) > self._config.cluster.heartbeat_timeout_ms
        member.update_load(beat.load, beat.heard, beat.others, now, unresponsive=standing)
        self._request_snapshots(self._kv_index.heartbeat(member.incarnation, beat.events, beat.digest, now))
        if self._is_stuck(beat):
            self._gone(member, "stuck", now)
            return
        if member.peer.role == "store":
            self._pin_messages.listed_pins(member, beat, now)
            return
        self._costs.observe(member.incarnation, beat.step, member.load)
        self._costs.forgive(member.incarnation, now)
        loop_age = 0 if beat.step_age_ms else beat.loop_age_ms
        self._slowness.beat(member.incarnation, self._config.cluster.heartbeat_ms / 1_000, loop_age / 1_000, now)
        self._attempt_check.compare(member, beat, now, standing=standing)
        if member.busy_since is not None and member.busy_since <= beat.heard:
            member.clear_busy()
        self._rate_slowness(member, now)
        if member.peer.role == "prefill":
            self._moves.move_prompts(member, now)

    def _time_tokens(self, member: MemberRecord, deltas: Sequence[messages.Delta], now: float) -> None:
        """Compare the time since the last tokens with that of a step. A step that computes prompts as well tells
        nothing."""
        if member.peer.role != "decode":
            return
        fit = calibrated = 0.0
        if not (member.pending_prefills or member.other_routers_tokens):
            rows = len(member.assigned) + member.other_routers_requests
            context = int(member.context + member.other_routers_context)
            fit = self._costs.step(member.incarnation).seconds(rows, context)
            calibrated = self._costs.calibrated_step(member.incarnation).seconds(rows, context)
        self._slowness.tokens(member.incarnation, deltas, fit, calibrated, now)

    def _rate_slowness(self, member: MemberRecord, now: float) -> None:
        slow, name = self._slowness, member.incarnation
        member.rate_slowness(slow.delay(name, now), slow.pace(name, now), slow.slowdown(name, now))
        self._moves.move_slow_work(member, now)

    # --- draining ----------------------------------------------------------------------------------------------------

    def _drain(self, order: events.DrainWorker, now: float) -> None:
        member = self._worker(order.worker)
        others = [other for other in self._members.schedulable("decode") if other is not member]
        if order.at_once and not order.undo and member.peer.role == "decode" and not others:
            raise InvalidRequest(f"no decode worker but {order.worker} takes work: what it runs has nowhere to go")
        member.drain(draining=not order.undo)
        self._out.log(f"{order.worker} {'is given work again' if order.undo else 'drains'}", kind="drains")
        if order.at_once and not order.undo:
            self._moves.move_work_off(member, now)

    def _worker(self, name: str) -> MemberRecord:
        """The live worker of that name."""
        member = self._members.named(name)
        if member is None or member.peer.role == "store":
            raise ProcessNotFound(f"no worker of the name {shown(name)!r} is live; `baton status` lists those that are")
        return member

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, paused: float, now: float) -> None:
        if paused > 0:  # a process judges only after it has read
            self._members.extend(paused)
            self._slowness.extend(paused)
            self._manager.extend(paused)
            self._pinner.extend(paused)
            self._out.log(f"this router stood still for {paused:.3f} s", warning=True, kind="stood still")
        silence = self._config.cluster.heartbeat_timeout_ms / 1_000
        for member in self._members:
            if now - member.heard_at > silence:
                self._gone(member, "silent", now)
            elif member.hello.model is not None and self._slowness.silent(member.incarnation, now):
                self._rate_slowness(member, now)
        self._manager.expire(now)
        self._pinner.expire(now)
        self._role_changes.tick(now)
        self._reuse_ceiling.tick(now)
        self._request_snapshots(self._kv_index.tick(now))
        if now >= self._next_beat:
            self._next_beat = now + self._config.cluster.heartbeat_ms / 1_000
            for member in self._members:
                self._out.send(member.incarnation, messages.RouterHeartbeat(tuple(member.assigned)))
            for incarnation in self._members.forgettable():
                self._out.put(events.ForgetPeer(incarnation))

    def _request_snapshots(self, holders: list[str]) -> None:
        for holder in holders:
            self._out.put(events.AskSnapshot(holder))

    # --- what others read --------------------------------------------------------------------------------------------

    @property
    def served_adapters(self) -> Mapping[str, str]:
        """The directories of the adapters that clients may name, by name."""
        return served(self._config.model, self._members.adapters)

    @property
    def card(self) -> messages.ModelCard | None:
        """The served model as its workers know it; none before the first has joined."""
        return self._members.card

    @property
    def serving(self) -> bool:
        """Whether a request that comes now can be placed: one decode worker is live and does not drain."""
        return self.unready is None

    @property
    def unready(self) -> str | None:
        """Why a request that comes now can't be placed; none: it can. A worker whose step takes long stays live until
        `cluster.step_timeout_ms`."""
        if self._members.schedulable("decode"):
            return None
        return "every decode worker drains" if self._members.with_role("decode") else "no decode worker is live"

    def processes(self, now: float) -> list[ProcessView]:
        """Every process but this one, by name."""
        return [
            ProcessView(
                peer=member.peer,
                load=member.load,
                gone=member.gone,
                heartbeat_age=now - member.heard_at,
                metrics=member.hello.metrics,
                pages_known=self._kv_index.map.pages(member.incarnation),
                events=member.hello.events,
                replay=member.hello.replay,
                draining=member.draining,
                attempts=len({*member.assigned, *member.pending_prefills}),
                changing_to=self._role_changes.target_role(member.incarnation),
                numerics=member.hello.model.own_numerics if member.hello.model else "",
            )
            for member in self._members.listed(now)
        ]

    @property
    def kv_index(self) -> KvIndex:
        """The router's knowledge of cached pages, to be read."""
        return self._kv_index

    def pins(self, now: float) -> list[Pin]:
        """The prefixes that are kept pinned."""
        return self._pinner.pins(now)

    @property
    def queued(self) -> int:
        """The requests that wait for a worker."""
        return len(self._admission.queue)

    @property
    def most_tokens(self) -> int:
        """The tokens of prompt and output together that a request may have at most."""
        return min(known for known in self._manager.context() if known is not None)

    def explain(self, name: str) -> RequestRecord:
        """What is remembered of a request. Raises RequestNotFound."""
        if (record := self._explanations.find(name)) is None:
            most = self._config.router.explain_requests
            raise RequestNotFound(f"no request {shown(name)!r} is among the last {most} (router.explain_requests)")
        return record

    def recent(self, count: int, session: str = "") -> list[RequestRecord]:
        """The last requests, newest first. `session`: those of one session alone."""
        return self._explanations.last(count, session)

    def _adapters(self, *, queued: bool) -> list[str]:
        if not self._members.adapters:
            return []
        queue = self._admission.queue
        return sorted({one.spec.adapter for one in self._manager if one.spec.adapter and (one in queue) == queued})

    def stats(self) -> RouterStats:
        queue = self._admission.queue
        roles: tuple[messages.Role, ...] = ("prefill", "decode", "store")
        return RouterStats(
            queued=len(queue),
            running=len(self._manager) - len(queue),
            live={role: len(self._members.with_role(role)) for role in roles},
            lost=dict(self._members.lost),
            counts=self._counts.copy(),
            slowdowns={m.peer.name: max(m.slowdown, m.pace) for m in self._members if m.peer.role == "decode"},
            attainment=self._attainment.counts,
            reuse_ceiling=self._reuse_ceiling.shares,
            kv_index=self._kv_index.stats(),
            pins={phase.value: self._pinner.count()[phase] for phase in PinPhase},
            waiting=queue.levels(),
            running_adapters=self._adapters(queued=False),
            waiting_adapters=self._adapters(queued=True),
            rejected=dict(self._admission.rejected),
            tenant_tokens=dict(self._admission.served.tokens),
            prediction_errors=self._prediction_errors.summaries(),
            utilization=self._role_changes.utilization,
            advice=self._role_changes.advice,
        )

    def waits(self) -> Iterator[WaitEdge]:
        """Yield the edges of the wait-for graph that this router knows; for tests."""
        for request in self._manager:
            node, attempt = ("request", self._me.incarnation, request.name), request.attempt
            if attempt is None:
                continue  # in the queue, until a place or its deadline
            yield node, ("sequence", attempt.decode, request.name)
            if attempt.prefill is not None and attempt.needs_prefill:
                yield node, ("prompt", attempt.prefill, request.name)

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests."""
        self._members.validate()
        self._kv_index.map.validate()
        self._manager.validate()
        self._pinner.validate()
        live = {member.incarnation for member in self._members}
        assert set(self._kv_index.map.holders()) <= live, "pages of a holder that is gone"
