"""Users that hold conversations with a cluster over gRPC, each one request at a time. One event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from baton.client import AsyncClient
from baton.errors import BatonError
from deploy.load.figures import Outcome
from deploy.load.presets import Turn


class Users:
    """Simulates users; each takes the next conversation when its last one has ended.

    `on_outcome` is called with each outcome when its request ends.
    """

    def __init__(
        self,
        client: AsyncClient,
        talks: Iterator[list[Turn]],
        timeout: float,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._talks = talks
        self._timeout = timeout
        self._on_outcome = on_outcome
        self._start = time.perf_counter()
        self._left = 0
        self._end = 0.0

    async def run(self, users: int, requests: int, seconds: float) -> list[list[Outcome]]:
        """Send `requests` in all, and none after `seconds`. Return the outcomes of each user, in order."""
        self._start, self._left, self._end = time.perf_counter(), requests, seconds
        outcomes: list[list[Outcome]] = [[] for _ in range(users)]
        async with asyncio.TaskGroup() as group:
            for own in outcomes:
                group.create_task(self._user(own))
        return outcomes

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _user(self, outcomes: list[Outcome]) -> None:
        while self._left > 0 and self._now() < self._end:
            tokens: list[int] = []
            for turn in next(self._talks):
                due = self._now() + turn.gap
                if self._left <= 0 or due >= self._end:
                    return
                self._left -= 1
                await asyncio.sleep(turn.gap)
                tokens += turn.tokens
                outcome, reply = await self._send(tokens, turn.output, due)
                outcomes.append(outcome)
                self._on_outcome(outcome)
                if outcome.failed:
                    break
                tokens += reply

    async def _send(self, prompt: list[int], output: int, due: float) -> tuple[Outcome, list[int]]:
        sent = self._now()
        times: list[float] = []
        try:
            stream = self._client.generate(
                prompt, timeout=self._timeout, max_tokens=output, temperature=0, ignore_eos=True
            )
            async for delta in stream:
                times += [self._now()] * len(delta.token_ids)
            result = await stream.result()
        except BatonError as error:
            return Outcome(due, sent, self._now(), tuple(times), failed=error.reason), []
        return Outcome(
            due, sent, self._now(), tuple(times), "", result.usage.prompt_tokens, result.usage.cached_tokens,
            split=bool(result.work.prefill_worker), attempts=max(1, result.work.attempts),
        ), result.token_ids  # fmt: skip
