"""Wait for a condition, with a deadline: the only way in which a test waits for another thread or process."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

DEADLINE = 60.0  # seconds: ten times what the slowest condition takes on a slow machine
_POLL = 0.005  # seconds

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "the condition", seconds: float = DEADLINE) -> T:
    """Return the condition's first true value. Raise AssertionError, which names `what`, when none comes in time."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"{what} did not come true within {seconds} s"
        time.sleep(_POLL)
    return result


async def eventually_async(
    condition: Callable[[], T | Coroutine[Any, Any, T]], what: str = "the condition", seconds: float = DEADLINE
) -> T:
    """Do the same in an event loop. The condition may be a coroutine function."""
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result  # type: ignore[return-value]
        assert time.monotonic() < end, f"{what} did not come true within {seconds} s"
        await asyncio.sleep(_POLL)


async def becomes(ask: Callable[[], Coroutine[Any, Any, object]], right: object, what: str = "the answer") -> None:
    """Ask again until the answer is the right one."""

    async def same() -> bool:
        return await ask() == right

    await eventually_async(same, what)
