"""Sends requests to a router over gRPC and notes when each token comes back. One event loop, one channel."""

import asyncio
import secrets
import time
from collections.abc import Sequence

from baton.client import AsyncClient
from baton.errors import BatonError
from deploy.load.figures import Outcome
from deploy.load.workload import Planned


class Sender:
    """Sends requests. Its clock starts with it. `salted`: no two of its requests share a cached page."""

    def __init__(self, client: AsyncClient, timeout: float, *, salted: bool = False, priority: int = 0) -> None:
        self._client, self._timeout, self._salted, self._priority = client, timeout, salted, priority
        self.restart()

    def restart(self) -> None:
        """Start the clock again."""
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def send(self, prompt: Sequence[int], output: int, due: float) -> tuple[Outcome, list[int]]:
        """Send a request that was due at that time; return its outcome, and its tokens if it finished."""
        sent = self.now()
        times: list[float] = []
        try:
            stream = self._client.generate(
                prompt, timeout=self._timeout, max_tokens=output, temperature=0, ignore_eos=True,
                cache_salt=secrets.token_hex(16) if self._salted else "", priority=self._priority,
            )  # fmt: skip
            async for delta in stream:
                times += [self.now()] * len(delta.token_ids)
            result = await stream.result()
        except BatonError as error:
            return Outcome(due, sent, self.now(), tuple(times), failed=error.reason), []
        return Outcome(
            due, sent, self.now(), tuple(times), "", result.usage.prompt_tokens, result.usage.cached_tokens,
            split=bool(result.work.prefill_worker), attempts=max(1, result.work.attempts),
        ), result.token_ids  # fmt: skip


async def open_loop(address: str, plan: Sequence[Planned], timeout: float, *, salted: bool = False) -> list[Outcome]:
    """Send each request when it is due, however many are under way."""
    async with AsyncClient(address) as client:
        sender = Sender(client, timeout, salted=salted)

        async def send(request: Planned) -> Outcome:
            await asyncio.sleep(request.at - sender.now())
            return (await sender.send(request.prompt, request.output, request.at))[0]

        return await asyncio.gather(*map(send, plan))


async def closed_loop(
    address: str, plan: Sequence[Planned], concurrency: int, timeout: float, *, salted: bool = False
) -> list[Outcome]:
    """Keep `concurrency` requests under way; the next is sent when one ends."""
    outcomes: list[Outcome] = []
    waiting = iter(plan)
    async with AsyncClient(address) as client:
        sender = Sender(client, timeout, salted=salted)

        async def user() -> None:
            for request in waiting:
                outcomes.append((await sender.send(request.prompt, request.output, sender.now()))[0])

        await asyncio.gather(*(user() for _ in range(concurrency)))
    return outcomes
