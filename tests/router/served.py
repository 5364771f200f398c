"""A real router on real sockets, with workers of the model cluster behind it, all in one event loop."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from baton import config as settings
from baton import messages
from baton.addresses import ServiceAddresses
from baton.v1 import generation_pb2
from baton.wire import RouterSocket
from router.service import serve
from tests.router import tokenizers
from tests.router.cluster import Cluster
from tests.router.model import CONFIG, CONTEXT, EOS, ROUTER, VOCAB
from tests.router.processes import Process
from tests.support import cluster_keys
from tests.support.eventually import becomes


def model_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder


def settings_for(folder: Path, **router: Any) -> settings.Config:
    keys = str(cluster_keys.key_file(folder))
    ports = {"grpc_port": 0, "internal_port": 0, "http_port": 0} | {"operator": str(folder / "run" / "router.sock")}
    ports |= {"shutdown_timeout_ms": 0} | router
    return msgspec.structs.replace(
        CONFIG,
        model=settings.ModelConfig(path=str(model_folder(folder / "small"))),
        cluster=msgspec.structs.replace(CONFIG.cluster, heartbeat_ms=50, heartbeat_timeout_ms=1_000, key_file=keys),
        router=msgspec.structs.replace(CONFIG.router, **ports),
        api=settings.ApiConfig(port=0, keys_file=str(folder / "api-keys.json"), batch_dir=str(folder / "batches")),
    )


class Served:
    """A running router, and the workers that a test starts behind it. `stop` is what SIGTERM sets."""

    stop: asyncio.Event

    def __init__(self, addresses: ServiceAddresses) -> None:
        self.addresses = addresses
        self.cluster = Cluster()
        self.step_seconds = 0.002
        self._links: dict[str, RouterSocket[Any]] = {}

    def start(self, role: Any, name: str, **more: Any) -> Process:
        process = self.cluster.start(role, name, **more)
        self._links[process.peer.incarnation] = RouterSocket(self.addresses.internal, process.peer, _heard(role))
        return process

    def kill(self, process: Process) -> None:
        self.cluster.kill(process)
        self._links.pop(process.peer.incarnation).close()

    async def work(self) -> None:
        """The workers' loops."""
        while True:
            self.cluster.now = time.monotonic()
            for process in list(self.cluster.processes.values()):
                if not process.stopped:
                    self._turn(process, self._links[process.peer.incarnation])
            await asyncio.sleep(self.step_seconds)

    def _turn(self, process: Process, link: RouterSocket[Any]) -> None:
        for envelope in link.receive():
            process.take(envelope)
        process.turn()
        process.step()
        for envelope in self.cluster.agenda.drop("message", ROUTER.incarnation, process.peer.incarnation):
            link.send(envelope.addressee, envelope.message)

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def _heard(role: str) -> Any:
    return {"decode": messages.ToDecode, "prefill": messages.ToPrefill, "store": messages.ToStore}[role]


@contextlib.asynccontextmanager
async def served(config: settings.Config) -> AsyncIterator[Served]:
    """A router that serves until the block is left."""
    stop = asyncio.Event()
    ready: asyncio.Future[ServiceAddresses] = asyncio.get_running_loop().create_future()
    router = asyncio.create_task(serve(config, "router", "a", stop, ready.set_result))
    await asyncio.wait([router, ready], return_when=asyncio.FIRST_COMPLETED, timeout=20)
    if router.done():
        router.result()
    running = Served(await ready)
    running.stop = stop
    workers = asyncio.create_task(running.work())
    try:
        yield running
    finally:
        stop.set()
        await asyncio.wait_for(router, 60)
        workers.cancel()
        running.close()
        with contextlib.suppress(asyncio.CancelledError):
            await workers


async def until_ready(http: aiohttp.ClientSession, address: str, scheme: str = "http", **more: Any) -> None:
    async def status() -> int:
        async with http.get(f"{scheme}://{address}/ready", **more) as answer:
            return answer.status

    await becomes(status, 200, "readiness")


async def collect(call: Any) -> tuple[str, list[int], generation_pb2.Finished]:
    """A whole stream: its text, its tokens, and how it finished."""
    text, tokens = "", list[int]()
    async for response in call:
        if response.HasField("finished"):
            return text, tokens, response.finished
        text += response.delta.text
        tokens += response.delta.token_ids
    raise AssertionError("the stream ended without a Finished")
