"""A router that a fuzzer is: it welcomes the processes of a group of victims, and gives them orders of any kind."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from baton.messages import AttemptName, Peer, RouterHeartbeat, Welcome
from baton.wire import ClusterKeys
from tests.fuzz import links, wire_messages
from tests.fuzz.case import Case

START = 240.0  # seconds in which the processes load their models and say Hello
_BEAT, _SILENCE = 100, 10_000  # milliseconds


@dataclass
class Member:
    """A process that has said Hello."""

    incarnation: str
    role: str
    name: str
    sequence: int = 0  # of the last message to it
    beat: dict[str, Any] = field(default_factory=dict[str, Any])  # its last heartbeat
    attempts: set[AttemptName] = field(default_factory=set[AttemptName])  # that it may have, as the router sees it

    def idle_since(self, sequence: int) -> bool:
        """Whether it has read all up to that message, and has no work."""
        load = self.beat.get("load", {"running": 1})
        busy = load.get("running", 0) or load.get("waiting", 0) if self.role != "store" else 0
        return self.beat.get("heard", 0) >= sequence and not busy and not self.beat.get("attempts")


class FalseRouter:
    """One router's socket. It belongs to one thread."""

    def __init__(self, endpoint: str, keys: ClusterKeys, processes: int) -> None:
        self._socket, _ = links.listening(zmq.ROUTER, keys, endpoint)
        self.me = f"fuzz-router.{secrets.token_hex(8)}"
        self.members: dict[str, Member] = {}  # by incarnation
        self._processes = processes
        self._beat_at = 0.0
        self.heard: Callable[[str, Mapping[str, Any]], None] = lambda incarnation, message: None
        """Called for every message but Hellos and heartbeats."""

    @property
    def complete(self) -> bool:
        return len(self.members) == self._processes

    def joined(self) -> None:
        """Wait until every process is there. Raises AssertionError if one is not."""
        self.until(lambda: self.complete, START, "a process said no Hello")

    @property
    def by_name(self) -> list[Member]:
        return sorted(self.members.values(), key=lambda member: member.name)

    def say(self, member: Member, message: Any) -> bytes:
        raw = wire_messages.sealed(self.me, member.incarnation, self.next(member), message)
        self.send(member, raw)
        return raw

    def send(self, member: Member, raw: bytes) -> None:
        self._socket.send_multipart([member.incarnation.encode(), raw])

    def next(self, member: Member) -> int:
        member.sequence += 1
        return member.sequence

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Go on until that is so. Raises AssertionError when it is not in time."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{what}: {self.members}"
            self.pump(0.05)

    def pump(self, seconds: float) -> None:
        """Read what the processes say, and send them heartbeats."""
        if (now := time.monotonic()) >= self._beat_at:
            self._beat_at = now + _BEAT / 1_000
            for member in self.members.values():
                self.say(member, RouterHeartbeat(tuple(member.attempts)))
        until = now + seconds
        while self._socket.poll(max(0, int((until - time.monotonic()) * 1_000))):
            _, body = self._socket.recv_multipart()
            sender, _, _, message = msgspec.msgpack.decode(body)
            if message["type"] == "Hello":
                self._joins(sender, message["peer"])
            elif (member := self.members.get(sender)) is not None:
                if message["type"] == "Heartbeat":
                    member.beat = message
                else:
                    self.heard(sender, message)

    def _joins(self, incarnation: str, peer: dict[str, Any]) -> None:
        gone = [known for known, member in self.members.items() if member.name == peer["name"] and known != incarnation]
        for known in gone:
            del self.members[known]
        member = self.members.setdefault(incarnation, Member(incarnation, peer["role"], peer["name"]))
        self.say(member, Welcome(Peer("router", "fuzz", "victims", self.me, 1), _BEAT, _SILENCE))


def order(case: Case, router: FalseRouter, member: Member, message: Any) -> None:
    """Send a message, and note it in the case."""
    case.sending(router.say(member, message))
