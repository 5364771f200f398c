"""The links of one worker or store to its routers: `baton.router_links` without sockets, with its memberships."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from baton.membership import Membership, MembershipChange, RouterLost
from baton.messages import Envelope, Heartbeat, Hello, Message
from baton.router_links import RouterMessage
from kvstore.events.wire_format import KvEventBatch

_UNTOLD = 0.25  # seconds between heartbeats until a router sets the interval


class RouterEndpoint(Protocol):
    """A router, as workers and stores see it."""

    @property
    def incarnation(self) -> str: ...
    def hear(self, envelope: Envelope[Any], spacing: float) -> None: ...
    def hear_events(self, batch: KvEventBatch) -> None: ...


class MessageNetwork(Protocol):
    """What carries the messages: `simulator.network`, or one that a test controls."""

    def message(self, sender: str, to: str, deliver: Callable[..., object], *words: Any) -> None: ...


RouterAddress: TypeAlias = Callable[[], RouterEndpoint | None]
"""Returns the router that listens at an address now, or None."""


class SimulatedRouterLinks:
    """A process's ends of all its links to routers. A link is known by its index in the list of addresses."""

    def __init__(self, addresses: Sequence[RouterAddress], hello: Hello, network: MessageNetwork) -> None:
        self._me = hello.peer.incarnation
        self._network = network
        self._links = [(address, Membership(hello)) for address in addresses]
        self._sequence = itertools.count(1)
        self.spacing = 0.0  # seconds between the tokens in a message

    @property
    def heartbeat(self) -> float:
        """Seconds between our heartbeats: the shortest interval of all routers."""
        return min((each.heartbeat for _, each in self._links if each.router is not None), default=_UNTOLD)

    def hear(self, place: int, envelope: Envelope[Any], now: float) -> Iterator[RouterMessage | RouterLost]:
        """Take a router's message; yield the resulting events for our state."""
        address, membership = self._links[place]
        verdict = membership.handle(envelope, now)
        yield from self._follow(address, verdict)
        if verdict.deliver:
            yield RouterMessage(envelope.sender, envelope.message)

    def tick(self, now: float) -> Iterator[RouterLost]:
        for address, membership in self._links:
            yield from self._follow(address, membership.tick(now))

    def say(self, message: Message, incarnation: str) -> None:
        """Send a message to one router. It is dropped if the router has gone: the state gets RouterLost."""
        for address, membership in self._links:
            if membership.router == incarnation and (router := address()) is not None:
                if router.incarnation == incarnation:
                    self._post(router, incarnation, message)
                return

    def tell_all(self, message: Message) -> None:
        for _, membership in self._links:
            if membership.router is not None:
                self.say(message, membership.router)

    def beat(self, heartbeat: Callable[[int, str], Heartbeat]) -> None:
        """Send every router `heartbeat(last sequence number from it, its incarnation)`."""
        for _, membership in self._links:
            if membership.router is not None:
                self.say(heartbeat(membership.heard, membership.router), membership.router)

    def _follow(self, address: RouterAddress, verdict: MembershipChange) -> Iterator[RouterLost]:
        for message in verdict.send:
            if (router := address()) is not None:
                self._post(router, "", message)
        if verdict.lost is not None:
            yield RouterLost(verdict.lost)

    def _post(self, router: RouterEndpoint, addressee: str, message: Message) -> None:
        envelope = Envelope(self._me, addressee, next(self._sequence), message)
        self._network.message(self._me, router.incarnation, router.hear, envelope, self.spacing)
