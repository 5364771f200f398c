"""Progress on a terminal: one line that changes, and one line for each event."""

import contextlib
import time
from typing import Self

from rich.console import Console
from rich.markup import escape

from deploy.control_plane.reports import ClusterOverview

_HAPPENED = {"live": "is live", "failed": "has failed", "silent": "has gone silent", "stuck": "is stuck"}


class Progress:
    """Shows the progress of a command. Without a terminal it prints plain lines.

    The command goes on if the terminal or the pipe has gone.
    """

    def __init__(self, console: Console, tell_first: bool = True) -> None:
        """Without `tell_first`, the first overview is the state before the command and is not printed."""
        self._console = console
        self._tell = tell_first
        self._status = console.status("…")
        self._begin = time.monotonic()
        self._conditions: dict[str, str] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the line that changes."""
        with contextlib.suppress(OSError):
            self._status.stop()

    def say(self, text: str) -> None:
        """Print the beginning of a new stage."""
        self._update(text)
        self._console.print(f"[dim]{time.monotonic() - self._begin:5.1f} s[/]  {escape(text)}")

    def watch(self, overview: ClusterOverview) -> None:
        for view in overview.processes:
            if self._conditions.get(view.name) != view.condition:
                self._conditions[view.name] = view.condition
                if self._tell and view.condition in _HAPPENED:
                    pid = f", pid {view.identity.pid}" if view.identity else ""
                    self.say(f"{view.name} {_HAPPENED[view.condition]}{pid}")
        for name in set(self._conditions) - {view.name for view in overview.processes}:
            del self._conditions[name]
            self.say(f"{name} has ended")
        self._tell = True
        waiting = [view.name for view in overview.processes if view.condition != "live"]
        awaited = ", ".join(waiting) or "the router to serve"
        self._update(f"waiting for {awaited}, {time.monotonic() - self._begin:.0f} s so far")

    def _update(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._status.update(escape(text))
