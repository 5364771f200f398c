"""Processes that follow the protocol, without engines and pages: a page is its key.

They join through the real `baton.membership`. Prefill workers seal pages in the store of their node and hold them
there. Decode workers get them from the store of theirs, which fetches them from the sources that the router names. If a
store that pages must pass has gone, a worker waits for them for ever: the router must notice. Stores pin pages, and
evict others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton import messages as msg
from baton.membership import Membership
from kvstore.events.wire_format import BlockStored, KvEventBatch
from kvstore.keys import START, split_keys, unpack_tokens
from router import events
from tests.router import model
from tests.router.model import PAGE, PAGE_BYTES, chain_of, load_of, logprob_at


@dataclass
class DecodeSequence:
    """One attempt, as a decode worker has it."""

    order: msg.Decode
    tokens: list[int]  # of the prompt, too
    start: int
    waiting: bool  # for pages
    short: bool = False
    ended: bool = False
    finish: Any = None


@dataclass
class Job:
    """One prompt, as a prefill worker has it."""

    order: msg.Prefill
    left: int  # steps
    done: bool = False
    position: int = 0


class Process:
    """A process, with the work of a worker of either role."""

    def __init__(self, cluster: Any, hello: msg.Hello, slots: int) -> None:
        """`cluster`: the `tests.router.cluster.Cluster` that it is part of."""
        self.cluster, self.peer, self.slots = cluster, hello.peer, slots
        self.membership = Membership(hello)
        self.sequences: dict[str, DecodeSequence] = {}
        self.jobs: dict[str, Job] = {}
        self.stopped = self.full = False
        self.sent = 0
        self.beat_at = 0.0
        self.step_age_ms = 0
        self.hung_since: float | None = None  # its main loop stands still, and its heart repeats
        self.latest: msg.Envelope[msg.Heartbeat] | None = None  # what that would be
        self.becomes: msg.WorkerRole | None = None

    def say(self, message: msg.Message) -> None:
        addressee = "" if isinstance(message, msg.Hello) else (self.membership.router or "")
        self.sent += 1
        self.cluster.send(msg.Envelope(self.peer.incarnation, addressee, self.sent, message))

    def take(self, envelope: msg.Envelope[Any]) -> None:
        if self._follow(self.membership.handle(envelope, self.cluster.now)).deliver:
            self.obey(envelope.message)

    def turn(self) -> None:
        self._follow(self.membership.tick(self.cluster.now))
        if self.membership.router and self.cluster.now >= self.beat_at:
            self.beat_at = self.cluster.now + self.membership.heartbeat
            self.beat()

    def _follow(self, verdict: Any) -> Any:
        for message in verdict.send:
            self.say(message)
        if verdict.lost:
            self.keep(lambda request, attempt: False)
            self.latest = None
        return verdict

    def keep(self, wants: Callable[[str, int], bool]) -> None:
        """Forget the other attempts."""
        for works in (self.sequences, self.jobs):
            for request, work in list(works.items()):
                if not wants(request, work.order.attempt):
                    del works[request]

    def beat(self) -> None:
        beat = msg.Heartbeat(
            self.membership.heard, load_of(self.peer), step_age_ms=self.step_age_ms, attempts=self.attempts()
        )
        self.latest = msg.Envelope(self.peer.incarnation, self.membership.router or "", 0, beat)
        self.cluster.send(self.latest)

    def repeat(self) -> None:
        """The heart of a process whose main loop hangs."""
        if self.latest is None or self.hung_since is None or self.cluster.now < self.beat_at:
            return
        self.beat_at = self.cluster.now + self.membership.heartbeat
        age = int((self.cluster.now - self.hung_since) * 1_000)
        beat = msgspec.structs.replace(self.latest.message, loop_age_ms=age)
        self.cluster.send(msgspec.structs.replace(self.latest, message=beat))

    def attempts(self) -> tuple[msg.AttemptHeld, ...]:
        sequences, jobs = self.sequences.values(), self.jobs.values()
        return (
            *(msg.AttemptHeld(*_name(each), len(each.tokens), each.ended, incomplete=each.short) for each in sequences),
            *(msg.AttemptHeld(*_name(job), job.position, job.done) for job in jobs),
        )

    # --- orders -----------------------------------------------------------------------------------------------------

    def obey(self, message: msg.Message) -> None:
        match message:
            case msg.Decode():
                self._decode(message)
            case msg.Prefill():
                self._prefill(message)
            case msg.Cancel():
                self.keep(lambda request, attempt: (request, attempt) != (message.request, message.attempt))
            case msg.RouterHeartbeat(attempts=listed):
                self.keep(lambda request, attempt: msg.AttemptName(request, attempt) in listed)
            case msg.Resend(request=request, attempt=attempt, position=position):
                sequence = self.sequences.get(request)
                if sequence and sequence.order.attempt == attempt:
                    self._say_scores(sequence, max(position, 1))
                    self._say_tokens(sequence, max(position, sequence.start))
            case msg.ChangeRole(role=role):
                self.becomes = role
            case _:
                pass

    def _decode(self, order: msg.Decode) -> None:
        if not self._is_new(order, self.sequences):
            return
        tokens = unpack_tokens(order.tokens)
        assert order.prompt <= len(tokens) < order.prompt + order.max_tokens
        self._check_sources(order.sources)
        assert not order.prefilled_remotely or len(order.sources) <= 1
        sequence = self.sequences[order.request] = DecodeSequence(order, tokens, len(tokens), waiting=order.fetch > 0)
        self.cluster.accepted.add(_name(sequence))
        self.say(msg.Accepted(*_name(sequence), 0))
        if not sequence.waiting:
            self._start(sequence)

    def _prefill(self, order: msg.Prefill) -> None:
        pin = order.request.startswith(events.PIN)
        accepted = (order.request, order.attempt) in self.cluster.accepted
        assert pin or accepted, "a prefill before its decode was accepted"
        if not self._is_new(order, self.jobs):
            return
        self._check_sources(order.sources)
        if pin and self.store is None:
            self._fail(order, "store_gone")
        else:
            self.jobs[order.request] = Job(order, left=1 + len(order.tokens) // 4 // 16)

    def _is_new(self, order: msg.Decode | msg.Prefill, works: dict[str, Any]) -> bool:
        """Forget an earlier attempt, and refuse the new one if there is no room."""
        if order.request in works and works[order.request].order.attempt >= order.attempt:
            return False
        works.pop(order.request, None)
        room = not self.full and len(works) < self.slots
        if not room:
            self.say(msg.Refused(order.request, order.attempt, "busy"))
        return room

    def _check_sources(self, sources: Sequence[msg.PageSource]) -> None:
        """A worker gets pages from stores of other nodes that serve others."""
        assert len({source.store for source in sources}) == len(sources) <= 3
        for source in sources:
            assert source.endpoint == self.cluster.endpoints[source.store] != ""
            store = self.cluster.processes.get(source.store)
            assert store is None or store.peer.node != self.peer.node

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        return self.cluster.store_of(self.peer.node)

    def _stores(self, sources: Sequence[msg.PageSource]) -> list[Store]:
        """Return the store of this node and those sources; none if one of them does not serve."""
        stores = [self.store, *(self.cluster.processes.get(source.store) for source in sources)]
        serving = [store for store in stores if isinstance(store, Store) and not store.stopped]
        return serving if len(serving) == len(stores) else []

    def step(self) -> None:
        """Make a step: a token for everything that runs, one message for all; or a chunk of every prompt."""
        for job in list(self.jobs.values()):
            self._compute(job)
        deltas: list[msg.Delta] = []
        for sequence in self.sequences.values():
            if sequence.waiting:
                self._fetch_on(sequence)
            elif not (sequence.short or sequence.ended):
                deltas.append(self._generate(sequence))
        if deltas:
            self.say(msg.Tokens(0, tuple(deltas)))

    def _compute(self, job: Job) -> None:
        """Compute a chunk of a prompt. Its pages are held by the node's store while this worker knows of it."""
        order, owner = job.order, (self.peer.incarnation, job.order.request)
        if job.done:
            if order.request.startswith(events.PIN) and (self.store is None or owner not in self.store.holds):
                del self.jobs[order.request]
                self._fail(order, "store_gone")
        elif stores := self._stores(order.sources):
            job.left -= 1
            job.position += 16
            if job.left <= 0:
                job.done = True
                count = len(order.tokens) // msg.TOKEN_BYTES
                stores[0].holds[owner] = stores[0].seal(chain_of(order.root, order.tokens, count // PAGE))
                self.say(msg.Prefilled(*_name(job), count, 0, 1))

    def _fetch_on(self, sequence: DecodeSequence) -> None:
        """Start it once its pages are here. Those that were merely cached somewhere, and are not, are computed."""
        order = sequence.order
        if stores := self._stores(order.sources):
            chain = chain_of(order.root, order.tokens[: -msg.TOKEN_BYTES], order.fetch)
            if any(store.pages.keys() >= set(chain) for store in stores):
                stores[0].seal(chain)
                self._start(sequence, order.fetch)
            elif not order.prefilled_remotely:
                self._start(sequence)

    def _start(self, sequence: DecodeSequence, pages: int = 0) -> None:
        sequence.waiting = False
        self.say(msg.Started(*_name(sequence), 0, pages))
        self._say_scores(sequence, 1)

    def _generate(self, sequence: DecodeSequence) -> msg.Delta:
        position, sampling = len(sequence.tokens), sequence.order.sampling
        token = model.token_at(sampling.seed, position)
        sequence.tokens.append(token)
        if token in sequence.order.stop_token_ids:
            sequence.finish = "stop"
        elif len(sequence.tokens) - sequence.order.prompt >= sequence.order.max_tokens:
            sequence.finish = "length"
        sequence.ended = sequence.finish is not None
        top = sampling.logprobs
        logprobs = () if top is None else (msg.TokenLogprob(token, *logprob_at(position, top)),)
        return msg.Delta(*_name(sequence), position, (token,), logprobs, sequence.finish, 1)

    def _say_scores(self, sequence: DecodeSequence, position: int) -> None:
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
                self.say(msg.PromptLogprobs(*_name(sequence), position, tuple(part)))
                position += len(part)

    def _say_tokens(self, sequence: DecodeSequence, position: int) -> None:
        tokens = tuple(sequence.tokens[position:])
        if tokens or sequence.finish:
            self.say(msg.Tokens(0, (msg.Delta(*_name(sequence), position, tokens, finish=sequence.finish),)))

    # --- faults -----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """End what is wrong with it."""
        self.stopped = self.full = False
        self.step_age_ms, self.hung_since = 0, None

    def give_up_fetch(self, pages: int) -> None:
        """End every fetch that still waits short."""
        for sequence in self.sequences.values():
            if sequence.waiting and sequence.order.prefilled_remotely:
                sequence.waiting, sequence.short = False, True
                self.say(msg.FetchIncomplete(*_name(sequence), min(pages, sequence.order.fetch)))

    def fail(self, reason: str = "internal") -> None:
        for work in (*self.sequences.values(), *self.jobs.values()):
            self._fail(work.order, reason)
        self.keep(lambda request, attempt: False)

    def _fail(self, order: msg.Decode | msg.Prefill, reason: str) -> None:
        self.say(msg.AttemptFailed(order.request, order.attempt, reason, "as the test has it"))  # type: ignore[arg-type]


@dataclass
class StorePin:
    order: msg.PinPages
    expires: float


class Store(Process):
    """A store. Its pages are their keys."""

    def __init__(self, cluster: Any, hello: msg.Hello, slots: int) -> None:
        super().__init__(cluster, hello, slots)
        self.pages: dict[bytes, bytes] = {}  # each with the one before it, parents first
        self.batches = 0  # of KV events
        self.holds: dict[tuple[str, str], list[bytes]] = {}  # by worker and request
        self.pins: dict[str, StorePin] = {}

    def seal(self, chain: list[bytes]) -> list[bytes]:
        """Have the pages of a chain from now on, and publish that."""
        new = [link for link in zip(chain, [START, *chain[:-1]], strict=True) if link[0] not in self.pages]
        if new:
            self.pages |= new
            self.batches += 1
            event = BlockStored(tuple(key for key, _ in new), new[0][1] or None, (), PAGE, None, "CPU", None)
            self.cluster.tell(events.KvEvents(KvEventBatch(self.peer.incarnation, self.batches, (event,))))
        return chain

    def snapshot(self) -> msg.Snapshot:
        runs = tuple(msg.PageSegment(parent, key, "CPU") for key, parent in self.pages.items())
        return msg.Snapshot(self.batches, runs)

    def evict(self) -> None:
        """Evict the pages that no job and no pin keeps. The event of that never arrives."""
        chains = [*self.holds.values(), *(split_keys(pin.order.keys) for pin in self.pins.values())]
        safe = {key for chain in chains for key in chain}
        self.pages = {key: parent for key, parent in self.pages.items() if key in safe}

    def attempts(self) -> tuple[msg.AttemptHeld, ...]:
        here = {name: sum(map(self.pages.__contains__, split_keys(pin.order.keys))) for name, pin in self.pins.items()}
        return tuple(msg.AttemptHeld(name, 1, pages) for name, pages in here.items())

    def obey(self, message: msg.Message) -> None:
        match message:
            case msg.PinPages():
                self.say(self._pin(message))
            case msg.UnpinPages(pin=pin):
                self.pins.pop(pin, None)
            case _:
                pass

    def _pin(self, order: msg.PinPages) -> msg.PagesPinned:
        keys = split_keys(order.keys)
        here = next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))
        if here < len(keys):
            return msg.PagesPinned(order.pin, here, "missing")
        others = [each.order for name, each in self.pins.items() if name != order.pin]
        all_keys = {key for each in others if each.tenant == order.tenant for key in split_keys(each.keys)} | set(keys)
        if len(all_keys) * PAGE_BYTES > self.cluster.config.store.pin_bytes:
            return msg.PagesPinned(order.pin, 0, "quota")
        self.pins[order.pin] = StorePin(order, self.cluster.now + order.ttl_ms / 1_000)
        return msg.PagesPinned(order.pin, len(keys))

    def step(self) -> None:
        """End pins whose time is over, and what is held for prompts that their workers have forgotten."""
        processes = self.cluster.processes
        self.holds = {
            (worker, request): chain
            for (worker, request), chain in self.holds.items()
            if worker in processes and request in processes[worker].jobs
        }
        self.pins = {name: pin for name, pin in self.pins.items() if self.cluster.now < pin.expires}


def _name(work: DecodeSequence | Job) -> tuple[str, int]:
    return work.order.request, work.order.attempt
