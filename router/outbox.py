"""Commands as they are decided, in order, with every message counted as its link will count it. Pure."""

# pyright: strict

from __future__ import annotations

from baton.messages import Message
from router.events import ForgetPeer, Log, RouterCommand, SendMessage
from router.members import ClusterMembership


class Outbox:
    """The commands of the event that is being handled."""

    def __init__(self, members: ClusterMembership) -> None:
        self._members = members
        self._commands: list[RouterCommand] = []

    def put(self, command: RouterCommand) -> None:
        self._commands.append(command)

    def send(self, incarnation: str, message: Message) -> int:
        """Send a message; returns its sequence on that link."""
        self._commands.append(SendMessage(incarnation, message))
        sequence = self._members.next_sequence(incarnation)
        if sequence is None:  # a stranger's messages are not counted
            self._commands.append(ForgetPeer(incarnation))
            return 0
        return sequence

    def log(self, text: str, request: str = "", *, warning: bool = False, kind: str = "", detail: bool = False) -> None:
        """A line for the log. `kind`: a peer or client can cause it, so lines of this kind are rate-limited."""
        self._commands.append(Log(text, request, warning, kind, detail))

    def take_commands(self) -> list[RouterCommand]:
        """Everything since the last call."""
        commands, self._commands = self._commands, []
        return commands
