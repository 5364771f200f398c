"""A router that orders anything of workers and a store: mutated messages of `ToDecode`, `ToPrefill` and `ToStore`.

After each case the process must read on, drop all work that the router does not list, and say so in its heartbeats. A
store keeps pins until the router ends them.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton.messages import (
    KEY_BYTES,
    PROTOCOL_VERSION,
    Decode,
    Peer,
    Prefill,
    RouterHeartbeat,
    SamplingParams,
    ToDecode,
    ToPrefill,
    ToStore,
    UnpinPages,
    Welcome,
)
from baton.wire import ClusterKeys
from kvstore.keys import pack_tokens
from tests.fuzz import links, wire_messages
from tests.fuzz.case import Case

_HEARS: dict[str, Any] = {"decode": ToDecode, "prefill": ToPrefill, "store": ToStore}
_START = 90.0  # seconds in which the processes load their models and say Hello
_BEAT, _SILENCE = 100, 3_000  # milliseconds


@dataclass
class _Member:
    role: str
    name: str
    sequence: int = 0
    beat: dict[str, Any] = field(default_factory=dict[str, Any])  # the last


class RouterOrders:
    """The router of the victims. Its socket belongs to one thread."""

    threads = 1

    def __init__(self, endpoint: str, keys: str, processes: int) -> None:
        self._socket, _ = links.listening(zmq.ROUTER, ClusterKeys.read(Path(keys)), endpoint)
        self._me = f"fuzz-router.{secrets.token_hex(8)}"
        self._members: dict[str, _Member] = {}  # by incarnation
        self._processes = processes
        self._beat_at = 0.0

    def run(self, case: Case) -> str:
        self._until(lambda: len(self._members) == self._processes, _START, "a process said no Hello")
        rng = case.rng
        incarnation = rng.choice(sorted(self._members, key=lambda each: self._members[each].name))
        member = self._members[incarnation]
        for _ in range(rng.choice([1, 3, 10])):
            self._order(case, incarnation, member)
            if rng.random() < 0.3:
                self._pump(0.02)
        last = member.sequence
        self._until(lambda: self._rests(incarnation, last), links.PATIENCE, f"{member.name} does not come to rest")
        return member.role

    def _order(self, case: Case, incarnation: str, member: _Member) -> None:
        """Send one message, valid or not."""
        rng = case.rng
        if member.role in ("decode", "prefill") and rng.random() < 0.5:
            kind = Decode if member.role == "decode" else Prefill
            message: Any = wire_messages.valid(rng, kind, self._hints(rng))
            raw = wire_messages.sealed(self._me, incarnation, self._next(member), message)
        else:
            envelope = (self._me, incarnation, self._next(member))
            raw = wire_messages.encoded(rng, _HEARS[member.role], self._hints(rng), envelope)
        self._socket.send_multipart([incarnation.encode(), case.sending(raw)])

    def _hints(self, rng: random.Random) -> dict[str, Any]:
        tokens = [rng.randrange(1_000) for _ in range(rng.choice([1, 2, 16, 17, 33, 100]))]
        packed = bytes(pack_tokens(tokens))
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), logprobs=rng.choice([None, 3]))
        return {
            "request": [f"r-{rng.randrange(6)}"], "attempt": [1, 1, 2], "root": [b"r" * KEY_BYTES],
            "tokens": [packed, packed, packed, packed[:-1], b"", packed + b"\xff" * 4],
            "prompt": [len(tokens), len(tokens), 1, len(tokens) + 1, 2**40], "max_tokens": [1, 4, 20, 2**40],
            "fetch": [0, 0, 1, len(tokens) // 16, 2**30], "sampling": [sampling, sampling],
            "sources": [(), ()], "deadline_ms": [None, 1, 10_000], "position": [0, 1, len(tokens), 2**40],
            "mark": ["ab"], "steps": [1, 10], "pin": ["p", "q"], "keys": [rng.randbytes(KEY_BYTES * 3), b"k" * 5],
            "protocol": [PROTOCOL_VERSION], "heartbeat_ms": [_BEAT],
            "heartbeat_timeout_ms": [_SILENCE], "attempts": [()],
        }  # fmt: skip

    def _next(self, member: _Member) -> int:
        member.sequence += 1
        return member.sequence

    # --- what the processes say --------------------------------------------------------------------------------------

    def _rests(self, incarnation: str, last: int) -> bool:
        """Whether a process has read all up to that message, and has no work; or is another incarnation now."""
        member = self._members.get(incarnation)
        if member is None:
            return len(self._members) == self._processes
        for pin in member.beat.get("attempts", ()) if member.role == "store" else ():
            self._say(incarnation, member, UnpinPages(pin["request"]))
        load = member.beat.get("load", {"running": 1})
        busy = load.get("running", 0) or load.get("waiting", 0) if member.role != "store" else 0
        return member.beat.get("heard", 0) >= last and not busy and not member.beat.get("attempts")

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{what}: {self._members}"
            self._pump(0.05)

    def _pump(self, seconds: float) -> None:
        """Read what the processes say, and send them heartbeats that list no work."""
        if (now := time.monotonic()) >= self._beat_at:
            self._beat_at = now + _BEAT / 1_000
            for incarnation, member in self._members.items():
                self._say(incarnation, member, RouterHeartbeat())
        until = now + seconds
        while self._socket.poll(max(0, int((until - time.monotonic()) * 1_000))):
            _, body = self._socket.recv_multipart()
            sender, _, _, message = msgspec.msgpack.decode(body)
            if message["type"] == "Hello":
                self._joins(sender, message["peer"])
            elif message["type"] == "Heartbeat" and sender in self._members:
                self._members[sender].beat = message

    def _joins(self, incarnation: str, peer: dict[str, Any]) -> None:
        gone = [
            known for known, member in self._members.items() if member.name == peer["name"] and known != incarnation
        ]
        for known in gone:
            del self._members[known]
        member = self._members.setdefault(incarnation, _Member(peer["role"], peer["name"]))
        self._say(incarnation, member, Welcome(Peer("router", "fuzz", "victims", self._me, 1), _BEAT, _SILENCE))

    def _say(self, incarnation: str, member: _Member, message: Any) -> None:
        raw = wire_messages.sealed(self._me, incarnation, self._next(member), message)
        self._socket.send_multipart([incarnation.encode(), raw])
