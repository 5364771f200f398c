"""A router process around its real state, without sockets and without the gRPC server."""

from collections.abc import Sequence
from typing import Any, Protocol

from baton.clock import Tick
from baton.config import Config
from baton.messages import Envelope, Peer, Snapshot
from kvstore.events.wire_format import KvEventBatch
from router.events import KvEvents, KvSnapshot, MessageReceived, RequestEnded
from router.generation_request import GenerationRequest
from router.placement.policy import PlacementPolicy
from router.queueing.admission import ModelLimits
from router.state import RouterState
from simulator.clock import Agenda
from simulator.network import SimulatedNetwork
from simulator.router_shell import RouterShell


class Clients(Protocol):
    """The clients of a router, which get the tokens and ends of requests."""

    def tokens(self, request: str, tokens: Sequence[int], spacing: float) -> None:
        """Take tokens. Each but the first was generated `spacing` seconds after the one before."""
        ...

    def request_ended(self, end: RequestEnded) -> None: ...


class SimulatedRouter(RouterShell):
    """One router process."""

    def __init__(
        self, place: int, peer: Peer, config: Config, limits: ModelLimits, placer: PlacementPolicy | None,
        agenda: Agenda, network: SimulatedNetwork, clients: Clients,
    ) -> None:  # fmt: skip
        """`place`: index of its address in the list that workers and stores get."""
        super().__init__(peer, RouterState(peer, config, limits, placer))
        self.place = place
        self._agenda, self._network, self._clients = agenda, network, clients
        self._tick = config.cluster.heartbeat_ms / 5_000
        self._spacing = 0.0  # seconds between the tokens in the message that is handled

    @property
    def now(self) -> float:
        return self._agenda.now

    def submit(self, submit: GenerationRequest) -> None:
        self.tell(submit)

    def hear(self, envelope: Envelope[Any], spacing: float) -> None:
        """Take a message of a worker or store. The tokens in it were generated `spacing` seconds apart."""
        self._spacing = spacing
        self.tell(MessageReceived(envelope))
        self._spacing = 0.0

    def hear_events(self, batch: KvEventBatch) -> None:
        self.tell(KvEvents(batch))

    def hear_snapshot(self, holder: str, part: Snapshot) -> None:
        self.tell(KvSnapshot(holder, part))

    def tick(self) -> float:
        """Handle a Tick; return the seconds until the next one."""
        self.tell(Tick())
        return self._tick

    # --- for the shell ----------------------------------------------------------------------------------------------

    def post(self, envelope: Envelope[Any]) -> None:
        to = envelope.addressee
        if (process := self._network.process(to)) is not None:
            self._network.message(self.incarnation, to, process.receive_from_router, self.place, envelope)

    def emit(self, request: str, tokens: Sequence[int]) -> None:
        self._clients.tokens(request, tokens, self._spacing)

    def end_request(self, end: RequestEnded) -> None:
        self._clients.request_ended(end)

    def follow(self, holder: str) -> None:
        if (process := self._network.process(holder)) is not None:
            process.followers[self.incarnation] = self

    def unfollow(self, holder: str) -> None:
        if (process := self._network.process(holder)) is not None:
            process.followers.pop(self.incarnation, None)

    def ask_snapshot(self, holder: str) -> None:
        self._network.message(self.incarnation, holder, self._snapshot, holder)

    def _snapshot(self, holder: str) -> None:
        """Answer a snapshot request that has reached the holder."""
        for part in self._network.process(holder).snapshot():
            self._network.message(holder, self.incarnation, self.hear_snapshot, holder, part)
