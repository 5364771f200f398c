"""How a worker or store belongs to a router: Hello, Welcome, heartbeats both ways, silence, a replaced router. A
process that works for several routers has one membership of each (`baton.router_links`). Routers do not know each
other.

    (unknown) ──Hello──▶ ──Welcome──▶ joined ──router silent, or another incarnation of it speaks──▶ (unknown)

Pure: time comes with every call, and messages to send come back. A router that is gone loses everything it held here,
so both calls tell when to drop its work. The work of other routers is not concerned.
"""

from msgspec import Struct

from baton.errors import BatonError, from_reason
from baton.messages import Envelope, Hello, Message, Rejected, RequestHello, Welcome

_HELLO_AGAIN = 1.0  # seconds between two Hellos without an answer


class SendToRouter(Struct, frozen=True):
    """A state's command: send this to the router that owns what it is about."""

    message: Message
    router: str = ""  # incarnation; empty where no router has a name, as in a test of one state


class RouterLost(Struct, frozen=True):
    """A router whose work we do is gone, or has been replaced: what it owns is to be forgotten."""

    router: str = ""  # incarnation


class MembershipChange(Struct, frozen=True):
    """What a call changed. `lost`: the incarnation of the router that is gone; forget its work.
    `deliver`: the message is from our router and meant for the state behind."""

    send: tuple[Message, ...] = ()
    lost: str | None = None
    deliver: bool = False


class Membership:
    """Which incarnation of one router this process works for, and since when it has been silent."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.router: str | None = None  # incarnation, once welcomed
        self.heard = 0  # the last sequence heard from it
        self.heartbeat = 0.25  # seconds
        self._silence = 5.0  # seconds
        self._last_heard = 0.0
        self._next_hello = float("-inf")
        self.rejected: BatonError | None = None  # why the router will not have us

    def handle(self, envelope: Envelope[Message], now: float) -> MembershipChange:
        """Take an envelope that is addressed to this incarnation."""
        match envelope.message:
            case Welcome(router=router) if router.incarnation != envelope.sender:
                return MembershipChange()  # words in the name of another router: its silence would never end
            case Welcome(router=router, heartbeat_ms=heartbeat_ms, heartbeat_timeout_ms=heartbeat_timeout_ms):
                lost = self.router if self.router != router.incarnation else None
                self.router, self.heard = router.incarnation, envelope.sequence
                self.heartbeat, self._silence = heartbeat_ms / 1_000, heartbeat_timeout_ms / 1_000
                self._last_heard, self.rejected = now, None
                return MembershipChange(lost=lost)
            case Rejected(reason=reason, message=message):
                self.rejected = from_reason(reason, message)
                return MembershipChange(lost=self._leave())
            case RequestHello():
                # It has forgotten us or is new: either way it owns nothing of what we hold.
                lost = self._leave()
                self._next_hello = now + _HELLO_AGAIN
                return MembershipChange(send=(self.hello,), lost=lost)
            case _ if envelope.sender != self.router:
                return MembershipChange()
            case _:
                self._last_heard, self.heard = now, envelope.sequence
                return MembershipChange(deliver=True)

    def tick(self, now: float, paused: float = 0.0) -> MembershipChange:
        """Call every turn. `paused`: seconds by which our own loop was held up, for which no router is blamed."""
        self._last_heard += paused
        lost = self._leave() if now - self._last_heard > self._silence else None
        if self.router is None and now >= self._next_hello:
            self._next_hello = now + _HELLO_AGAIN
            return MembershipChange(send=(self.hello,), lost=lost)
        return MembershipChange(lost=lost)

    def _leave(self) -> str | None:
        left, self.router = self.router, None
        return left
