"""Between the state and the world: feeds it events, carries out its commands, and keeps its clients' streams.

Owns the state and the streams; sends through a `PeerSockets`, which the service implements with sockets and a test with
a list. Everything runs on one event loop, and an event is handled to its end before the next.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from baton.clock import Clock
from baton.config import REPAIRS, Config, Repair
from baton.errors import RequestCancelled, RequestNotFound, Unavailable
from baton.logs import RateLimit, RateLimitedLog, RequestLog
from baton.messages import LoadReport, Message, ModelCard, Peer
from baton.metrics import Metrics
from baton.operator_api import CascadeReason, NewPin
from baton.samples import Labels
from baton.timeline import Timeline
from kvstore.keys import system_fingerprint
from router import events
from router.dashboard.monitor import DashboardMonitor
from router.frontend.detokenizer import TextStream
from router.frontend.metric_samples import EngineLoad, VllmMetrics, heartbeat_age, metric_samples
from router.frontend.output_stream import OutputStream, StopVerdict
from router.frontend.served_model import ServedModel
from router.generation_request import GenerationRequest
from router.requests.explain import RequestRecord
from router.requests.hops import ttft_hops
from router.state import RouterState
from router.tracing.request_spans import RequestSpans, SpanSink
from router.views import ProcessView, RouterStats

log = logging.getLogger(__name__)
limited = RateLimitedLog(log, RateLimit(burst=20))

_LOAD_SECONDS = 1.0  # between two looks at all workers' loads for `VllmMetrics`
_SHARE = 4  # of the queue, one part takes further requests of bodies that have begun
_OWN = 8  # digits of our incarnation that tell names of ours from those of any other router


class PeerSockets(Protocol):
    """What reaches other processes."""

    def send(self, incarnation: str, message: Message) -> None: ...

    def forget(self, incarnation: str) -> None: ...

    def subscribe(self, incarnation: str, endpoint: str, replay: str) -> None: ...

    def ask(self, incarnation: str) -> None: ...

    def unsubscribe(self, incarnation: str) -> None: ...


_ADAPTER_LOOK = 0.02  # seconds between two looks whether an adapter is loaded


class RouterDriver:
    """The router without its sockets."""

    def __init__(
        self,
        me: Peer,
        config: Config,
        model: ServedModel,
        wire: PeerSockets,
        clock: Clock,
        metrics: Metrics,
        *,
        tracer: SpanSink | None = None,
    ) -> None:
        """`tracer` counts spans for Prometheus; none: there are none."""
        self.me = me
        self.config = config
        self.model = model
        self.state = RouterState(me, config, model.limits)
        self.metrics = metrics
        self.tracer = tracer
        self.monitor = DashboardMonitor(me, config, model.name, self.state)
        self.address = ""  # host:port of our own metrics
        self.stopping = False  # requests that run may end, and hardly any is taken
        self.draw_seed: Callable[[], int] = partial(secrets.randbits, 63)
        self._sockets = wire
        self._clock = clock
        self._streams: dict[str, OutputStream] = {}
        self._pinning: dict[str, asyncio.Future[NewPin | events.Failed | events.Cancelled]] = {}
        self._last_token: dict[str, float] = {}
        self._max_tokens: dict[str, int | None] = {}
        self._held: dict[str, GenerationRequest] = {}  # that have not begun, by name
        self._followers: dict[str, list[str]] = {}  # those held until their leader's first token, by its name
        self._due: deque[str] = deque()  # those held until the queue has room: each begins in a turn of the loop
        self._beginning = False  # such a turn is to come
        self._begun_at = float("-inf")  # when the last of them began
        self._spans: dict[str, RequestSpans] = {}  # of requests that are traced
        self._load_due = float("-inf")
        self._heartbeat_age: Mapping[Labels, float] = {}
        self.vllm_metrics = VllmMetrics(metrics.registry, model, config.pages.page_size)
        # requests that the HTTP APIs mended, by kind
        self.repairs: Counter[Repair] = Counter(dict.fromkeys(REPAIRS, 0))
        self.cascaded: Counter[tuple[str, str, CascadeReason]] = Counter()  # requests: cascade, chosen model, reason
        self._handoff_bytes = 0
        self._card: ModelCard | None = None  # of the workers that were live last
        self._numbered = 0
        self._events: deque[events.RouterEvent] = deque()
        self._handling = False

    # --- clients -----------------------------------------------------------------------------------------------------

    def submit(
        self, request: GenerationRequest, *, leader: OutputStream | None = None, further: bool = False,
        spans: RequestSpans | None = None,
    ) -> OutputStream:  # fmt: skip
        """Begin with a request; its output and its end come through the stream.

        `leader`: another sample of the same prompt. The request begins when the leader's prompt is computed, at its
        first token, to share its pages. If the leader fails before that, so does the request. `further`: another
        prompt of the same body. Both begin as the queue has room, so that no body fills it. Where none has begun for
        as long as a request may wait in the queue, the first does all the same. `spans` are told of its beginning and
        its end. Raises Unavailable once the router is stopping."""
        if self.stopping and self.config.cluster.routers == 1:  # else only connections that are still open send any
            raise Unavailable("the router is stopping; ask again, or ask another router")
        # A client may use a name twice, here and at another router; the cluster never does.
        request = replace(request, name=f"{request.name}-{self._number()}")
        name = request.name
        text = TextStream.of(self.model.tokenizer, request, request.stops)
        stream = self._streams[name] = OutputStream(name, text)
        self._max_tokens[name] = request.max_tokens
        if spans is not None:
            spans.begun()
            self._spans[name] = spans
        if leader is not None and leader.name in self._streams and leader.name not in self._last_token:
            self._held[name] = request
            self._followers.setdefault(leader.name, []).append(name)
        elif leader is not None:  # it has its first token, or has ended
            self._hold([replace(request, cached_on=leader.worker, ttft=None)])
        elif further:
            self._hold([replace(request, ttft=None)])
        else:
            self.handle(request)
        return stream

    def abandon(self, stream: OutputStream, why: str = "the client went away") -> None:
        """The client has gone before the end, or needs no more of it."""
        if (request := self._held.get(stream.name)) is None:
            self.handle(events.ClientGone(stream.name, why))
            return
        summary = events.Summary(Timeline(received=request.received), request.received)
        self._end_held(events.RequestEnded(request.name, events.Cancelled(why), summary))

    def _hold(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin with requests as the queue has room for them."""
        self._held |= {request.name: request for request in requests}
        self._due += [request.name for request in requests]
        self._begin_held()

    def _begin_held(self) -> None:
        """Begin with a held request in the loop's next turn, where one can begin. Many with a long prompt take a
        while."""
        while self._due and self._due[0] not in self._held:
            self._due.popleft()  # its client has gone
        if not self._due or self._beginning:
            return
        router = self.config.router
        waited = self._clock.now() - max(self._held[self._due[0]].received, self._begun_at)
        if self.state.queued <= router.max_queued // _SHARE or waited >= router.queue_timeout_ms / 1_000:
            self._beginning = True
            asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        self._beginning = False
        if self._due and (request := self._held.pop(self._due.popleft(), None)) is not None:
            self._begun_at = self._clock.now()
            self.handle(request)
        else:
            self._begin_held()

    async def pin_prefix(self, order: events.PinPrefix) -> NewPin:
        """Have a prefix computed and pinned, under a name that is made here. Raises BatonError. A caller that stops
        waiting cancels the pin."""
        name = f"{events.PIN}{self._number()}"
        answer = self._pinning[name] = asyncio.get_running_loop().create_future()
        try:
            self.handle(replace(order, name=name))
            outcome = await answer
        finally:
            if self._pinning.pop(name, None) is not None:
                self.handle(events.ClientGone(name))
        if isinstance(outcome, events.Failed):
            raise outcome.error
        if isinstance(outcome, events.Cancelled):
            raise RequestCancelled(outcome.why)
        return outcome

    async def load_adapter(self, name: str, path: str) -> None:
        """Have all workers load a LoRA adapter, and wait until they have. Raises BatonError. A caller that stops
        waiting has it unloaded."""
        self.handle(events.LoadAdapter(name, path))
        try:
            while not self.state.adapters.is_loaded(name):  # noqa: ASYNC110 it is loaded by other processes
                await asyncio.sleep(_ADAPTER_LOOK)
        except asyncio.CancelledError:
            self.state.adapters.abandon(name)
            raise
        self._follow_adapters()

    def unload_adapter(self, name: str) -> None:
        """Have all workers unload a LoRA adapter. Raises InvalidRequest and ModelMismatch."""
        self.handle(events.UnloadAdapter(name))
        self._follow_adapters()

    def _follow_adapters(self) -> None:
        """Serve the adapters that there are now, by their names."""
        if (served := self.state.served_adapters) != self.model.adapters:
            self.model.adapters.clear()
            self.model.adapters.update(served)

    @property
    def unready(self) -> str | None:
        """Why no request can be served now; none: one can."""
        return "the router is stopping" if self.stopping else self.state.unready

    def fingerprint(self, adapter: str) -> str:
        """Return the digest of what decides the tokens of requests with that adapter; empty before any worker joined.
        While no worker is live it is that of the last ones."""
        self._card = self.state.card or self._card
        return system_fingerprint(self._card.namespace_of(adapter)) if self._card else ""

    @property
    def busy(self) -> bool:
        """Whether a stream is open and can go on."""
        return bool(self._streams) and self.state.unready is None

    def stop(self) -> None:
        """End every stream with Unavailable. Its client may ask the router that comes after this one."""
        self.handle(events.Shutdown())
        while self._due:
            if (request := self._held.pop(self._due.popleft(), None)) is not None:
                self.handle(request)  # is refused

    def _number(self) -> str:
        """What no other router has given, nor this one before."""
        self._numbered += 1
        return f"{self.me.incarnation[-_OWN:]}.{self._numbered:x}"

    # --- the state ---------------------------------------------------------------------------------------------------

    def handle(self, event: events.RouterEvent) -> None:
        """Tell the state, and do what it says. What comes of that is handled after it."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for command in self.state.handle(self._events.popleft(), self._clock.now()):
                    self._carry_out(command)
        finally:
            self._handling = False
        if self._due:
            self._begin_held()

    def _carry_out(self, command: events.RouterCommand) -> None:
        match command:
            case events.SendMessage(incarnation=incarnation, message=message):
                self._sockets.send(incarnation, message)
            case events.Emit():
                self._emit(command)
            case events.RequestEnded():
                self._end(command)
            case events.PinAnswered(name=name, outcome=outcome):
                if (answer := self._pinning.pop(name, None)) is not None and not answer.done():
                    answer.set_result(outcome)
            case events.Log() as note:
                _write(note)
                self.monitor.notices.logged(note, self._clock.now())
            case events.ForgetPeer(incarnation=incarnation):
                self._sockets.forget(incarnation)
            case events.Subscribe(incarnation=incarnation, endpoint=endpoint, replay=replay):
                self._sockets.subscribe(incarnation, endpoint, replay)
            case events.AskSnapshot(incarnation=incarnation):
                self._sockets.ask(incarnation)
            case events.Unsubscribe(incarnation=incarnation):
                self._sockets.unsubscribe(incarnation)

    def _emit(self, command: events.Emit) -> None:
        name, now = command.request, self._clock.now()
        if (stream := self._streams.get(name)) is None:
            return
        stream.worker = command.worker
        if command.prompt_logprobs:
            stream.prompt_scored(command.prompt_logprobs)
        if not command.tokens:
            return
        if followers := self._followers.pop(name, ()):  # their objective for the first token is the leader's
            held = [self._held[follower] for follower in followers if follower in self._held]
            self._hold([replace(request, cached_on=command.worker, ttft=None) for request in held])
        if (last := self._last_token.get(name)) is not None:
            self.metrics.observe("inter_token_latency_seconds", now - last)
            self.vllm_metrics.gap(now - last)
            self.monitor.samples.gap(now - last)
        self._last_token[name] = now
        match stream.emit(command.tokens, command.logprobs):
            case StopVerdict.STOPPED:
                self._events.append(events.StopMatched(name, stream.token_count))
            case StopVerdict.UNREAD:
                self._events.append(events.ClientGone(name, "the client does not read its tokens"))
            case StopVerdict.GOES_ON:
                pass

    def _end(self, end: events.RequestEnded) -> None:
        stream = self._streams.pop(end.request, None)
        self._last_token.pop(end.request, None)
        if stream is not None:
            stream.end(end)
        for follower in self._followers.pop(end.request, ()):
            self._end_held(replace(end, request=follower))
        if (spans := self._spans.pop(end.request, None)) is not None:
            spans.request_ended(end, self._record(end.request))
        self._observe(end)
        self.monitor.samples.request_ended(end)
        self.vllm_metrics.request_ended(end, self._max_tokens.pop(end.request, None))

    def _end_held(self, end: events.RequestEnded) -> None:
        """End a request that has not begun, unless it has ended, and those that follow it."""
        if self._held.pop(end.request, None) is None:
            return
        del self._max_tokens[end.request]
        self._streams.pop(end.request).end(end)
        if (spans := self._spans.pop(end.request, None)) is not None:
            spans.forgotten()
        for follower in self._followers.pop(end.request, ()):
            self._end_held(replace(end, request=follower))

    def _record(self, name: str) -> RequestRecord | None:
        """What is remembered of a request."""
        try:
            return self.state.explain(name)
        except RequestNotFound:
            return None

    # --- what others read --------------------------------------------------------------------------------------------

    def processes(self) -> tuple[ProcessView, list[ProcessView]]:
        """This process, and the others by name."""
        stats = self.state.stats()
        load = LoadReport(running=stats.running, waiting=stats.queued)
        return ProcessView(self.me, load, None, 0.0, self.address, 0), self.state.processes(self._clock.now())

    def publish(self, malformed: int, refused: int) -> None:
        """Let Prometheus see the state as it is now."""
        self._follow_adapters()
        stats = self.state.stats()
        if (now := self._clock.now()) >= self._load_due:
            self._load_due = now + _LOAD_SECONDS
            views = self.state.processes(now)
            self.vllm_metrics.load = _engine_load(stats, views)
            self._heartbeat_age = heartbeat_age(views)
        cache = self.model.token_cache
        self.metrics.publish(
            {
                **metric_samples(stats),
                "heartbeat_age_seconds": self._heartbeat_age,
                "handoff_bytes": self._handoff_bytes,
                "spans": {} if self.tracer is None else self.tracer.counts,
                "tokenizer_cache_queries": 0 if cache is None else cache.queries,
                "tokenizer_cache_hits": 0 if cache is None else cache.hits,
                "request_repairs": {(kind,): float(count) for kind, count in self.repairs.items()},
                "cascade_requests": {labels: float(count) for labels, count in self.cascaded.items()},
                "malformed_messages": malformed,
                "connections_refused": refused,
            }
        )

    def _observe(self, end: events.RequestEnded) -> None:
        line, usage = end.summary.timeline, end.summary.usage
        spans = {
            "request_queue_time_seconds": line.between("received", "placed"),
            "request_prefill_time_seconds": line.between("placed", "started"),
            "time_to_first_token_seconds": line.ttft,
        }
        if isinstance(end.outcome, events.Finished):
            spans["request_decode_time_seconds"] = line.between("first_token", "ended")
            spans["request_time_per_output_token_seconds"] = line.tpot(usage.completion)
            spans["e2e_request_latency_seconds"] = line.between("received", "ended")
        for name, seconds in spans.items():
            if seconds is not None:
                self.metrics.observe(name, seconds)
        hops = ttft_hops(end.summary) or {}
        for hop, seconds in hops.items():
            self.metrics.observe("request_hop_seconds", seconds, hop)
        if "handoff" in hops:
            self.metrics.observe("handoff_seconds", hops["handoff"])
            card = self.state.card
            self._handoff_bytes += end.summary.served.pages_fetched * (card.page_bytes if card else 0)


def _engine_load(stats: RouterStats, views: Sequence[ProcessView]) -> EngineLoad:
    devices = [view.load for view in views if view.peer.role == "decode"]
    free, total = sum(load.pages_free for load in devices), sum(load.pages_total for load in devices)
    return EngineLoad(stats.running, stats.queued, free, total, stats.running_adapters, stats.waiting_adapters)


def _write(note: events.Log) -> None:
    level = logging.DEBUG if note.detail else logging.WARNING if note.warning else logging.INFO
    if note.kind:
        limited.log(level, note.kind, f"request={note.request} {note.text}" if note.request else note.text)
    else:
        logger = RequestLog(log, note.request) if note.request else log
        logger.log(level, "%s", note.text)
