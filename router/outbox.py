"""Commands as they are decided, in order, with every message counted as its link will count it. Pure."""

# pyright: strict

from __future__ import annotations

from baton.messages import Message
from router.events import Command, Forget, Note, Send
from router.members import Members


class Outbox:
    """The commands of the event that is being handled."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._commands: list[Command] = []

    def put(self, command: Command) -> None:
        self._commands.append(command)

    def send(self, incarnation: str, message: Message) -> int:
        """Send a message; returns its sequence on that link."""
        self._commands.append(Send(incarnation, message))
        sequence = self._members.count(incarnation)
        if sequence is None:  # nobody's count goes on from what a stranger is told
            self._commands.append(Forget(incarnation))
            return 0
        return sequence

    def note(
        self, text: str, request: str = "", *, warning: bool = False, kind: str = "", detail: bool = False
    ) -> None:
        """A line for the log. `kind`: a peer or client can cause it, so lines of this kind are rate-limited."""
        self._commands.append(Note(text, request, warning, kind, detail))

    def take(self) -> list[Command]:
        """Everything since the last call."""
        commands, self._commands = self._commands, []
        return commands
