"""Every process of a cluster is restarted, one after another, under load: no request fails, and no token is wrong."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp

from deploy.local import LocalCluster
from tests import checkpoints
from tests.support import workload
from tests.support.cluster import at_rest
from tests.support.eventually import DEADLINE, eventually, eventually_async

PROMPTS = [[3 + number, *range(5, 5 + 11 * number)] for number in range(1, 9)]
OUTPUT = 40
PROCESSES = ["decode-0", "prefill-0", "store-0", "decode-1", "router-1", "router"]


class Load:
    """Streams at both routers, one after another, until `stop`. A client goes to a router that says it is ready."""

    def __init__(self, cluster: LocalCluster, right: dict[tuple[int, ...], list[int]]) -> None:
        self._cluster = cluster
        self._right = right
        self.stop = False
        self.served: dict[str, int] = {"router": 0, "router-1": 0}

    async def client(self, number: int) -> None:
        order = ["router", "router-1"] if number % 2 else ["router-1", "router"]
        async with aiohttp.ClientSession() as http:
            while not self.stop:
                prompt = PROMPTS[number % len(PROMPTS)]
                number += 1
                router = await self._ready(http, order)
                tokens = await self._stream(http, router, prompt)
                if tokens is not None:
                    assert tokens == self._right[tuple(prompt)]
                    self.served[router] += 1

    async def _ready(self, http: aiohttp.ClientSession, order: list[str]) -> str:
        async def one() -> str:
            for router in order:
                try:
                    async with http.get(f"http://{self._cluster.api_of(router)}/ready") as answer:
                        if answer.status == 200:
                            return router
                except aiohttp.ClientConnectionError:
                    continue
            return ""

        return await eventually_async(one, what="a router is ready")

    async def _stream(self, http: aiohttp.ClientSession, router: str, prompt: list[int]) -> list[int] | None:
        """The tokens; none if the router takes no more requests, since it has been told to stop just now."""
        body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
        url = f"http://{self._cluster.api_of(router)}/v1/completions"
        try:
            answer = await http.post(url, json=body | {"return_token_ids": True})
        except aiohttp.ClientConnectionError:
            return None  # it was not taken: the port was closed between the two calls
        async with answer:
            if answer.status == 503:
                return None
            assert answer.status == 200, await answer.text()
            tokens: list[int] = []
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    tokens += event["choices"][0].get("token_ids", [])
            return tokens


def test_every_process_is_restarted_under_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("llama")
    right = {tuple(prompt): checkpoints.reference(path).generate(prompt, OUTPUT)[0] for prompt in PROMPTS}
    settings = workload.settings(
        path, 1, 2, **{"cluster.routers": 2, "router.shutdown_timeout_ms": int(DEADLINE * 1_000)}
    )
    with LocalCluster(settings, tmp_path) as cluster:
        load = Load(cluster, right)

        async def restart(name: str) -> None:
            before = dict(load.served)
            identity = await asyncio.to_thread(cluster.kill, name, signal.SIGTERM)
            assert await asyncio.to_thread(identity.wait, DEADLINE), f"{name} did not end"
            await asyncio.to_thread(cluster.start, name)
            await asyncio.to_thread(cluster.wait_live, cluster.pids, DEADLINE)

            def served() -> bool:
                return sum(load.served.values()) >= sum(before.values()) + 8

            await eventually_async(served, what=f"streams after {name}")

        async def test() -> None:
            clients = [asyncio.create_task(load.client(number)) for number in range(6)]
            for name in PROCESSES:
                await restart(name)
            load.stop = True
            await asyncio.wait_for(asyncio.gather(*clients), DEADLINE)

        asyncio.run(test())
        assert all(load.served.values()), load.served
        eventually(lambda: at_rest(cluster), what="everything freed")
