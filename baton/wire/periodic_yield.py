"""Sharing the event loop with its other tasks."""

import asyncio

_MESSAGES = 64  # read before the other tasks run: about 1 ms of work


class PeriodicYield:
    """Let the event loop's other tasks run after every 64 messages of a socket, good and malformed ones alike.

    Awaiting a message that is already there does not yield, so a socket that is never empty would keep the loop."""

    def __init__(self) -> None:
        self._read = 0

    async def before_message(self) -> None:
        """Yield once in 64 calls. Await it before each receive."""
        self._read += 1
        if self._read > _MESSAGES:
            self._read = 1
            await asyncio.sleep(0)
