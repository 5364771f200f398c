"""A shell around a router's real state, without sockets and without clients: `router.frontend.router_driver`.

What a link, a client and a follower of KV events are, a subclass says.
"""

# pyright: strict

from collections import Counter
from collections.abc import Sequence
from typing import Any

from baton.messages import Envelope, Peer
from router import events
from router.state import RouterState


class RouterShell:
    """A router process, but for what its subclass says."""

    def __init__(self, peer: Peer, state: RouterState) -> None:
        self.peer, self.state = peer, state
        self.incarnation = peer.incarnation
        self.counts: Counter[str] = Counter()  # messages to each peer: the sequence number of the last

    @property
    def now(self) -> float:
        raise NotImplementedError

    def tell(self, event: events.RouterEvent) -> Sequence[events.RouterCommand]:
        """Tell the state of an event. Return its commands, which are carried out."""
        commands = self.state.handle(event, self.now)
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: events.RouterCommand) -> None:
        match command:
            case events.SendMessage(incarnation=to, message=message):
                self.counts[to] += 1
                self.post(Envelope(self.incarnation, to, self.counts[to], message))
            case events.ForgetPeer(incarnation=stranger):
                del self.counts[stranger]
            case events.Emit(request=request, tokens=tokens):
                self.emit(request, tokens)
            case events.RequestEnded():
                self.end_request(command)
            case events.PinAnswered():
                self.answer_pin(command)
            case events.Subscribe(incarnation=holder):
                self.follow(holder)
            case events.Unsubscribe(incarnation=holder):
                self.unfollow(holder)
            case events.AskSnapshot(incarnation=holder):
                self.ask_snapshot(holder)
            case _:  # log lines
                pass

    # --- what a subclass says ---------------------------------------------------------------------------------------

    def post(self, envelope: Envelope[Any]) -> None:
        """Send a message to a peer, which may have gone."""
        raise NotImplementedError

    def emit(self, request: str, tokens: Sequence[int]) -> None:
        """Give tokens to a client."""

    def end_request(self, end: events.RequestEnded) -> None:
        """Tell a client of its request's end."""

    def answer_pin(self, answer: events.PinAnswered) -> None:
        """Answer a client that has asked for a pin."""

    def follow(self, holder: str) -> None:
        """Follow the KV events of a worker or store."""

    def unfollow(self, holder: str) -> None:
        """Follow them no longer."""

    def ask_snapshot(self, holder: str) -> None:
        """Ask for a snapshot of the pages of a worker or store."""
