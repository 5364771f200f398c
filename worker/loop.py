"""The worker's loop: it owns the links to routers, the store client, the runner and the clock.

It executes the effects of `worker.turn` around a scheduler, prefill or decode, and around a runner. All of it runs on
one thread; the heartbeat alone has a thread of its own. On a CPU a step and a copy end before anything else happens. On
other devices they go on beside the loop, which waits for messages and for their ends at the same time.
Each effect is a span of the worker's trace (`baton.trace`): of the scheduler, the engine, page copies or sockets.
"""

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import msgspec
import torch

from baton import messages as msg
from baton.checkpoints import hub
from baton.clock import PauseDetector, Tick
from baton.config import Config
from baton.errors import DeviceLost, ModelError, StoreError
from baton.logs import RateLimit, RateLimitedLog
from baton.membership import SendToRouter
from baton.metrics import Metrics
from baton.monotonic_clock import MonotonicClock
from baton.router_links import RouterLinks, RouterMessage
from baton.samples import Sample
from baton.store_protocol import LeaseHeartbeat
from baton.trace import new_mark
from baton.unix import readable
from baton.wire import Poller, refused
from decode_worker.sliding_window import SlidingWindow
from engine.device.gpus import gpu_uuids
from engine.runner import CopyHandle, Runner, StepHandle
from engine.sampling.grammars import GrammarCompiler
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepOutOfMemory
from engine.step.recomputation import ComparePages, PagesCompared
from engine.step.ring import RingBroken
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.connection import StoreClient, store_address
from kvstore.client.device_block_manager import DeviceBlockManager, DuplicatePage
from kvstore.client.transfer import CallStore, CopiedIn, CopiedOut, Copy, CopyOut, StoreLost, StoreUp
from kvstore.events.changes import page_runs
from kvstore.events.publisher import KvEventPublisher
from worker import turn
from worker.adapters import WorkerAdapters
from worker.alarm import Alarm
from worker.calibration import calibrate
from worker.gpu_metrics import GpuMetrics

log = logging.getLogger(__name__)
of_peers = RateLimitedLog(log, RateLimit(burst=10))  # lines that a router or store can trigger

_IDLE = 0.05  # seconds between two turns of a loop that has nothing to do
_ANSWERING = 0.002  # the same while followers of its KV events read what they asked for
_CONNECT_AGAIN = 0.05  # seconds between two tries to reach the store
_HEARS: Mapping[msg.WorkerRole, Any] = {"prefill": msg.ToPrefill, "decode": msg.ToDecode}  # what routers say to it
_STEP = 0.05  # seconds between two looks at a step that runs beside the loop, whose end wakes it
_PAUSE = 1.0  # seconds; a longer turn means that this process was paused, and no peer is to blame


WorkerCommand: TypeAlias = SendToRouter | CallStore | DuplicatePage | ComparePages | LeaveRing


class WorkerScheduler(Protocol):
    """A role's decisions, as the loop needs them."""

    @property
    def busy(self) -> bool: ...
    @property
    def patience(self) -> float: ...
    @property
    def blocks(self) -> DeviceBlockManager: ...
    @property
    def leases(self) -> tuple[int, ...]: ...
    @property
    def step_tokens(self) -> int: ...
    def uses_adapter(self, digest: str) -> bool: ...
    def handle(self, event: Any, now: float, router: str = "") -> Sequence[WorkerCommand]: ...
    def take_copies(self) -> list[Copy]: ...
    def prepare(self, now: float) -> Sequence[WorkerCommand]: ...
    def schedule(self, now: float) -> ScheduledBatch: ...
    def heartbeat(self, heard: int, router: str = "") -> msg.Heartbeat: ...


class WorkerLoop:
    """One incarnation of a worker process, but for its decisions."""

    def __init__(
        self,
        config: Config,
        role: msg.WorkerRole,
        name: str,
        node: str,
        routers: Sequence[str],
        host: str,
        runner: Runner,
    ) -> None:
        """Connect. `routers`: their ZMQ endpoints; `host`: where our own sockets listen, the address of this node;
        `runner`: as `load` made it, and used by no other. Raises PortInUse or StartupError."""
        self.clock = MonotonicClock()
        self._role: msg.WorkerRole = role
        self.peer = msg.Peer(role, name, node, f"{name}-{secrets.token_hex(6)}", os.getpid())
        self.next_role: msg.WorkerRole | None = None  # what a router wants this process to be from now on
        self.next_weights = ""  # and the checkpoint whose weights it is to load
        self.runner = runner
        self.adapters = WorkerAdapters(runner)
        self.speculates = _speculates(config, runner)
        mixed = config.model.numerics == msg.MIXED
        namespace = _namespace(runner, config, msg.MIXED if mixed else runner.numerics)
        layout = runner.layout
        self.num_pages = runner.num_pages
        longest = min(runner.max_positions, config.model.max_model_len or runner.max_positions)
        self.calibration = calibrate(
            lambda chunks: runner.launch(chunks).wait().seconds, self.clock.now, config.pages.page_size,
            self.num_pages, longest, decodes=role == "decode", most_rows=config.decode.max_num_seqs,
        )  # fmt: skip
        self._page_size = config.pages.page_size
        self._mover = runner.mover(verify=config.store.verify_pages)
        self._model = config.model.served_name
        self.metrics = Metrics()
        self._events = KvEventPublisher(self.peer.incarnation, self._model, self.clock, host)
        window = runner.window
        card = msg.ModelCard(
            namespace,
            layout.page_bytes,
            runner.vocab_size,
            longest,
            self.num_pages // (1 + runner.groups.count),
            self.calibration,
            runner.has_lm_head,
            0 if window is None else SlidingWindow(window, config.pages.page_size, self.num_pages).pages,
            self.adapters.cards,
            runner.numerics if mixed else None,
            role == "prefill" and not runner.no_rings,
        )
        self._hello = hello = msg.Hello(
            self.peer,
            model=card,
            events=self._events.endpoint,
            replay=self._events.replay,
            metrics=self.metrics.serve(host),
        )
        self._routers = RouterLinks(routers, hello, _HEARS[role], self.clock)
        self._store = StoreClient(
            store_address(config.cluster.name, node), self.peer, namespace, layout.page_bytes,
            config.cluster.heartbeat_timeout_ms / 1_000, runner.writers,
        )  # fmt: skip
        self._connect_at = 0.0
        self._joined = False  # routers may know of us
        self._join_by = self.clock.now() + config.cluster.heartbeat_timeout_ms / 1_000  # with a store or without
        self._poller = Poller()
        for link in self._routers.links:
            self._poller.add(link)
        self._poller.add(self._events)
        self._alarm = Alarm()  # a grammar has become ready, or a step or copy beside the loop has ended
        runner.wake(self._alarm.ring)
        self._poller.add(self._alarm.fileno())
        self.grammars = GrammarCompiler(hub.resolve(config.model.path), runner.vocab_size, self._alarm.ring)
        self._pauses = PauseDetector(_PAUSE)
        self._scheduler: WorkerScheduler
        self._step_started: float | None = None  # that of the oldest
        self._step_timeout = config.cluster.step_timeout_ms / 1_000
        self.under_way: deque[turn.StepUnderWay] = deque()  # the turns' own
        self._running: deque[tuple[ScheduledBatch, StepHandle]] = deque()  # steps beside the loop, oldest first
        self._moving: list[tuple[int, CopyHandle]] = []  # copies beside the loop, with their epochs
        self._stepped = False  # in this turn
        self.metrics.read_at_scrape(self._step_age)
        if (gpus := GpuMetrics.of(gpu_uuids(runner.device, config.ranks_of(role)))) is not None:
            self.metrics.read_at_scrape(gpus.read_samples)
        self._next_beat = 0.0
        self.pages_in = self.pages_out = self.corrupt = self.ahead = 0
        self._traces = config.cluster.traces
        self.tracer = runner.tracer
        self.tracer.process = name
        self.tracer.keep = config.cluster.kept_traces
        if config.cluster.trace_steps:
            self.tracer.start(self._traces, new_mark(), config.cluster.trace_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        still = self._mover.close()  # first: no slot may be given up while a copy writes to it
        self.tracer.close()
        self.grammars.close()
        self._alarm.close()
        self._routers.close()
        self._events.close()
        if still:
            self._store.leave()
        else:  # the store takes the slots back when this process has ended
            self._store.close()
        self.metrics.close()

    def serve(
        self, scheduler: WorkerScheduler, samples: Callable[[], Mapping[str, Sample]], stop: threading.Event
    ) -> None:
        """Serve until `stop` is set or a router wants another role or weights. `samples`: the scheduler's metrics."""
        self._scheduler = scheduler
        while not (stop.is_set() or self.next_role or self.next_weights):
            self.metrics.loop_turned()
            with self.tracer.turn():
                self._turn(samples)
        self._let_steps_end()
        self.adapters.remove_unused(lambda digest: False)

    def load_weights(self, load: Callable[[], Runner]) -> Runner:
        """Return what `load` returns. Heartbeats go on meanwhile, so routers don't take the worker for dead. Raises as
        `load` does."""
        loaded = threading.Event()

        def beat() -> None:
            while not loaded.wait(_IDLE):
                self._heartbeat()

        beating = threading.Thread(target=beat, name="beats", daemon=True)
        beating.start()
        try:
            return load()  # on this thread: with the one that starts it, a runner's process ends
        finally:
            loaded.set()
            beating.join()

    def _let_steps_end(self) -> None:
        """Wait for what was launched ahead: it writes to pages that the next role may lend. Raises DeviceLost."""
        until = self.clock.now() + self._step_timeout
        for _, running in self._running:
            while not running.done():
                if self.clock.now() > until:
                    raise DeviceLost(f"a step has not ended within {self._step_timeout:.0f} s")
                self._poller.wait(_STEP)
                self._alarm.silence()
        self._running.clear()

    def _turn(self, samples: Callable[[], Mapping[str, Sample]]) -> None:
        effects = turn.turn(self, self._role)
        result: Any = None
        try:
            while True:
                match effects.send(result):
                    case turn.Receive(step_runs=step_runs):
                        result = self._events_received(step_runs)
                    case turn.AwaitStore(until=until):
                        result = self._replies(until)
                    case turn.CopyPages(copies=copies, epoch=epoch):
                        result = self._copy(copies, epoch)
                    case turn.RunStep(plan=plan):
                        result = self._step(plan)
                    case turn.CollectStep():
                        result = self._collect()
                    case turn.Publish():
                        result = self._publish(samples)
        except StopIteration:
            return

    # --- for `worker.turn` ------------------------------------------------------------------------------------------

    @property
    def store_connected(self) -> bool:
        return self._store.connected

    @property
    def patience(self) -> float:
        return self._scheduler.patience

    @property
    def blocks(self) -> DeviceBlockManager:
        return self._scheduler.blocks

    @property
    def most_steps(self) -> int:
        # Where copies wait for steps, those of a prompt's chunk would wait for the next one, too.
        fits = not self.speculates if self._role == "decode" else self.runner.copies_overlap
        return 2 if self.runner.launches_ahead and fits else 1

    def now(self) -> float:
        return self.clock.now()

    def handle(self, event: Any) -> None:
        router, event = (event.router, event.message) if isinstance(event, RouterMessage) else ("", event)
        with self.tracer.span(f"handle {type(event).__name__}", "scheduler"):
            commands = self._scheduler.handle(event, self.clock.now(), router)
        if isinstance(event, StepOutOfMemory):
            log.warning("%s; steps have at most %d tokens from now on", event.message, self._scheduler.step_tokens)
        self._carry_out(commands)

    def prepare(self) -> None:
        with self.tracer.span("prepare", "scheduler"):
            self._carry_out(self._scheduler.prepare(self.clock.now()))

    def take_copies(self) -> Sequence[Copy]:
        if not self._store.connected:
            return ()
        with self.tracer.span("take copies", "scheduler"):
            return self._scheduler.take_copies()

    def schedule(self) -> ScheduledBatch:
        with self.tracer.span("plan", "scheduler"):
            return self._scheduler.schedule(self.clock.now())

    # --- in ---------------------------------------------------------------------------------------------------------

    def _events_received(self, step_runs: bool) -> Iterator[Any]:
        """Wait until there is work, or the step that runs has ended. Yield the copies that have ended, the store's
        replies, the routers' messages, then a Tick."""
        with self.tracer.span("wait", "sockets"):
            if step_runs:
                self._poller.wait(_STEP)
            else:
                self._poller.wait(0.0 if self._scheduler.busy else _ANSWERING if self._events.under_way else _IDLE)
        self._alarm.silence()
        self.runner.check_device()
        yield from self._copies_ended()
        now = self.clock.now()
        paused = self._pauses.tick(now)
        yield from self._from_store(now)
        # Routers send work at once, and its pages could not be fetched before the store has taken us in.
        self._joined = self._joined or self._store.connected or now >= self._join_by
        with self.tracer.span("read the routers", "sockets"):
            heard = list(self._routers.receive(now, paused)) if self._joined else []
        for event in heard:
            match event:
                case RouterMessage(message=msg.StartTrace(mark=mark, steps=steps)):
                    self.tracer.start(self._traces, mark, steps)
                case RouterMessage(message=msg.StopTrace(mark=mark)):
                    self.tracer.stop(mark)
                case RouterMessage(message=msg.ChangeRole(role=role)):
                    self._change_role(role)
                case RouterMessage(message=msg.LoadWeights(path=path)) if not path.startswith("/"):
                    of_peers.warning("ignores an order for the weights of %r, which is no absolute path", path)
                case RouterMessage(message=msg.LoadWeights(path=path)):
                    of_peers.info("loads the weights of %s; all work here is forgotten", path)
                    self.next_weights = path
                case RouterMessage(router=router, message=msg.LoadAdapter() as order):
                    self._load_adapter(order, router)
                case RouterMessage(message=msg.UnloadAdapter(name=name)):
                    self.adapters.unload(name)
                    self._list_adapters()
                case _:
                    yield event
        yield Tick(paused)

    def _load_adapter(self, order: msg.LoadAdapter, router: str) -> None:
        try:
            with self.tracer.span("load an adapter", "engine"):
                self.adapters.load(order)
        except ModelError as error:
            of_peers.warning("can't load the LoRA adapter %s: %s", order.name, error)
            self._routers.say(msg.AdapterFailed(order.name, error.reason, str(error)), router)
        else:
            self._list_adapters()

    def _list_adapters(self) -> None:
        """Tell all routers which adapters there are."""
        assert self._hello.model is not None
        model = msgspec.structs.replace(self._hello.model, adapters=self.adapters.cards)
        self._hello = msgspec.structs.replace(self._hello, model=model)
        self._routers.introduce(self._hello)

    def _change_role(self, role: msg.WorkerRole) -> None:
        if role == "decode" and not self.runner.has_lm_head:
            of_peers.warning("can't become a decode worker without an output head (prefill.lm_head)")
        elif role != self.peer.role:
            of_peers.info("becomes a %s worker; all work here is forgotten", role)
            self.next_role = role

    def _replies(self, until: float) -> Iterator[Any]:
        """Wait for the store until then at most, and yield its replies."""
        with self.tracer.span("wait for the store", "sockets"):
            readable(self._store.fileno(), max(0.0, until - self.clock.now()))
        yield from self._copies_ended()
        yield from self._from_store(self.clock.now())

    def _copies_ended(self) -> Iterator[turn.CopyEnded]:
        for each in [each for each in self._moving if each[1].done()]:
            self._moving.remove(each)
            epoch, moving = each
            yield turn.CopyEnded(epoch, self._count(moving.wait()))

    def _from_store(self, now: float) -> Iterator[Any]:
        if not self._store.connected:
            if now >= self._connect_at:
                self._connect_at = now + _CONNECT_AGAIN
                try:
                    self._store.connect()
                except StoreError as error:
                    log.debug("no store yet: %s", error)
                else:
                    self._poller.add(self._store.fileno())
                    self._mover.attach(self._store.arena)
                    of_peers.info("attached to the store, incarnation %s", self._store.incarnation)
                    yield StoreUp(self._store.slots, self.runner.layout.page_bytes)
            return
        try:
            with self.tracer.span("read the store", "sockets"):
                replies = self._store.receive()
            yield from replies
            self._store.tick(now)
        except StoreError as error:
            of_peers.warning("lost the store: %s", error)
            self._poller.remove(self._store.fileno())
            self._store.disconnect()
            yield StoreLost()

    # --- out --------------------------------------------------------------------------------------------------------

    def _carry_out(self, commands: Sequence[WorkerCommand]) -> None:
        """Carry out the scheduler's commands. A command for a router or store that is not there is dropped: the
        scheduler is told of the loss and starts over."""
        for command in commands:
            match command:
                case SendToRouter(message=message, router=router):
                    with self.tracer.span("tell the router", "sockets"):
                        self._routers.say(message, router)
                case DuplicatePage(source=source, dest=dest):
                    with self.tracer.span("duplicate a page", "copies"):
                        self.runner.duplicate(source, dest)
                case CallStore(call=call):
                    if self._store.connected:
                        with self.tracer.span("call the store", "sockets"):
                            self._store.call(call)
                case LeaveRing():
                    self.runner.leave_ring(command)
                case ComparePages(key=key, page=page, scratch=scratch):
                    with self.tracer.span("compare pages", "copies"):
                        same = self.runner.same_contents(page, scratch)
                    if not same:
                        log.error("page %s differs from what its tokens give; it is dropped with its chain", key.hex())
                    self.handle(PagesCompared(same))

    def _copy(self, batch: Sequence[Copy], epoch: int) -> CopiedIn | CopiedOut | None:
        direction = "copy out" if isinstance(batch[0], CopyOut) else "copy in"
        with self.tracer.span(direction, "copies", pages=len(batch)):
            moving = self._mover.start(batch)
            if moving.done():
                return self._count(moving.wait())
        self._moving.append((epoch, moving))
        return None

    def _count(self, event: CopiedIn | CopiedOut) -> CopiedIn | CopiedOut:
        if isinstance(event, CopiedOut):
            self.pages_out += event.pages
        else:
            self.pages_in += event.pages
            self.corrupt += len(event.corrupt)
        return event

    def _step(self, plan: ScheduledBatch) -> turn.StepOutcome | None:
        """Launch one step. While one runs, the heartbeat's thread tells how old the oldest is."""
        self.tracer.count()
        self._stepped = True
        ahead = bool(self._running)
        if not ahead:
            self._step_started = self.clock.now()
        with self.tracer.span("heartbeat", "sockets"):
            self._heartbeat()
        chunks = list(plan.values())
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        self.metrics.observe("step_sequences", len(chunks))
        self.metrics.observe("iteration_tokens_total", tokens)
        try:
            with self.tracer.span("step", "engine", chunks=len(chunks), tokens=tokens):
                running = self.runner.launch(chunks)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - one bad batch must not end the worker; its requests hear of it
            if not ahead:
                self._step_ended(None)
            return _failed(plan, error)
        self._running.append((plan, running))
        self.ahead += ahead
        return None if ahead else self._collect()

    def _collect(self) -> turn.StepOutcome | None:
        """Take the results of the oldest step that runs, if it has ended."""
        plan, running = self._running[0]
        if not running.done():
            return None
        self._running.popleft()
        try:
            with self.tracer.span("results", "engine"):
                finished = running.wait()
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._step_ended(None)
            return _failed(plan, error)
        # A CPU is the loop's, too: what a step costs there is all that passes from its plan to its end.
        seconds = finished.seconds if self.runner.overlaps else None
        self._step_ended(seconds)
        return StepDone(plan, finished.sampled, finished.scores, seconds, finished.verified, finished.weights)

    def _step_ended(self, seconds: float | None) -> None:
        """The oldest step has ended. One that was launched ahead begins now."""
        assert self._step_started is not None
        now = self.clock.now()
        self.metrics.observe("step_seconds", now - self._step_started if seconds is None else seconds)
        self._step_started = now if self._running else None
        self._routers.step_ended(self._step_started)  # if there is none, no step holds the loop up from now on

    def _publish(self, samples: Callable[[], Mapping[str, Sample]]) -> None:
        """Publish KV events and the heartbeat's snapshot, and the metrics once a heartbeat."""
        now = self.clock.now()
        next_step_tells = self._stepped and self._scheduler.busy  # in a moment: its heartbeat's snapshot is as good
        self._stepped = False
        with self.tracer.span("publish changes", "sockets"):
            self._publish_changes(self._scheduler.blocks)
        if not next_step_tells:
            with self.tracer.span("heartbeat", "sockets"):
                self._heartbeat()
        if now >= self._next_beat:
            self._next_beat = now + self._routers.heartbeat
            if not self.under_way:
                self.adapters.remove_unused(self._scheduler.uses_adapter)
            with self.tracer.span("publish metrics", "sockets"):
                self.metrics.publish({**samples(), **self._samples()})
            if self._store.connected:
                self._store.call(LeaseHeartbeat(self._scheduler.leases))

    def _heartbeat(self) -> None:
        events, digest, tracing = self._events.sequence, self._events.digest, self.tracer.mark
        self._routers.beat(
            lambda heard, router: msgspec.structs.replace(
                self._scheduler.heartbeat(heard, router), events=events, digest=digest, tracing=tracing
            ),
            self._step_started,
        )

    def _publish_changes(self, cache: DeviceBlockManager) -> None:
        self._events.publish([("GPU", cache.drain_events())], self._page_size)
        self._events.answer(lambda: page_runs(((page.key, page.parent) for page in cache.pages()), "GPU"))

    def _step_age(self) -> Mapping[str, Sample]:
        """For the thread that makes a page, while the loop may be in a step."""
        started = self._step_started
        return {"step_age_seconds": 0.0 if started is None else self.clock.now() - started}

    def _samples(self) -> Mapping[str, Sample]:
        """What the loop itself counts, whatever its role."""
        page_bytes = self.runner.layout.page_bytes
        moved = {("in",): float(self.pages_in), ("out",): float(self.pages_out)}
        return {
            **self._events.metric_samples,
            "pages_copied": moved,
            "bytes_copied": {direction: pages * page_bytes for direction, pages in moved.items()},
            "page_evictions": {("device",): self._scheduler.blocks.evictions},
            "steps_launched_ahead": self.ahead,
            "checksum_failures": {("host",): self.corrupt},
            "connections_refused": refused(),
            "malformed_messages": self._routers.malformed + self._events.malformed,
        }


def _failed(plan: ScheduledBatch, error: Exception) -> StepOutOfMemory | StepFailed:
    if isinstance(error, torch.OutOfMemoryError):
        tokens = sum(len(chunk.tokens) for chunk in plan.values())
        return StepOutOfMemory(plan, f"a step of {tokens} tokens and {len(plan)} chunks did not fit: {error}")
    requests = ",".join(name.request for name in plan)
    if isinstance(error, RingBroken):
        log.warning("request=%s goes on alone: %s", requests, error)
        return StepFailed(plan, str(error))
    log.error("request=%s a step failed", requests, exc_info=error)
    return StepFailed(plan, f"{type(error).__name__}: {error}")


def _speculates(config: Config, runner: Runner) -> bool:
    """Whether its steps verify proposals. A step ahead would have to know what is accepted, so where a runner has steps
    ahead, these are given up only for a setting that asks for proposals."""
    model = config.model
    drafter = model.draft_model or model.speculation_heads or model.speculative_config
    opted_in = model.speculation == "ngram" or drafter
    verifies = runner.verifies and (opted_in or not runner.launches_ahead)
    return model.speculation != "off" and bool(verifies)


def _namespace(runner: Runner, config: Config, numerics: str) -> msg.Namespace:
    layout = runner.layout
    return msg.Namespace(
        runner.fingerprint, numerics, layout.dtype, config.pages.page_size, layout.version, layout.form,
        layout.num_kv_heads, quantization=config.model.quantization,
    )  # fmt: skip
