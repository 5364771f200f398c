"""Honest clients beside the fuzzers: each request is compared token by token, over gRPC and over HTTP."""

import asyncio
import json
import random
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from tests.support.honest_streams import COUNT, Streams
from tests.support.standstill import NOTED, Gap

_LIMIT = 120.0  # seconds of one request


@dataclass
class HttpStreams:
    """Clients of /v1/completions. Each sends its next request when the last has ended, until `stop` is set."""

    address: str
    expected: Mapping[tuple[int, ...], list[int]]
    rng: random.Random
    clients: int
    gaps: list[Gap] = field(default_factory=list[Gap])
    requests: int = 0
    stop: bool = False

    async def run(self) -> None:
        """Raise AssertionError at the first wrong token or status."""
        timeout = aiohttp.ClientTimeout(total=_LIMIT)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self.stop:
            await self._request(session, self.rng.choice(list(self.expected)))

    async def _request(self, session: aiohttp.ClientSession, prompt: tuple[int, ...]) -> None:
        body = {
            "prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        tokens, last = list[int](), time.monotonic()
        async with session.post(f"http://{self.address}/v1/completions", json=body) as answer:
            assert answer.status == 200, f"an honest request got {answer.status}: {await answer.text()}"
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if tokens and now - last > NOTED:
                    self.gaps.append(Gap(last, now))
                last = now
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, f"an honest request failed: {event}"
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
        assert tokens == self.expected[prompt], f"wrong tokens over HTTP for a prompt of {len(prompt)}"
        self.requests += 1


class Honest:
    """All honest clients, in a thread of their own. `failures` fills up when one of them fails."""

    def __init__(
        self, grpc_address: str, http_address: str, expected: Mapping[tuple[int, ...], list[int]], seed: int, each: int
    ) -> None:
        self.grpc = Streams(grpc_address, expected, random.Random(seed), each)
        self.http = HttpStreams(http_address, expected, random.Random(seed + 1), each)
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="honest")
        self._thread.start()

    @property
    def requests(self) -> int:
        return self.grpc.requests + self.http.requests

    @property
    def longest_gap(self) -> float:
        return max((gap.seconds for gap in (*self.grpc.gaps, *self.http.gaps)), default=0.0)

    def stop(self) -> None:
        """Let every request end."""
        self.grpc.stop = self.http.stop = True
        self._thread.join()

    @property
    def errors(self) -> str:
        """What went wrong; empty: nothing."""
        return "; ".join("".join(traceback.format_exception(error))[-1_000:] for error in self.failures)

    def _run(self) -> None:
        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.grpc.run())
                group.create_task(self.http.run())

        try:
            asyncio.run(both())
        except BaseException as error:  # noqa: BLE001 the fuzzer's own thread raises it
            self.failures.append(error)
