"""The routers that one worker or store works for: to each a link, a sender of heartbeats and a membership of its own.

    router a ⇄ membership a ┐
                            ├──▶ one state, which knows who owns what
    router b ⇄ membership b ┘

Every piece of work has one owner, the incarnation of the router that ordered it. A router speaks for its own work only:
what its heartbeats don't list is dropped if it is its own, and when it falls silent, is replaced or dies, only that is
forgotten. What a process says of a piece of work goes to the owner; how busy it is, to all. Routers never speak to one
another, so none need know how many there are.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from baton.clock import Clock
from baton.logs import RateLimit, RateLimitedLog
from baton.membership import Membership, MembershipChange, RouterLost
from baton.messages import Heartbeat, Hello, Message
from baton.wire import HeartbeatSender, RouterSocket

log = RateLimitedLog(logging.getLogger(__name__), RateLimit(burst=10))

_UNTOLD = 0.25  # seconds between heartbeats, while no router has said how many


class RouterMessage(Struct, frozen=True):
    """A router whose work we do said this."""

    router: str  # incarnation
    message: Any


@dataclass(frozen=True)
class _RouterLink:
    link: RouterSocket[Any]
    heartbeats: HeartbeatSender
    membership: Membership


class RouterLinks:
    """A process's ends of all its links to routers."""

    def __init__(self, endpoints: Sequence[str], hello: Hello, receives: Any, clock: Clock) -> None:
        """Connect to each of `endpoints`; `receives` is the union of messages that may come in, such as `ToDecode`."""
        self._routers = [
            _RouterLink(
                RouterSocket(endpoint, hello.peer, receives),
                HeartbeatSender(endpoint, hello.peer, clock),
                Membership(hello),
            )
            for endpoint in dict.fromkeys(endpoints)
        ]

    @property
    def links(self) -> list[RouterSocket[Any]]:
        """To be polled."""
        return [router.link for router in self._routers]

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of ours to the router that wants most."""
        joined = [router.membership for router in self._routers if router.membership.router is not None]
        return min((membership.heartbeat for membership in joined), default=_UNTOLD)

    @property
    def malformed(self) -> int:
        """Messages dropped because they were none."""
        return sum(router.link.malformed for router in self._routers)

    def receive(self, now: float, paused: float) -> Iterator[RouterMessage | RouterLost]:
        """What has come in of those whose work we do, and which of them have gone. `paused`: seconds by which our own
        loop was held up."""
        for router in self._routers:
            for envelope in router.link.receive():
                verdict = router.membership.handle(envelope, now)
                yield from _follow(router, verdict)
                if verdict.deliver:
                    yield RouterMessage(envelope.sender, envelope.message)
            yield from _follow(router, router.membership.tick(now, paused))

    def say(self, message: Message, incarnation: str) -> None:
        """Tell one router. What is for one that is not there is dropped: the state hears of the loss."""
        for router in self._routers:
            if router.membership.router == incarnation:
                router.link.send(incarnation, message)
                return

    def introduce(self, hello: Hello) -> None:
        """What a Hello says has changed. Tell all routers, those that join later too."""
        for router in self._routers:
            router.membership.hello = hello
        self.tell_all(hello)

    def tell_all(self, message: Message) -> None:
        for router in self._routers:
            if router.membership.router is not None:
                router.link.send(router.membership.router, message)

    def beat(self, heartbeat: Callable[[int, str], Heartbeat], step_started: float | None) -> None:
        """From now on say to every router what `heartbeat` makes of the last sequence heard from it and its
        incarnation. `step_started`: when the running step began (none: idle)."""
        for router in self._routers:
            membership = router.membership
            if membership.router is not None:
                beat = heartbeat(membership.heard, membership.router)
                router.heartbeats.publish(membership.router, beat, membership.heartbeat, step_started)

    def step_ended(self, step_started: float | None) -> None:
        """The step that runs by the last `beat` has ended, and the loop goes on. `step_started`: when the next one
        began, if one runs."""
        for router in self._routers:
            router.heartbeats.step_ended(step_started)

    def close(self) -> None:
        for router in self._routers:
            router.heartbeats.close()
            router.link.close()


def _follow(router: _RouterLink, verdict: MembershipChange) -> Iterator[RouterLost]:
    for message in verdict.send:
        router.link.send("", message)
    if verdict.lost is not None:
        log.warning("lost the router %s at %s; its work is forgotten", verdict.lost, router.link.endpoint)
        router.heartbeats.quiet()
        yield RouterLost(verdict.lost)
