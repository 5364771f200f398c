"""A router process around its real state, without sockets and without the gRPC server."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

from baton.clock import Tick
from baton.config import Config
from baton.messages import Envelope, Peer, Snapshot
from kvstore.events.wire_format import KvEventBatch
from router.events import (
    AskSnapshot,
    Emit,
    ForgetPeer,
    KvEvents,
    KvSnapshot,
    MessageReceived,
    RequestEnded,
    RouterEvent,
    SendMessage,
    Submit,
    Subscribe,
    Unsubscribe,
)
from router.placement.policy import PlacementPolicy
from router.queueing.admission import ModelLimits
from router.state import RouterState
from simulator.clock import Agenda
from simulator.network import SimulatedNetwork


class Clients(Protocol):
    """The clients of a router, which get the tokens and ends of requests."""

    def tokens(self, request: str, count: int, spacing: float) -> None:
        """Take tokens. Each but the first was generated `spacing` seconds after the one before."""
        ...

    def ended(self, end: RequestEnded) -> None: ...


class SimulatedRouter:
    """One router process."""

    def __init__(
        self, place: int, peer: Peer, config: Config, limits: ModelLimits, placer: PlacementPolicy | None,
        agenda: Agenda, network: SimulatedNetwork, clients: Clients,
    ) -> None:  # fmt: skip
        """`place`: index of its address in the list that workers and stores get."""
        self.place, self.peer = place, peer
        self.state = RouterState(peer, config, limits, placer)
        self.incarnation = peer.incarnation
        self._agenda, self._network, self._clients = agenda, network, clients
        self._tick = config.cluster.heartbeat_ms / 5_000
        self._sent: dict[str, int] = defaultdict(int)  # sequence number of the last message to each peer

    def submit(self, submit: Submit) -> None:
        self._handle(submit)

    def hear(self, envelope: Envelope[Any], spacing: float) -> None:
        """Take a message of a worker or store. The tokens in it were generated `spacing` seconds apart."""
        self._handle(MessageReceived(envelope), spacing)

    def hear_events(self, batch: KvEventBatch) -> None:
        self._handle(KvEvents(batch))

    def hear_snapshot(self, holder: str, part: Snapshot) -> None:
        self._handle(KvSnapshot(holder, part))

    def tick(self) -> float:
        """Handle a Tick; return the seconds until the next one."""
        self._handle(Tick())
        return self._tick

    def _handle(self, event: RouterEvent, spacing: float = 0.0) -> None:
        for command in self.state.handle(event, self._agenda.now):
            match command:
                case SendMessage(incarnation=to, message=message):
                    self._sent[to] += 1
                    if (process := self._network.process(to)) is not None:
                        envelope = Envelope(self.incarnation, to, self._sent[to], message)
                        self._network.message(self.incarnation, to, process.receive_from_router, self.place, envelope)
                case Emit(request=request, tokens=tokens):
                    self._clients.tokens(request, len(tokens), spacing)
                case RequestEnded():
                    self._clients.ended(command)
                case Subscribe(incarnation=holder):
                    if (process := self._network.process(holder)) is not None:
                        process.followers[self.incarnation] = self
                case AskSnapshot(incarnation=holder):
                    self._network.message(self.incarnation, holder, self._snapshot, holder)
                case Unsubscribe(incarnation=holder):
                    if (process := self._network.process(holder)) is not None:
                        process.followers.pop(self.incarnation, None)
                case ForgetPeer(incarnation=stranger):
                    del self._sent[stranger]
                case _:  # log lines, and pins, which no simulated client requests
                    pass

    def _snapshot(self, holder: str) -> None:
        """Answer a snapshot request that has reached the holder."""
        for part in self._network.process(holder).snapshot():
            self._network.message(holder, self.incarnation, self.hear_snapshot, holder, part)
