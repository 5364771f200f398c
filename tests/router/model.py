"""A cluster that exists only as data: a router state, workers that follow the protocol, and links that misbehave.

Workers join through the real `baton.membership`. A token is a function of the request's seed and its position. A test
therefore knows every request's output beforehand, whichever worker computes it and however often it is restarted.

Pages are their keys. Prefill workers seal them in the store of their node. Decode workers get them from the store of
theirs, which fetches them from the sources that the router names. If a store that pages must pass has gone, a worker
waits for them for ever: the router must notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from baton import config as settings
from baton import messages as msg
from baton.clock import Tick
from baton.membership import Membership
from kvstore.keys import pack_tokens, unpack_tokens
from router import events
from router.generation_request import GenerationRequest
from router.queueing.admission import ModelLimits
from router.state import RouterState
from tests.router.checked import CheckedRouter
from tests.router.stores import PAGE, Stores, chain_of
from tests.support.held_agenda import HeldAgenda
from tests.support.held_messages import HeldMessages

EMPTY: Mapping[str, str] = MappingProxyType({})
VOCAB = 1_000
EOS = 7
CONTEXT = 4_096
NAMESPACE = msg.Namespace(
    model=b"m" * 16, numerics="test", kv_dtype="float32", page_size=PAGE, layout=1, form="split", kv_heads=1
)
CONFIG = settings.Config(
    cluster=settings.ClusterConfig(heartbeat_ms=250, heartbeat_timeout_ms=1_000, step_timeout_ms=5_000),
    pages=settings.PagesConfig(page_size=PAGE),
    router=settings.RouterConfig(max_attempts=3, max_queued=20, queue_timeout_ms=5_000, attempt_timeout_ms=4_000),
    prefill=settings.PrefillConfig(max_num_seqs=2),
)
ROUTER = msg.Peer("router", "router", "a", "router.1", 1)


def card(
    pool_pages: int = 64,
    namespace: msg.Namespace = NAMESPACE,
    *,
    head: bool = True,
    adapters: Mapping[str, str] = EMPTY,
) -> msg.ModelCard:
    """`adapters`: digests by name."""
    return msg.ModelCard(
        namespace, page_bytes=1_024, vocab_size=VOCAB, max_context=CONTEXT, pool_pages=pool_pages, lm_head=head,
        adapters=tuple(msg.AdapterCard(*each) for each in adapters.items()),
    )  # fmt: skip


def load_of(peer: msg.Peer) -> msg.LoadReport:
    """Prefill workers compute prompts so much quicker than decode workers that they are worth waiting for."""
    return msg.LoadReport(prefill_rate={"prefill": 10_000.0, "decode": 500.0}.get(peer.role, 0.0))


def token_at(seed: int, position: int) -> int:
    """The model: never end of sequence but where `position` and seed say so."""
    if (seed * 31 + position) % 23 == 0:
        return EOS
    return 8 + (seed * 7 + position * 13) % (VOCAB - 8)


def expected(seed: int, prompt: int, max_tokens: int) -> tuple[list[int], str]:
    """A request's whole output, and why it ends."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(seed, prompt + len(tokens)))
        if tokens[-1] == EOS:
            return tokens, "stop"
    return tokens, "length"


def logprob_at(position: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of a token there, and its alternatives: tokens 1, 2, …"""
    return -position / 8, tuple((token, -token / 4) for token in range(1, top + 1))


def submit(name: str, prompt: int = 10, max_tokens: int | None = 6, seed: int = 1, **more: Any) -> GenerationRequest:
    tokens = pack_tokens([1 + (seed + i) % 100 for i in range(prompt)])
    sampling = more.pop("sampling", msg.SamplingParams(seed=seed))
    received = more.pop("received", 0.0)
    return GenerationRequest(name, tokens, sampling, received, max_tokens, stop_token_ids=(EOS,), **more)


@dataclass
class Sequence:
    """One attempt, as a decode worker has it."""

    order: msg.Decode
    tokens: list[int]
    start: int
    waiting: bool  # for pages
    short: bool = False
    ended: bool = False
    finish: str | None = None

    @property
    def name(self) -> msg.AttemptName:
        return msg.AttemptName(self.order.request, self.order.attempt)


@dataclass
class Job:
    """One prompt, as a prefill worker has it."""

    order: msg.Prefill
    left: int  # steps
    done: bool = False
    position: int = 0


@dataclass
class Process:
    """One process."""

    peer: msg.Peer
    hello: msg.Hello
    send: Callable[[msg.Envelope[Any]], object]
    stopped: bool = False
    full: bool = False
    slots: int = 100
    sequences: dict[str, Sequence] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    sent: int = 0
    beat_at: float = 0.0
    step_age_ms: int = 0
    hung_since: float | None = None  # its main loop stands still, and its heart repeats
    latest: msg.Envelope[msg.Heartbeat] | None = None  # what that would be
    becomes: msg.WorkerRole | None = None

    def __post_init__(self) -> None:
        self.membership = Membership(self.hello)

    def say(self, message: msg.Message) -> None:
        addressee = "" if isinstance(message, msg.Hello) else (self.membership.router or "")
        self.sent += 1
        self.send(msg.Envelope(self.peer.incarnation, addressee, self.sent, message))

    def forget_all(self) -> None:
        self.sequences.clear()
        self.jobs.clear()


class Cluster(CheckedRouter):
    """The state, its processes, and the outcome of every request."""

    now = 100.0

    def __init__(self, config: settings.Config = CONFIG) -> None:
        super().__init__(ROUTER, RouterState(ROUTER, config, ModelLimits(VOCAB, CONTEXT)))
        self.no_clients()
        self.config = config
        self.adapters = sorted(config.model.lora_modules)  # that its workers have
        self.namespace = NAMESPACE  # of workers to come
        self.serves_none: set[str] = set()  # nodes whose stores serve no others
        self.processes: dict[str, Process] = {}  # by incarnation: dead ones are gone
        self.stores = Stores()
        self.asked: list[str] = []  # holders whose snapshots are on their way
        self.endpoints: dict[str, str] = {}  # of every store that ever was, by incarnation
        self.accepted: set[msg.AttemptName] = set()
        self.births = 0
        self.random = random.Random(0)
        self.agenda = HeldAgenda()
        self.messages = HeldMessages(self.agenda, self.random)

    # --- processes ----------------------------------------------------------------------------------------

    def start(self, role: Any, name: str, node: str = "a", pool_pages: int = 256, slots: int = 100) -> Process:
        self.births += 1
        peer = msg.Peer(role, name, node, f"{name}.{self.births}", self.births)
        hello = msg.Hello(
            peer, model=card(pool_pages, self.namespace, adapters={one: f"digest of {one}" for one in self.adapters})
        )
        if role == "store":
            data = "" if node in self.serves_none else f"tcp://{peer.incarnation}"
            hello = msg.Hello(peer, events=f"kv://{peer.incarnation}", data=data)
            self.endpoints[peer.incarnation] = data
        process = self.processes[peer.incarnation] = Process(peer, hello, self.send, slots=slots)
        return process

    def named(self, name: str) -> list[Process]:
        return [process for process in self.processes.values() if process.peer.name == name]

    def kill(self, process: Process) -> None:
        del self.processes[process.peer.incarnation]
        self.messages.leave(process.peer.incarnation)
        if process.peer.role == "store":
            self.stores.lose(process.peer.incarnation)

    # --- the router ----------------------------------------------------------------------------------------

    def post(self, envelope: msg.Envelope[Any]) -> None:
        if (process := self.processes.get(envelope.addressee)) is not None:
            self.messages.message(self.incarnation, envelope.addressee, self.take, envelope, process)

    def ask_snapshot(self, holder: str) -> None:
        self.asked.append(holder)

    def output(self, request: str) -> list[int]:
        return self.expected(request)[0]

    def expected(self, request: str) -> tuple[list[int], str]:
        order = self.submitted[request]
        return expected(order.sampling.seed, len(order.tokens) // 4, order.max_tokens or CONTEXT)

    # --- time and links ----------------------------------------------------------------------------------------

    def advance(self, seconds: float, *, paused: bool = False) -> None:
        self.now += seconds
        self.tell(Tick(seconds if paused else 0.0))

    def send(self, envelope: msg.Envelope[Any]) -> None:
        """Send a process's message to the router."""
        self.messages.message(envelope.sender, self.incarnation, self.hear, envelope)

    def hear(self, envelope: msg.Envelope[Any]) -> None:
        """The router reads a message."""
        self.tell(events.MessageReceived(envelope))

    def take(self, envelope: msg.Envelope[Any], process: Process) -> None:
        """A process reads a message."""
        verdict = process.membership.handle(envelope, self.now)
        for message in verdict.send:
            process.say(message)
        if verdict.lost:
            process.forget_all()
            process.latest = None
        if verdict.deliver:
            self._obey(process, envelope.message)

    def turn(self, process: Process, *, beats: bool = True) -> None:
        """A process's own time: membership and heartbeat."""
        verdict = process.membership.tick(self.now)
        if verdict.lost:
            process.forget_all()
            process.latest = None
        for message in verdict.send:
            process.say(message)
        if beats and process.membership.router and self.now >= process.beat_at:
            process.beat_at = self.now + process.membership.heartbeat
            self.beat(process)

    def beat(self, process: Process) -> None:
        held = [
            msg.AttemptHeld(s.order.request, s.order.attempt, len(s.tokens), s.ended, incomplete=s.short)
            for s in process.sequences.values()
        ] + [msg.AttemptHeld(j.order.request, j.order.attempt, j.position, j.done) for j in process.jobs.values()]
        load = load_of(process.peer)
        beat = msg.Heartbeat(process.membership.heard, load, step_age_ms=process.step_age_ms, attempts=tuple(held))
        process.latest = msg.Envelope(process.peer.incarnation, process.membership.router or "", 0, beat)
        self.send(process.latest)

    def repeat(self, process: Process) -> None:
        """The heart of a process whose main loop hangs."""
        if process.latest is None or process.hung_since is None or self.now < process.beat_at:
            return
        process.beat_at = self.now + process.membership.heartbeat
        age = int((self.now - process.hung_since) * 1_000)
        beat = msgspec.structs.replace(process.latest.message, loop_age_ms=age)
        self.send(msgspec.structs.replace(process.latest, message=beat))

    # --- stores ----------------------------------------------------------------------------------------

    def attached(self, node: str) -> str | None:
        """The store that workers of a node are attached to: the one that was started last, while it lives."""
        stores = [p for p in self.processes.values() if p.peer.role == "store" and p.peer.node == node]
        return stores[-1].peer.incarnation if stores and not stores[-1].stopped else None

    def serving(self, source: msg.PageSource) -> bool:
        process = self.processes.get(source.store)
        return process is not None and not process.stopped

    def seal(self, store: str, chain: list[bytes]) -> None:
        if (batch := self.stores.seal(store, chain)) is not None:
            self.tell(events.KvEvents(batch))

    def answer_snapshots(self) -> None:
        asked, self.asked = self.asked, []
        for holder in asked:
            if (process := self.processes.get(holder)) is not None and not process.stopped:
                self.tell(events.KvSnapshot(holder, self.stores.snapshot(holder)))

    def check_sources(self, process: Process, sources: tuple[msg.PageSource, ...]) -> None:
        """What a worker is told to get pages from are stores of other nodes that serve others."""
        assert len({source.store for source in sources}) == len(sources) <= 3
        for source in sources:
            assert source.endpoint == self.endpoints[source.store] != ""
            assert source.store not in self.of_node(process.peer.node)

    def of_node(self, node: str) -> set[str]:
        return {p.peer.incarnation for p in self.processes.values() if p.peer.node == node}

    # --- workers ----------------------------------------------------------------------------------------

    def _obey(self, process: Process, message: msg.Message) -> None:
        match message:
            case msg.Decode():
                self._decode(process, message)
            case msg.Prefill():
                self._prefill(process, message)
            case msg.Cancel(request=request, attempt=attempt):
                if (s := process.sequences.get(request)) and s.order.attempt == attempt:
                    del process.sequences[request]
                if (j := process.jobs.get(request)) and j.order.attempt == attempt:
                    del process.jobs[request]
            case msg.RouterHeartbeat(attempts=listed):
                for request, s in list(process.sequences.items()):
                    if s.name not in listed:
                        del process.sequences[request]
                for request, j in list(process.jobs.items()):
                    if msg.AttemptName(request, j.order.attempt) not in listed:
                        del process.jobs[request]
            case msg.Resend(request=request, attempt=attempt, position=position):
                s = process.sequences.get(request)
                if s and s.order.attempt == attempt:
                    self._say_scores(process, s, max(position, 1))
                    self._say_tokens(process, s, max(position, s.start))
            case msg.ChangeRole(role=role):
                process.becomes = role
            case _:
                pass

    def _decode(self, process: Process, order: msg.Decode) -> None:
        old = process.sequences.get(order.request)
        if old is not None and old.order.attempt >= order.attempt:
            return
        process.sequences.pop(order.request, None)
        if process.full or len(process.sequences) >= process.slots:
            process.say(msg.Refused(order.request, order.attempt, "busy"))
            return
        tokens = unpack_tokens(order.tokens)
        assert order.prompt <= len(tokens) < order.prompt + order.max_tokens
        self.check_sources(process, order.sources)
        assert not order.prefilled_remotely or len(order.sources) <= 1
        sequence = Sequence(order, tokens, len(tokens), waiting=order.fetch > 0)
        process.sequences[order.request] = sequence
        self.accepted.add(sequence.name)
        process.say(msg.Accepted(order.request, order.attempt, 0))
        if not sequence.waiting:
            self._start(process, sequence)

    def _prefill(self, process: Process, order: msg.Prefill) -> None:
        assert msg.AttemptName(order.request, order.attempt) in self.accepted, (
            "a prefill before its decode was accepted"
        )
        old = process.jobs.get(order.request)
        if old is not None and old.order.attempt >= order.attempt:
            return
        process.jobs.pop(order.request, None)
        if process.full or len(process.jobs) >= process.slots:
            process.say(msg.Refused(order.request, order.attempt, "busy"))
            return
        self.check_sources(process, order.sources)
        process.jobs[order.request] = Job(order, left=1 + len(order.tokens) // 4 // 16)

    def step(self, process: Process) -> None:
        """One step of a worker: a token for everything that runs, one message for all; or a chunk of every prompt."""
        for job in process.jobs.values():
            store = self.attached(process.peer.node)
            if job.done or store is None or not all(map(self.serving, job.order.sources)):
                continue
            job.left -= 1
            job.position += 16
            if job.left <= 0:
                job.done = True
                order, count = job.order, len(job.order.tokens) // 4
                self.seal(store, chain_of(order.root, order.tokens, count // PAGE))
                process.say(msg.Prefilled(order.request, order.attempt, count, 0, 1))
        deltas: list[msg.Delta] = []
        for sequence in process.sequences.values():
            if sequence.waiting:
                self._fetch_on(process, sequence)
            elif not (sequence.waiting or sequence.short or sequence.ended):
                deltas.append(self._generate(sequence))
        if deltas:
            process.say(msg.Tokens(0, tuple(deltas)))

    def _start(self, process: Process, sequence: Sequence, pages: int = 0) -> None:
        process.say(msg.Started(*_named(sequence), 0, pages))
        self._say_scores(process, sequence, 1)

    def _fetch_on(self, process: Process, sequence: Sequence) -> None:
        """Start it once its pages are here. Those that were merely cached somewhere, and are not, are computed."""
        order, store = sequence.order, self.attached(process.peer.node)
        if store is None or not all(map(self.serving, order.sources)):
            return
        chain = chain_of(order.root, order.tokens[: -msg.TOKEN_BYTES], order.fetch)
        if any(self.stores.has(each, chain) for each in (store, *(source.store for source in order.sources))):
            self.seal(store, chain)
            sequence.waiting = False
            self._start(process, sequence, order.fetch)
        elif not order.prefilled_remotely:
            sequence.waiting = False
            self._start(process, sequence)

    def _generate(self, sequence: Sequence) -> msg.Delta:
        position, sampling = len(sequence.tokens), sequence.order.sampling
        token = token_at(sampling.seed, position)
        sequence.tokens.append(token)
        if token in sequence.order.stop_token_ids:
            sequence.finish = "stop"
        elif len(sequence.tokens) - sequence.order.prompt >= sequence.order.max_tokens:
            sequence.finish = "length"
        sequence.ended = sequence.finish is not None
        logprobs = (
            () if sampling.logprobs is None else (msg.TokenLogprob(token, *logprob_at(position, sampling.logprobs)),)
        )
        return msg.Delta(*_named(sequence), position, (token,), logprobs, sequence.finish, 1)  # type: ignore[arg-type]

    def _say_scores(self, process: Process, sequence: Sequence, position: int) -> None:
        """Say the prompt's log-probabilities, if they are wanted, in two messages."""
        order = sequence.order
        if (top := order.sampling.prompt_logprobs) is None:
            return
        scores = [
            msg.PromptTokenLogprob(sequence.tokens[at], *logprob_at(at, top), rank=at)
            for at in range(position, order.prompt)
        ]
        for part in (scores[:7], scores[7:]):
            if part:
                process.say(msg.PromptLogprobs(order.request, order.attempt, position, tuple(part)))
                position += len(part)

    def _say_tokens(self, process: Process, sequence: Sequence, position: int) -> None:
        tokens = tuple(sequence.tokens[position:])
        if tokens or sequence.finish:
            delta = msg.Delta(*_named(sequence), position, tokens, finish=sequence.finish)  # type: ignore[arg-type]
            process.say(msg.Tokens(0, (delta,)))

    def give_up_fetch(self, process: Process, pages: int) -> None:
        """Every fetch that still waits ends short."""
        for sequence in process.sequences.values():
            if sequence.waiting and sequence.order.prefilled_remotely:
                sequence.waiting, sequence.short = False, True
                process.say(msg.FetchIncomplete(*_named(sequence), min(pages, sequence.order.fetch)))

    def fail(self, process: Process, reason: str = "internal") -> None:
        """The worker gives up everything it has."""
        for order in [w.order for w in (*process.sequences.values(), *process.jobs.values())]:
            process.say(msg.AttemptFailed(order.request, order.attempt, reason, "as the test asked"))
        process.forget_all()

    # --- many turns ----------------------------------------------------------------------------------------

    def round(self, seconds: float = 0.02, loss: float = 0.0, lag: float = 0.0) -> None:
        """Run each process once. `loss`: probability that a message is lost (and, as likely, that it comes twice);
        `lag`: that a link delivers nothing more in this round."""
        for process in list(self.processes.values()):
            if process.stopped:
                continue
            if process.hung_since is not None:
                self.repeat(process)
                continue
            self.turn(process)
            self.messages.arrive(process.peer.incarnation, loss, lag)
            self.step(process)
            if process.becomes is not None:
                self.kill(process)
                self.start(process.becomes, process.peer.name, process.peer.node, slots=process.slots)
        self.messages.arrive(self.incarnation, loss, lag)
        self.answer_snapshots()
        self.advance(seconds)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.02)):
            self.round()

    def settle(self, limit: float = 300.0) -> None:
        """No more faults: run until every request has ended, then long enough for heartbeats to repair the rest."""
        deadline = self.now + limit
        while len(self.ended) < len(self.submitted):
            assert self.now < deadline, f"still alive: {set(self.submitted) - set(self.ended)}"
            self.round()
        for process in self.processes.values():
            process.stopped = process.full = False
            process.step_age_ms, process.hung_since = 0, None
        for _ in range(100):
            self.round(0.05)
        for process in self.processes.values():
            assert not process.sequences, process.peer.name
            assert not process.jobs, process.peer.name


def _named(sequence: Sequence) -> tuple[str, int]:
    return sequence.order.request, sequence.order.attempt
