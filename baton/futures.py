"""What asyncio lacks for futures that no task waits for any more."""

import asyncio
from typing import Any


def looked_at(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging the error of a future that no task waits for any more: add this as a callback."""
    if not future.cancelled():
        future.exception()
