"""A router whose only workers and store are a fuzzer's: they join, are given requests, and answer wrongly.

A token tells the request and the attempt that it was meant for, and whether its sender had that attempt. So a client
can tell if it has got a token of another request, of an older attempt, or of a worker that was not asked. Every request
must end, and at the end of a case the router must have none, and serve a plain one.
"""

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import grpc
import msgspec
import zmq

from baton import messages as msg
from baton.client import Client
from baton.errors import NonFiniteLogits
from baton.v1 import generation_pb2, generation_pb2_grpc
from baton.wire import ClusterKeys
from tests.fuzz import links, wire_messages
from tests.fuzz.case import Case
from tests.fuzz.grpc_api import ANY_REFUSAL
from tests.fuzz.links import RouterLink

_SAYS: dict[str, Any] = {"decode": msg.FromDecode, "prefill": msg.FromPrefill, "store": msg.FromStore}
_CODES = grpc.StatusCode
_ENDINGS = ANY_REFUSAL | {_CODES.UNAVAILABLE, _CODES.DEADLINE_EXCEEDED}  # the latter where a worker says so
_LIMIT = 120.0  # seconds of a request; it ends much earlier
_BEAT = 0.1  # seconds
_TURN = 0.01  # seconds between two looks at the sockets
_POOL = 1_000  # pages of a worker
_CLIENTS = 4  # requests at a time at most
_ATTEMPTS = 8  # tokens below 900 tell of that many
_FOREIGN = 900  # tokens from here on are of a worker that was not asked
_OF_REQUEST = 25  # tokens that tell one request and one attempt


@dataclass
class _Order:
    """An attempt that a worker was given."""

    request: str
    attempt: int
    known: int  # tokens, of the prompt and generated
    prompt: int
    most: int  # tokens that it may generate
    wants: bool  # log-probabilities
    wants_prompt: bool  # those of the prompt
    client: int


@dataclass(eq=False)
class _Worker:
    role: msg.Role
    name: str
    link: RouterLink
    hello: msg.Hello
    orders: dict[tuple[str, int], _Order] = field(default_factory=dict[tuple[str, int], _Order])  # all that ever were
    held: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # not ended, as far as it tells
    joined: bool = False


@dataclass
class _Client:
    """One request of a client, in a thread of its own."""

    number: int
    name: str
    tokens: list[int] = field(default_factory=list[int])
    code: Any = None
    details: str = ""
    reason: str = ""
    whole: bool = False


class FalseWorkers:
    """A prefill worker, two decode workers and a store. Their sockets belong to one thread."""

    threads = 1

    def __init__(self, grpc_address: str, operator: str, endpoint: str, keys: str, card: str) -> None:
        self._keys = ClusterKeys.read_file(Path(keys))
        self._endpoint = endpoint
        self._card = msgspec.structs.replace(msgspec.json.decode(card, type=msg.ModelCard), pool_pages=_POOL)
        self._stub = generation_pb2_grpc.GenerationStub(grpc.insecure_channel(grpc_address))
        self._client = Client(operator=operator)
        self._workers: list[_Worker] = []
        self._beat_at = 0.0
        self._clients: dict[str, _Client] = {}  # by the name of their request
        self._number = 0

    def start(self) -> None:
        roles: list[tuple[msg.Role, str]] = [
            ("store", "store-7"), ("prefill", "prefill-7"), ("decode", "decode-7"), ("decode", "decode-8"),
        ]  # fmt: skip
        self._workers = [self._new(role, name) for role, name in roles]
        self._until(Case(0, "workers", -1), self._all_joined, "a worker is not welcome")

    def run(self, case: Case) -> str:
        rng = case.rng
        self._until(case, self._all_joined, "a worker is not welcome")
        clients = [self._ask(case, number) for number in range(rng.randrange(1, _CLIENTS + 1))]
        lies, until = rng.choice([0.1, 0.5, 0.9]), time.monotonic() + rng.choice([0.1, 0.4, 1.0])
        while time.monotonic() < until and not all(client.code for client in clients):
            self._turn(case, lies)
        for worker in self._workers:  # what the router makes of their attempts is unknown: they end
            self._give_up(worker)
        self._until(case, lambda: all(client.code for client in clients), "a request has no end")
        for client in clients:
            self._check(client)
        self._until(case, self._router_idle, "the router still has a request")
        self._until(case, self._all_joined, "a worker is not welcome")
        good = self._ask(case, 0, plain=True)
        self._until(case, lambda: good.code is not None, "a plain request has no end")
        self._check(good)
        assert good.code is _CODES.OK, f"a plain request got {good.code}: {good.details}"
        assert good.whole, f"a plain request has {len(good.tokens)} tokens"
        self._clients.clear()
        for worker in self._workers:
            worker.orders.clear()
            worker.held.clear()
        return " ".join(sorted({client.code.name for client in clients}))

    # --- clients -----------------------------------------------------------------------------------------------------

    def _ask(self, case: Case, number: int, *, plain: bool = False) -> _Client:
        rng = case.rng
        self._number += 1
        client = _Client(number, f"c{self._number}")
        self._clients[client.name] = client
        length = 20 if plain else rng.choice([1, 5, 17, 40, 200])
        prompt = generation_pb2.TokenIds(ids=[rng.randrange(3, 900) for _ in range(length)])
        request = generation_pb2.GenerateRequest(
            request_id=client.name, token_ids=prompt,
            max_tokens=8 if plain else rng.choice([1, 8, 60]), temperature=0, ignore_eos=True,
        )  # fmt: skip
        if not plain and rng.random() < 0.3:
            request.logprobs = 2
        if not plain and rng.random() < 0.2:
            request.prompt_logprobs = 2
        leaves = None if plain or rng.random() < 0.8 else rng.choice([0.05, 0.5])
        threading.Thread(target=self._stream, args=(client, request, leaves), daemon=True).start()
        return client

    def _stream(self, client: _Client, request: Any, leaves: float | None) -> None:
        """Read a stream to its end, or go away after that many seconds."""
        call: Any = self._stub.Generate(request, timeout=_LIMIT)
        if leaves is not None:
            threading.Timer(leaves, call.cancel).start()
        try:
            for answer in call:
                client.tokens += answer.delta.token_ids
        except grpc.RpcError:
            pass
        client.whole = len(client.tokens) == request.max_tokens
        client.details = call.details() or ""
        client.reason = dict(call.trailing_metadata() or ()).get("baton-reason", "")
        client.code = call.code()  # last: it says that the rest is there

    def _check(self, client: _Client) -> None:
        """Raise AssertionError if a client has got what was not meant for it."""
        refused = client.code is _CODES.INTERNAL and client.reason == NonFiniteLogits.reason
        assert client.code in _ENDINGS or refused, f"a request got {client.code}: {client.details}"
        for word in ("Traceback", "internal error", "object at 0x", 'File "/'):
            assert word not in client.details, f"a request got {client.details}"
        latest = 0
        for token in client.tokens:
            assert token < _FOREIGN, f"a token of a worker that was not asked: {client.tokens}"
            attempt, of = token // 100, token % 100 // _OF_REQUEST
            assert of == client.number, f"a token of request {of} in that of {client.number}: {client.tokens}"
            assert attempt >= latest, f"a token of attempt {attempt} after one of {latest}: {client.tokens}"
            latest = attempt

    def _router_idle(self) -> bool:
        counts = self._client.status(timeout=links.PATIENCE).counts
        return not counts.queued and not counts.running

    # --- workers -----------------------------------------------------------------------------------------------------

    def _new(self, role: msg.Role, name: str) -> _Worker:
        """A process that has not said Hello."""
        me = f"{name}.{random.SystemRandom().randrange(2**48):x}"
        sockets = [
            links.client(zmq.DEALER, self._endpoint, self._keys, identity)
            for identity in (me.encode(), f"{me}/heart".encode())
        ]
        peer = msg.Peer(role, name, "false", me, 2**22 + len(name))
        hello = msg.Hello(peer, model=None if role == "store" else self._card)
        return _Worker(role, name, RouterLink(sockets[0], me, sockets[1]), hello)

    def _all_joined(self) -> bool:
        return all(worker.joined for worker in self._workers)

    def _say(self, worker: _Worker, message: Any, *, heart: bool = False, addressee: str | None = None) -> None:
        to = worker.link.router if addressee is None else addressee
        raw = wire_messages.sealed(worker.link.me, to, worker.link.next_sequence(), message)
        worker.link.say(raw, heart=heart)

    def _until(self, case: Case, condition: Callable[[], bool], what: str) -> None:
        """Go on without a lie until that is so. Raises AssertionError when it is not in time."""
        until = time.monotonic() + links.PATIENCE
        while not condition():
            held = {worker.name: worker.held for worker in self._workers}
            assert time.monotonic() < until, f"{what}; {held}"
            self._turn(case, 0.0)
            time.sleep(_TURN)

    def _turn(self, case: Case, lies: float) -> None:
        if (now := time.monotonic()) >= self._beat_at:
            self._beat_at = now + _BEAT
            for worker in self._workers:
                if not worker.joined:
                    self._say(worker, worker.hello, addressee="")
                elif case.rng.random() >= lies / 4:
                    self._say(worker, self._beat(worker), heart=True)
        for index, worker in enumerate(self._workers):
            for message in worker.link.receive(_TURN / len(self._workers)):
                if not self._hear(case, worker, message, lies):
                    worker.link.close()
                    self._workers[index] = self._new(worker.role, worker.name)
                    break
            for _ in range(case.rng.choice([0, 0, 1, 3]) if worker.joined and case.rng.random() < lies else 0):
                self._lie(case, worker)

    def _beat(self, worker: _Worker) -> msg.Heartbeat:
        attempts = tuple(
            msg.AttemptHeld(request, attempt, worker.orders[request, attempt].known) for request, attempt in worker.held
        )
        load = msg.LoadReport(running=len(attempts), pages_free=_POOL, pages_total=_POOL)
        return msg.Heartbeat(worker.link.heard, load, attempts=attempts)

    def _hear(self, case: Case, worker: _Worker, message: dict[str, Any], lies: float) -> bool:
        """Take a message of the router, and perhaps do as it says. False: the router wants no such process."""
        match message["type"]:
            case "Welcome":
                worker.joined = True
            case "RequestHello":
                worker.joined = False
            case "Rejected":
                return False
            case "Decode" | "Prefill":
                self._order(case, worker, message, lies)
            case "Cancel":
                worker.held.discard((message["request"], message["attempt"]))
            case "RouterHeartbeat":
                listed = {(each["request"], each["attempt"]) for each in message.get("attempts", ())}
                worker.held &= listed
            case "Resend" if case.rng.random() >= lies:
                self._say(worker, msg.AttemptFailed(message["request"], message["attempt"], "internal", "it is lost"))
            case _:
                pass
        return True

    def _order(self, case: Case, worker: _Worker, message: dict[str, Any], lies: float) -> None:
        name = message["request"], message["attempt"]
        sampling = message.get("sampling", {})
        client = self._clients.get(name[0].rpartition("-")[0])
        order = worker.orders[name] = _Order(
            *name, len(message["tokens"]) // msg.TOKEN_BYTES, message.get("prompt", 0), message.get("max_tokens", 0),
            sampling.get("logprobs") is not None, sampling.get("prompt_logprobs") is not None,
            client.number if client else 0,
        )  # fmt: skip
        worker.held.add(name)
        if name[1] >= _ATTEMPTS:  # there are no tokens that tell of more
            self._fail(worker, order, "deadline")
        elif case.rng.random() >= lies:
            self._serve(worker, order)

    def _serve(self, worker: _Worker, order: _Order) -> None:
        name = order.request, order.attempt
        if worker.role == "prefill":
            self._say(worker, msg.Prefilled(*name, computed=order.known, hit=0, stored=0))
            return
        self._say(worker, msg.Accepted(*name))
        self._say(worker, msg.Started(*name))
        if order.wants_prompt and order.prompt > 1:
            scores = tuple(msg.PromptTokenLogprob(1, -1.0) for _ in range(order.prompt - 1))
            self._say(worker, msg.PromptLogprobs(*name, 1, scores))
        count = order.most - (order.known - order.prompt)
        self._tell(worker, order, order.known, count, "length", scored=order.wants)
        worker.held.discard(name)

    def _tell(
        self, worker: _Worker, order: _Order, position: int, count: int, finish: Any = None, *, scored: bool = False
    ) -> None:
        """Say tokens that tell of this request and attempt, and of whether this worker has it."""
        own = (order.request, order.attempt) in worker.orders
        first = order.attempt * 100 + order.client * _OF_REQUEST if own else _FOREIGN
        tokens = tuple(first + index % _OF_REQUEST for index in range(count))
        logprobs = tuple(msg.TokenLogprob(token, -1.0) for token in tokens) if scored else ()
        delta = msg.Delta(
            order.request, order.attempt, position, tokens, logprobs, finish, verified=2, accepted=3, saved=math.nan
        )
        self._say(worker, msg.Tokens(1, (delta,)))

    def _fail(self, worker: _Worker, order: _Order, reason: str = "internal") -> None:
        self._say(worker, msg.AttemptFailed(order.request, order.attempt, reason, "no more"))
        worker.held.discard((order.request, order.attempt))

    def _give_up(self, worker: _Worker) -> None:
        for order in list(worker.orders.values()):
            self._fail(worker, order)

    # --- lies --------------------------------------------------------------------------------------------------------

    def _lie(self, case: Case, worker: _Worker) -> None:
        """Say something of an attempt, this worker's or another's, that is wrong in one way or another."""
        rng = case.rng
        everything = [order for each in self._workers for order in each.orders.values()]
        if not everything:
            return
        order = rng.choice([*list(worker.orders.values())[-4:], *everything[-8:]])
        hints: dict[str, Any] = {
            "request": [order.request], "attempt": [order.attempt, order.attempt, order.attempt + 1, 1],
            "position": [order.known, order.prompt, 0, 1, 2**40], "pages": [0, 1, 99], "device": [0, 99, 2**40],
            "reason": ["busy", "too_large", "internal", "store_gone", "deadline", "invalid_request", "quota", ""],
            "heard": [worker.link.heard, 0, worker.link.heard + 99, 2**62], "attempts": [(), ()], "pin": ["x"],
            "loop_age_ms": [0, 0, 0, 2**40], "step_age_ms": [0, 0, 0, 2**40], "incarnation": ["x"],
        }  # fmt: skip
        match rng.randrange(5):
            case 0 if worker.role == "decode":
                position = rng.choice([order.known, order.known + 1, order.prompt, 0, 2**40])
                finish = rng.choice([None, None, "length", "stop"])
                self._tell(worker, order, position, rng.choice([0, 1, 2, 9, 300]), finish, scored=rng.random() < 0.3)
            case 1:
                self._say(worker, _without_tokens(rng, worker.role, hints))
            case 2 if (order.request, order.attempt) in worker.orders:
                self._serve(worker, order)
            case 3 if rng.random() < 0.1:
                worker.joined = False
                self._say(worker, worker.hello, addressee="")
            case _:
                envelope = (worker.link.me, worker.link.router, worker.link.next_sequence())
                kind = rng.choice(_kinds(worker.role))
                worker.link.say(case.sending(wire_messages.encoded(rng, kind, hints, envelope)), heart=False)


def _kinds(role: msg.Role) -> list[Any]:
    """What a process of that role says, but for tokens, which it must be possible to trace, and Hellos."""
    return [kind for kind in get_args(_SAYS[role]) if kind not in (msg.Tokens, msg.Hello)]


def _without_tokens(rng: random.Random, role: msg.Role, hints: dict[str, Any]) -> Any:
    return wire_messages.valid(rng, rng.choice(_kinds(role)), hints)
