"""A process beside the router that does work of which neither time nor memory can be bounded on a thread.

    router ──order──▶ helper ──answer──▶ router        each is four bytes of length, and JSON

An answer names its order's number, so no request ever gets the answer of another one.
Work that hangs or takes too much memory costs its own request and a restart of the helper. `helper_main` is the
helper's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from baton.futures import looked_at
from baton.messages import UNREADABLE

_START = 30.0  # seconds for the first order of a new process, which imports its libraries
_BESIDE = 2**16  # bytes of an answer beside its text
_ESCAPED = 12  # bytes that a character takes in JSON at most


class HelperLate(Exception):
    """The answer did not come in time. The process was ended."""


class HelperDied(Exception):
    """The process ended before it answered, perhaps by its use of memory; or it was ended, since it said what is no
    answer."""


class HelperAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a helper says: the text that was asked for, or else an error and the label of its kind."""

    number: int
    text: str | None = None
    error: str = ""
    reason: str = ""


class HelperProcess:
    """A helper that is started when it is first needed, and does one order after another. One event loop may use it."""

    def __init__(self, module: str, *arguments: str, deadline: float, most: int) -> None:
        """`deadline`: seconds for one order, once the process has answered the first one. `most`: characters of a
        text."""
        self._command = (sys.executable, "-m", module, *arguments)
        self.deadline = deadline
        self._most_bytes = _ESCAPED * most + _BESIDE
        self._decoder = msgspec.json.Decoder(HelperAnswer)
        self._process: asyncio.subprocess.Process | None = None
        self._patience = _START
        self._turn = asyncio.Lock()
        self._number = 0

    async def ask(self, order: Any) -> HelperAnswer:
        """Return the answer to an order. Raises HelperLate and HelperDied."""
        self._number += 1
        number, said = self._number, msgspec.json.encode({"number": self._number, "order": order})
        asking = asyncio.create_task(self._in_turn(number, said))
        asking.add_done_callback(looked_at)
        return await asyncio.shield(asking)  # if the client goes, its answer must still be read

    async def close(self) -> None:
        """End the process."""
        process, self._process, self._patience = self._process, None, _START
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _in_turn(self, number: int, order: bytes) -> HelperAnswer:
        async with self._turn:
            try:
                answer = await asyncio.wait_for(self._exchange(number, order), self._patience)
                self._patience = self.deadline
                return answer
            except TimeoutError:
                await self.close()
                raise HelperLate from None
            except (asyncio.IncompleteReadError, ConnectionError, *UNREADABLE):
                await self.close()
                raise HelperDied from None

    async def _exchange(self, number: int, order: bytes) -> HelperAnswer:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None
        assert taken is not None
        given.write(len(order).to_bytes(4, "big") + order)
        await given.drain()
        size = int.from_bytes(await taken.readexactly(4), "big")
        if size > self._most_bytes:
            raise ValueError(f"an answer of {size} bytes; at most {self._most_bytes} are taken")
        answer = self._decoder.decode(await taken.readexactly(size))
        if answer.number != number or (answer.text is None and not answer.error):
            raise ValueError("the answer to another order, or one with neither a text nor an error")
        return answer
