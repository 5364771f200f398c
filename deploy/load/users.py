"""Users that hold conversations with a cluster over gRPC, each one request at a time. One event loop."""

import asyncio
from collections.abc import Callable, Iterator

from baton.client import AsyncClient
from deploy.load.figures import Outcome
from deploy.load.presets import Turn
from deploy.load.sender import Sender


class Users:
    """Simulates users; each takes the next conversation when its last one has ended.

    `on_outcome` is called with each outcome when its request ends. `salted`: no two requests share a cached page.
    """

    def __init__(
        self,
        client: AsyncClient,
        talks: Iterator[list[Turn]],
        timeout: float,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
        *,
        salted: bool = False,
    ) -> None:
        self._sender = Sender(client, timeout, salted=salted)
        self._talks = talks
        self._on_outcome = on_outcome
        self._left = 0
        self._end = 0.0

    async def run(self, users: int, requests: int, seconds: float) -> list[list[Outcome]]:
        """Send `requests` in all, and none after `seconds`. Return the outcomes of each user, in order."""
        self._sender.restart()
        self._left, self._end = requests, seconds
        outcomes: list[list[Outcome]] = [[] for _ in range(users)]
        async with asyncio.TaskGroup() as group:
            for own in outcomes:
                group.create_task(self._user(own))
        return outcomes

    async def _user(self, outcomes: list[Outcome]) -> None:
        while self._left > 0 and self._sender.now() < self._end:
            tokens: list[int] = []
            for turn in next(self._talks):
                due = self._sender.now() + turn.gap
                if self._left <= 0 or due >= self._end:
                    return
                self._left -= 1
                await asyncio.sleep(turn.gap)
                tokens += turn.tokens
                outcome, reply = await self._sender.send(tokens, turn.output, due)
                outcomes.append(outcome)
                self._on_outcome(outcome)
                if outcome.failed:
                    break
                tokens += reply
