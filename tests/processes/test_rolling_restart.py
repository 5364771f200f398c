"""Every process of a cluster is restarted, one after another, under load: no request fails, and no token is wrong."""

import asyncio
import json
import signal
from pathlib import Path

import aiohttp

from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.eventually import DEADLINE, eventually, eventually_async

PROMPTS = [[3 + number, *range(5, 5 + 11 * number)] for number in range(1, 9)]
OUTPUT = 40
PROCESSES = ["decode-0", "prefill-0", "store-0", "decode-1", "router-1", "router"]


class Load:
    """Streams at the port that both routers share, one after another, until `stop`. No client tries anything twice."""

    def __init__(self, cluster: LocalCluster, right: dict[tuple[int, ...], list[int]]) -> None:
        self._url = f"http://{cluster.api_of('router')}/v1/completions"
        self._right = right
        self.stop = False
        self.served = 0

    async def client(self, number: int) -> None:
        connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
        async with aiohttp.ClientSession(connector=connector) as http:
            while not self.stop:
                prompt = PROMPTS[number % len(PROMPTS)]
                number += 1
                assert await self._stream(http, prompt) == self._right[tuple(prompt)]
                self.served += 1

    async def _stream(self, http: aiohttp.ClientSession, prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
        async with http.post(self._url, json=body | {"return_token_ids": True}) as answer:
            assert answer.status == 200, await answer.text()
            tokens: list[int] = []
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    tokens += event["choices"][0].get("token_ids", [])
            return tokens


def test_every_process_is_restarted_under_load(path: Path, tmp_path: Path) -> None:
    right = {tuple(prompt): checkpoints.reference(path).generate(prompt, OUTPUT)[0] for prompt in PROMPTS}
    settings = workload.settings(
        path, 1, 2, **{"cluster.routers": 2, "router.shutdown_timeout_ms": int(DEADLINE * 1_000)}
    )
    with LocalCluster(settings, tmp_path) as cluster:
        load = Load(cluster, right)

        async def restart(name: str) -> None:
            before = load.served
            identity = await asyncio.to_thread(cluster.kill, name, signal.SIGTERM)
            assert await asyncio.to_thread(identity.wait, DEADLINE), f"{name} did not end"
            await asyncio.to_thread(cluster.start, name)
            await asyncio.to_thread(cluster.wait_live, cluster.pids, DEADLINE)

            await eventually_async(lambda: load.served >= before + 8, what=f"streams after {name}")
            for client in clients:
                if client.done():
                    client.result()

        clients: list[asyncio.Task[None]] = []

        async def test() -> None:
            clients.extend(asyncio.create_task(load.client(number)) for number in range(6))
            for name in PROCESSES:
                await restart(name)
            load.stop = True
            await asyncio.wait_for(asyncio.gather(*clients), DEADLINE)

        asyncio.run(test())
        eventually(lambda: at_rest(cluster), what="everything freed")
