"""KV events of a running cluster, read by an external subscriber: found through its status, in vLLM's format."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq

from baton.client import Client
from baton.config import Config
from baton.wire import ClusterKeys, Subscriber, use_keys
from deploy.local import LocalCluster
from kvstore.events.wire_format import BlockStored, KvEventBatch, decode
from tests.support import checkpoints, cluster_keys, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric

OWNERS = ["prefill-0", "decode-0", "store-0"]
PAGE = 16  # tokens
PATIENCE = 60.0  # seconds


def owners(cluster: LocalCluster) -> Mapping[str, tuple[str, str]]:
    """Return the endpoints of events and of replays of each process that holds pages."""
    with Client(cluster.address, cluster.operator) as client:
        return {each.name: (each.events_endpoint, each.replay_endpoint) for each in client.status().processes}


def settings_with_keys(model: Path, folder: Path, **more: object) -> Config:
    """Of a cluster whose keys this process has as well."""
    return workload.settings(model, **{"cluster.key_file": str(cluster_keys.key_file(folder)), **more})


def a_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, checkpoints.VOCAB) for _ in range(5 * PAGE + 1)]


def replayed(endpoint: str) -> list[list[object]]:
    """Every batch from the first on, as a plain client of vLLM's replay sockets reads them."""
    batches: list[list[object]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1_000))
        cluster_keys.client(socket).connect(endpoint)
        socket.send_multipart([b"", bytes(8)])
        while True:
            _, sequence, payload = socket.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return batches
            assert int.from_bytes(sequence, "big") == len(batches)
            batches.append(msgspec.msgpack.decode(payload))


def stored(endpoint: str) -> list[Mapping[str, object]]:
    """The maps of all BlockStored events so far."""
    return [
        event
        for _, events, rank in replayed(endpoint)
        if rank == 0 and isinstance(events, list)
        for event in events
        if event["type"] == "BlockStored"
    ]


def test_readers_with_the_keys_find_and_read_them_and_learn_no_token(path: Path, tmp_path: Path) -> None:
    with LocalCluster(settings_with_keys(path, tmp_path), tmp_path) as cluster:
        by_name = owners(cluster)
        assert by_name["router"] == ("", "")
        workload.ask(cluster.address, a_prompt(random.Random(1)))
        for name, medium in zip(OWNERS, ["GPU", "GPU", "CPU"], strict=True):
            eventually(lambda name=name: stored(by_name[name][1]), what=f"pages of {name}")
            for event in stored(by_name[name][1]):
                assert event["medium"] == medium
                assert event["block_size"] == PAGE
                assert event["token_ids"] == []


def test_token_ids_need_the_keys(path: Path, tmp_path: Path) -> None:
    settings = settings_with_keys(path, tmp_path, **{"store.event_tokens": True})
    with LocalCluster(settings, tmp_path) as cluster:
        asyncio.run(asyncio.wait_for(_read_tokens(cluster), PATIENCE))
        for name in OWNERS:
            eventually(lambda name=name: metric(cluster, name, "connections_refused_total"), what=f"{name} refusing")


async def _read_tokens(cluster: LocalCluster) -> None:
    """Send one prompt after the other, until each owner has published an event."""
    endpoints = [owners(cluster)[name][0] for name in OWNERS]
    friends = [Subscriber(endpoint) for endpoint in endpoints]
    use_keys(ClusterKeys.generate())
    strangers = [Subscriber(endpoint) for endpoint in endpoints]
    overheard = [asyncio.create_task(stranger.receive()) for stranger in strangers]
    heard = [asyncio.create_task(_first_stored(friend)) for friend in friends]
    rng = random.Random(2)
    prompts: list[list[int]] = []
    try:
        while not all(task.done() for task in heard):
            prompts.append(a_prompt(rng))
            await asyncio.to_thread(workload.ask, cluster.address, prompts[-1])
        for name, task in zip(OWNERS, heard, strict=True):
            tokens = list(task.result().token_ids)
            if name.startswith("store"):
                assert tokens == []  # it never knows them
            else:
                assert tokens
                assert any(prompt[: len(tokens)] == tokens[: len(prompt)] for prompt in prompts)
        assert not any(task.done() for task in overheard)
    finally:
        for task in (*heard, *overheard):
            task.cancel()
        await asyncio.gather(*heard, *overheard, return_exceptions=True)
        for socket in (*friends, *strangers):
            socket.close()


async def _first_stored(subscriber: Subscriber) -> BlockStored:
    """The first event of pages that begin a chain."""
    while True:
        batch: KvEventBatch = decode(*await subscriber.receive())
        for event in batch.events:
            if isinstance(event, BlockStored) and event.parent_block_hash is None:
                return event
