"""A worker around its real scheduler, with durations for bodies. A decode worker's repeatable steps are one effect
(`simulator.run`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import msgspec

from baton import messages as msg
from baton.clock import Tick
from baton.config import Config
from baton.router_links import RouterMessage
from baton.store_protocol import LeaseHeartbeat
from engine.step.batch import Sampled
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed
from engine.step.ring import RingChunk
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.device_block_manager import DuplicatePage
from kvstore.client.transfer import Copy, StoreLost
from kvstore.events.changes import page_runs
from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator.clock import Agenda, Body, Stops, VirtualProcess
from simulator.device import CheckingDevice
from simulator.feed import Feed
from simulator.network import SimulatedNetwork
from simulator.ring import RingMarks
from simulator.routers import RouterAddress, RouterEndpoint, SimulatedRouterLinks
from simulator.run import ReadPrefillScheduler, RunDecodeScheduler, RunDone, StepRun
from simulator.timing import ModelTiming, Noise, StepWork
from simulator.transport import SlotMemory
from simulator.worker_shell import WorkerShell

_IDLE = 0.05  # seconds between two turns while a lease is open, as in `worker.loop`
_LONGEST_RUN = 1.0  # seconds; the router would place requests by outdated figures if it got tokens later
END = Sampled(65_535)
"""The token with which every output ends."""


class StoreEndpoint(Protocol):
    """The store of this worker's node."""

    def attach(self, worker: SimulatedWorker) -> int:
        """Connect a worker; return the connection."""
        ...

    @property
    def arena(self) -> SlotMemory: ...

    ring_marks: RingMarks

    def call(self, worker: SimulatedWorker, call: Any) -> None: ...


class ScriptedOutput(NamedTuple):
    """The predetermined output of a request: `token` repeatedly, then `END`.

    `end` is the position of `END`, counted over prompt and output.
    """

    end: float
    token: Sampled


_STRANGER = ScriptedOutput(inf, Sampled(0))  # a request that has ended, but whose Cancel has not arrived yet


class SimulatedWorker(WorkerShell):
    """One worker process, from its start to its end."""

    def __init__(
        self, role: msg.WorkerRole, peer: msg.Peer, card: msg.ModelCard, config: Config, timing: ModelTiming,
        agenda: Agenda, network: SimulatedNetwork, routers: Sequence[RouterAddress],
        outputs: Mapping[str, ScriptedOutput], noise: Noise, become: Callable[[msg.WorkerRole], None], *,
        runs: bool = True, checked: bool = False, groups: WindowGroups = NO_GROUPS,
    ) -> None:  # fmt: skip
        """`become` replaces this incarnation by one of another role. `runs`: simulate repeatable steps as one run.
        `checked`: a device checks the pages of every step; without one there are no page contents. `groups`: of the
        model's layers."""
        self.role = role
        self.peer = peer
        self._timing, self._agenda, self._network = timing, agenda, network
        self._outputs, self._noise, self._become = outputs, noise, become
        self._times = timing.decode if role == "decode" else timing.prefill
        page_size, pages = config.pages.page_size, card.pool_pages * (1 + groups.count)
        self._device = CheckingDevice(pages, page_size, groups=groups) if checked else None
        self._longest = _LONGEST_RUN if runs and not checked else 0.0
        self._copy_seconds = card.page_bytes / timing.copy
        self.state: RunDecodeScheduler | ReadPrefillScheduler = (
            RunDecodeScheduler(config.decode, page_size, pages, calibration=card.steps, groups=groups)
            if role == "decode"
            else ReadPrefillScheduler(
                config.prefill, page_size, pages, calibration=card.steps, groups=groups, rings=card.rings
            )
        )
        self._routers = SimulatedRouterLinks(
            routers, msg.Hello(peer, model=card, events="events", replay="replay"), network
        )
        self.feed = Feed(peer.incarnation, page_size)
        self.followers: dict[str, RouterEndpoint] = {}  # routers that follow our KV events, by incarnation
        self._inbox: deque[tuple[int, msg.Envelope[Any]]] = deque()  # with the index of the sending router
        self._from_store: deque[Any] = deque()
        self._store: StoreEndpoint | None = None
        self.connection = 0
        self._listens = ""  # senders that wake the sleeping body: "" (none), "store" or "all"
        self._run: StepRun | None = None
        self.busy = 0.0  # seconds spent in steps
        self.stops = Stops()
        self._process = VirtualProcess(agenda, self._stopped_body())

    # --- called by others ---------------------------------------------------------------------------------------------

    def receive_from_router(self, place: int, envelope: msg.Envelope[Any]) -> None:
        self._inbox.append((place, envelope))
        if self._run is None or not self._can_wait(envelope):
            self._arrived("all")

    def receive_from_store(self, reply: Any, connection: int) -> None:
        if connection == self.connection:
            self._from_store.append(reply)
            self._arrived("store")

    def store_up(self, store: StoreEndpoint) -> None:
        """Connect to the node's store, which has started."""
        self._store = store
        self.connection = store.attach(self)

    def store_lost(self) -> None:
        self._store, self.connection = None, 0
        self._from_store.clear()
        self._from_store.append(StoreLost())
        self._arrived("store")

    def slow_down(self, factor: float) -> None:
        """Multiply the step times by `factor` from now on."""
        self._noise.slowness = factor

    def beat(self) -> float:
        """Send heartbeats, which have a thread of their own; return the seconds until the next."""
        now = self._agenda.now
        if (over := self.stops.over(now)) > now:
            return over - now
        self._routers.beat(self._heartbeat)
        self.call_store(LeaseHeartbeat(self.state.leases))
        if self._listens == "all":
            self._process.wake(now)
        return self._routers.heartbeat

    def _heartbeat(self, heard: int, router: str) -> msg.Heartbeat:
        age = int((self._agenda.now - self._run.began) * 1_000) if self._run else 0
        own = self.state.heartbeat(heard, router)
        return msgspec.structs.replace(own, step_age_ms=age, events=self.feed.sequence, digest=self.feed.digest)

    def end(self) -> None:
        """Kill the worker. Messages of completed steps are still sent."""
        if (
            self._run is not None
            and isinstance(self.state, RunDecodeScheduler)
            and (done := self._run.ended(self._agenda.now))
        ):
            self.handle(self._done(self._run, done))
        self._process.end()

    def snapshot(self) -> list[msg.Snapshot]:
        self.publish()
        return self.feed.snapshot(page_runs(((page.key, page.parent) for page in self.state.blocks.pages()), "GPU"))

    # --- its loop -----------------------------------------------------------------------------------------------------

    def _stopped_body(self) -> Body:
        """Yield what the body does, later where the process is stopped."""
        for until in self._body():
            yield self.stops.delayed(self._agenda.now, until)
            while (over := self.stops.over(self._agenda.now)) > self._agenda.now:
                yield over

    def _body(self) -> Body:
        while True:
            worked = yield from self.make_turn()
            if not (worked or self._inbox or self._from_store):
                self._listens = "all"
                yield self._agenda.now + _IDLE if self.state.leases else inf
                self._listens = ""

    # --- for `worker.turn` --------------------------------------------------------------------------------------------

    @property
    def store_connected(self) -> bool:
        return self._store is not None

    def now(self) -> float:
        return self._agenda.now

    def handle(self, event: Any, router: str = "") -> None:
        if isinstance(event, RouterMessage):
            router, event = event.router, event.message
        super().handle(event, router)

    # --- effects ------------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Any]:
        """Yield everything that has arrived, routers' messages as `RouterMessage`, then a Tick."""
        now = self._agenda.now
        while self._from_store:
            yield self._from_store.popleft()
        while self._inbox:
            for event in self._routers.hear(*self._inbox.popleft(), now):
                match event:
                    case RouterMessage(message=msg.ChangeRole(role=role)):
                        self._become(role)
                    case _:
                        yield event
        yield from self._routers.tick(now)
        yield Tick()

    def replies(self) -> Iterator[Any]:
        while self._from_store:
            yield self._from_store.popleft()

    def await_store(self, until: float) -> Body:
        if not self._from_store:
            self._listens = "store"
            yield until
            self._listens = ""

    def copy_pages(self, copies: Sequence[Copy]) -> Body:
        store = self._store
        yield self._agenda.now + len(copies) * self._copy_seconds
        if self._device is not None and store is not None:
            self._device.copy(copies, store.arena)

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, StepDone | RunDone | StepFailed]:
        work = StepWork.of(plan.values())
        noise = self._noise.draw()
        first = (work.seconds(self._times) + self._timing.turn) * noise
        run = self._run = StepRun(plan, self._agenda.now, first, self._times.context * work.rows * noise)
        if isinstance(self.state, RunDecodeScheduler) and work.rows == len(plan) and self._longest:
            left = min(self._output(name).end - chunk.end for name, chunk in plan.items())
            run.steps = int(max(1, min(self.state.repeatable_steps(plan), left, self._longest / first)))
        known, chunk, store = self._known(plan), next(iter(plan.values())), self._store
        if (ring := chunk.ring) is None:
            yield run.end
        elif store is None or not (yield from self._run_in_ring(ring, first, store.ring_marks)):
            self._run = None
            return StepFailed(plan, "the chunk before did not come")
        self._run = None
        if self._device is not None:
            if ring is not None and store is not None:
                for page, slot in ring.takes:
                    self._device.pages[chunk.pages[page]] = store.arena.read_slot(slot, 0)
            for tokens, each in zip(known, plan.values(), strict=True):
                self._device.compute(tokens, each)
            if ring is not None and store is not None:
                for page, slot in ring.gives:
                    store.arena.write(slot, self._device.pages[chunk.pages[page]])
        return self._done(run, run.steps)

    def _run_in_ring(self, ring: RingChunk, seconds: float, marks: RingMarks) -> Generator[float, None, bool]:
        assert self._timing.layers is not None

        def wake() -> None:
            self._process.wake(self._agenda.now)

        return marks.run(ring, seconds, self._timing.layers, self.now, wake)

    def leave_ring(self, left: LeaveRing) -> None:
        if self._store is not None:
            self._store.ring_marks.leave(left)

    def _known(self, plan: ScheduledBatch) -> list[list[int]]:
        """Return the tokens of each request of a step that is checked. A request may end meanwhile."""
        if self._device is None:
            return []
        return [list(self.state.tokens_of(name.request)) for name in plan]

    def _done(self, run: StepRun, steps: int) -> StepDone | RunDone:
        self.busy += run.seconds(steps)
        self._routers.spacing = run.seconds(steps) / steps
        plan = run.plan
        if self.role == "prefill":
            return StepDone(plan, [None] * len(plan))
        sampled: list[Sequence[Sampled]] = []
        for name, chunk in plan.items():
            output = self._output(name)
            last = END if output.end <= chunk.end + steps else output.token
            sampled.append([*[output.token] * (steps - 1), last] if chunk.sample else ())
        return RunDone(plan, sampled, steps)

    def _output(self, name: msg.AttemptName) -> ScriptedOutput:
        return self._outputs.get(name.request, _STRANGER)

    def duplicate_page(self, order: DuplicatePage) -> None:
        if self._device is not None:
            self._device.duplicate(order)

    # --- out ----------------------------------------------------------------------------------------------------------

    def tell_router(self, message: msg.Message, router: str) -> None:
        self._routers.say(message, router)

    def call_store(self, call: Any) -> None:
        """Send a call to the store. Until the scheduler has been told that a store is lost, its calls are meant for
        that one, and the next store must not get them."""
        untold = bool(self._from_store) and isinstance(self._from_store[0], StoreLost)
        if self._store is not None and not untold:
            self._store.call(self, call)

    def publish(self) -> None:
        for batch in self.feed.batches([("GPU", self.state.blocks.drain_events())]):
            for incarnation, router in self.followers.items():
                self._network.message(self.peer.incarnation, incarnation, router.hear_events, batch)

    # --- in -----------------------------------------------------------------------------------------------------------

    def _arrived(self, sender: str) -> None:
        if self._listens in ("all", sender):
            self._process.wake(self._agenda.now)
        elif self._run is not None and self._run.cut(self._agenda.now):
            self._process.wake(self._run.end)

    def _can_wait(self, envelope: msg.Envelope[Any]) -> bool:
        """Whether a message changes nothing for the running sequences, so that it need not end the run."""
        if not isinstance(self.state, RunDecodeScheduler):
            return False
        match envelope.message:
            case msg.RouterHeartbeat(attempts=listed):
                return self.state.attempts(envelope.sender) <= frozenset(listed)
            case msg.Cancel(request=request, attempt=attempt):
                return msg.AttemptName(request, attempt) not in self.state.attempts(envelope.sender)
            case _:
                return False
