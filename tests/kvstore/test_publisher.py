"""KvEventPublisher: snapshots and replays for any follower, and a publisher that no follower can disturb."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from baton.errors import StartupError
from baton.messages import Medium, PageSegment, Snapshot
from baton.monotonic_clock import MonotonicClock
from baton.wire import ClusterKeys, Poller, ReplayClient, Subscriber, use_keys
from kvstore.events.changes import PagesCleared, PagesRemoved, PagesStored, TierChanges, packed_digest, page_runs
from kvstore.events.publisher import KvEventPublisher
from kvstore.events.wire_format import BlockStored, decode, publisher_of
from router.placement.kv_index import KvIndex
from tests.kvstore.chains import key, keys
from tests.support import cluster_keys
from tests.support.eventually import eventually_async
from tests.support.virtual_clock import VirtualClock

PATIENCE = 20.0


class Owner:
    """The publishing side: it announces pages, and has none."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.events = KvEventPublisher("store-0-abc", "tiny", self.clock)
        self.chains: list[tuple[list[bytes], Medium]] = []
        self.snapshots = 0

    def snapshot(self) -> list[PageSegment]:
        self.snapshots += 1
        return [
            run for chain, medium in self.chains for run in page_runs(zip(chain, [b"", *chain], strict=False), medium)
        ]

    def store(self, chain: list[bytes], medium: Medium = "CPU") -> None:
        self.chains.append((chain, medium))
        self.events.publish([(medium, [PagesStored(b"", tuple(chain))])], 16)

    def turn(self) -> None:
        self.events.answer(self.snapshot)

    async def work(self) -> None:
        while True:
            self.turn()
            await asyncio.sleep(0.005)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.events.close()


@pytest.fixture
def follower(owner: Owner) -> Iterator[zmq.Socket[bytes]]:
    """A plain DEALER socket of a foreign process."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        cluster_keys.client(socket).connect(owner.events.replay)
        yield socket


def ask(owner: Owner, socket: zmq.Socket[bytes], question: bytes, done: Callable[[list[bytes]], bool]) -> list[Any]:
    """Everything that comes until the last answer."""
    socket.send_multipart([b"", question])
    got: list[list[bytes]] = []
    end = time.monotonic() + PATIENCE
    while not (got and done(got[-1])):
        assert time.monotonic() < end
        owner.turn()
        while socket.poll(10):
            got.append(socket.recv_multipart())
    return got


SNAPSHOT = msgspec.msgpack.encode({"type": "SnapshotRequest"})


def is_end(frames: list[bytes]) -> bool:
    return frames[1] == b"\xff" * 8


def is_last(frames: list[bytes]) -> bool:
    return msgspec.msgpack.decode(frames[2], type=Snapshot).last


# --- as others read it ------------------------------------------------------------------------------------------------


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """These four are as vLLM documents them (vllm.distributed.kv_events), written down anew."""

    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


class VllmStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class VllmRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class VllmCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    pass


def test_a_reader_of_vllms_events_reads_ours(owner: Owner, follower: zmq.Socket[bytes]) -> None:
    """Its subscription, its schema, its replay: as in its example of a subscriber."""
    with follower.context.socket(zmq.SUB) as subscription:
        cluster_keys.client(subscription).connect(owner.events.endpoint)
        subscription.setsockopt(zmq.SUBSCRIBE, b"kv@")
        number = 0
        while not subscription.poll(20):  # until the subscription has arrived
            number += 1
            owner.store([number.to_bytes(16, "big")])
        topic, sequence, payload = subscription.recv_multipart()
    assert topic.split(b"@") == [b"kv", b"store-0-abc", b"tiny"]
    (last,) = struct.unpack(">Q", sequence)
    assert last >= 1
    read = msgspec.msgpack.decode(payload, type=EventBatch)
    assert read.events == [VllmStored([last.to_bytes(16, "big")], None, [], 16, None, "CPU", None)]

    owner.events.publish([("CPU", [PagesRemoved((key("x"),))]), ("DISK", [PagesStored(key("a"), (key("ab"),))])], 16)
    missed = struct.pack(">Q", last)
    got = ask(owner, follower, missed, is_end)
    assert [frames[0] for frames in got] == [b""] * len(got)
    assert [struct.unpack(">q", frames[1])[0] for frames in got] == [*range(last, owner.events.sequence + 1), -1]
    assert got[0][2] == payload
    assert got[-1][2] == b""
    both = msgspec.msgpack.decode(got[-2][2], type=EventBatch)
    assert both.data_parallel_rank == 0
    assert both.events == [
        VllmRemoved([key("x")], "CPU"),
        VllmStored([key("ab")], key("a"), [], 16, None, "DISK", None),
    ]
    first = ask(owner, follower, struct.pack(">Q", 0), is_end)[0]
    assert msgspec.msgpack.decode(first[2], type=EventBatch).events == [VllmCleared()]
    assert ask(owner, follower, struct.pack(">Q", 2**63), is_end) == [[b"", b"\xff" * 8, b""]]


# --- followers --------------------------------------------------------------------------------------------------------


async def test_any_number_of_followers_end_up_with_the_same_map(owner: Owner) -> None:
    async def follow(prefixes: KvIndex) -> None:
        subscriber, asker = Subscriber(owner.events.endpoint), ReplayClient(owner.events.replay)

        def do(asks: list[str]) -> None:
            for _ in asks:
                asker.ask()

        async def batches() -> None:
            while True:
                do(prefixes.apply_batch(decode(*await subscriber.receive()), time.monotonic()))

        async def parts() -> None:
            while True:
                topic, part = await asker.receive()
                holder = publisher_of(topic)
                assert holder is not None
                do(prefixes.apply_snapshot(holder, part, time.monotonic()))

        async def beats() -> None:
            while True:
                position = owner.events.sequence, owner.events.digest
                do(prefixes.heartbeat("store-0-abc", *position, time.monotonic()))
                do(prefixes.tick(time.monotonic()))
                await asyncio.sleep(0.02)

        do(prefixes.follow("store-0-abc", time.monotonic()))
        try:
            await asyncio.gather(batches(), parts(), beats())
        finally:
            subscriber.close()
            asker.close()

    followers = [KvIndex() for _ in range(3)]
    tasks = [asyncio.create_task(follow(each)) for each in followers]
    tasks.append(asyncio.create_task(owner.work()))
    chain = [number.to_bytes(16, "big") for number in range(1, 20_001)]
    owner.store(chain)
    for number in range(50):
        owner.store([b"a" * 15 + bytes([number])])
        await asyncio.sleep(0.002)
    owner.events.publish([("CPU", [PagesRemoved(tuple(reversed(chain[10_000:])))])], 16)
    owner.chains[0] = (chain[:10_000], "CPU")
    await eventually_async(lambda: all(each.map.pages("store-0-abc") == 10_050 for each in followers))
    followers[2].map.removed("store-0-abc", chain[5_000:], "CPU")  # no event says so
    await eventually_async(lambda: followers[2].map.pages("store-0-abc") == 10_050)
    assert [each.stats().divergences for each in followers] == [0, 0, 1]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_snapshot_comes_in_parts_with_the_name_of_its_publisher(owner: Owner, follower: zmq.Socket[bytes]) -> None:
    chain = [number.to_bytes(16, "big") for number in range(1, 30_001)]
    owner.store(chain, "DISK")
    got = ask(owner, follower, SNAPSHOT, is_last)
    assert {frames[1] for frames in got} == {b"kv@store-0-abc@tiny"}
    parts = [msgspec.msgpack.decode(frames[2], type=Snapshot) for frames in got]
    assert [part.part for part in parts] == list(range(len(parts)))
    assert {part.sequence for part in parts} == {owner.events.sequence}
    assert b"".join(run.keys for part in parts for run in part.runs) == b"".join(chain)


def test_a_question_wakes_its_owner(owner: Owner, follower: zmq.Socket[bytes]) -> None:
    poller = Poller()
    poller.add(owner.events)
    assert not poller.wait(0.0)
    follower.send_multipart([b"", SNAPSHOT])
    assert poller.wait(PATIENCE)


def test_a_large_change_is_told_in_many_batches_and_one_digest(owner: Owner) -> None:
    chain = [number.to_bytes(16, "big") for number in range(1, 50_001)]
    owner.store(chain)
    assert owner.events.sequence > 3
    assert owner.events.digest == packed_digest(b"".join(chain), "CPU")
    owner.events.publish([("CPU", [PagesRemoved(tuple(reversed(chain[100:])))])], 16)
    assert owner.events.digest == packed_digest(b"".join(chain[:100]), "CPU")
    prefixes = KvIndex()
    prefixes.follow("store-0-abc", 0.0)
    prefixes.apply_snapshot("store-0-abc", Snapshot(0, ()), 0.0)
    log = owner.events._log
    for batch in map(log.batch, range(1, log.last + 1)):
        assert len(batch.payload) < 200_000
        assert prefixes.apply_batch(decode(batch.topic, batch.sequence, batch.payload), 0.0) == []
    assert prefixes.map.match(chain)["store-0-abc"].pages == 100
    assert prefixes.heartbeat("store-0-abc", owner.events.sequence, owner.events.digest, 0.0) == []
    owner.events.publish([("DISK", [PagesCleared()])], 16)
    assert owner.events.digest == 0


def test_nothing_that_changed_is_nothing_said(owner: Owner) -> None:
    nothing: list[list[TierChanges]] = [[], [("CPU", [])], [("CPU", []), ("DISK", [])]]
    for changes in nothing:
        owner.events.publish(changes, 16)
    assert owner.events.sequence == 0
    assert owner.events.digest == 0


def test_a_wrong_digest_is_corrected_by_a_snapshot(
    owner: Owner, follower: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    owner.store(keys("abc"))
    owner.events.publish([("CPU", [PagesRemoved((key("zzz"),))])], 16)  # it never had that
    ask(owner, follower, SNAPSHOT, is_last)
    assert owner.events.metric_samples["kv_event_digests_corrected"] == 1
    assert owner.events.digest == packed_digest(b"".join(keys("abc")), "CPU")
    assert "do not add up" in caplog.text


# --- readers ----------------------------------------------------------------------------------------------------------


def test_only_followers_with_the_keys_get_events_also_on_loopback() -> None:
    use_keys(None)
    with pytest.raises(StartupError, match="needs the cluster's keys"):
        KvEventPublisher("store-0-abc", "tiny", MonotonicClock())
    use_keys(cluster_keys.KEYS)
    events = KvEventPublisher("worker-0-abc", "tiny", MonotonicClock())
    try:
        asyncio.run(asyncio.wait_for(_read_secrets(events), PATIENCE))
    finally:
        events.close()


async def _read_secrets(events: KvEventPublisher) -> None:
    subscriber, asker = Subscriber(events.endpoint), ReplayClient(events.replay)
    use_keys(ClusterKeys.generate())
    strangers = Subscriber(events.endpoint), ReplayClient(events.replay)
    use_keys(cluster_keys.KEYS)
    strangers[1].ask()
    asker.ask()
    heard = [asyncio.create_task(each.receive()) for each in (subscriber, asker, *strangers)]
    number = 0
    while not (heard[0].done() and heard[1].done()):
        number += 1
        secret = PagesStored(b"", (number.to_bytes(16, "big"),), (4_711,))
        events.publish([("GPU", [secret])], 1)
        events.answer(list)
        await asyncio.sleep(0.01)
    batch = decode(*heard[0].result())
    assert isinstance(batch.events[0], BlockStored)
    assert batch.events[0].token_ids == (4_711,)
    assert not heard[2].done()
    assert not heard[3].done()
    for task in heard:
        task.cancel()
    await asyncio.gather(*heard, return_exceptions=True)
    for socket in (subscriber, asker, *strangers):
        socket.close()


# --- what no follower can do to the publisher -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"no delimiter"],
        [b"x", SNAPSHOT],
        [b"", b""],
        [b"", b"seven b"],
        [b"", msgspec.msgpack.encode({"type": "Decode"})],
        [b"", SNAPSHOT + b"x"],
        [b"", SNAPSHOT, b"more"],
    ],
)
def test_what_is_no_question_is_counted_and_dropped(
    owner: Owner, follower: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    follower.send_multipart(frames or [b""])
    end = time.monotonic() + PATIENCE
    while not owner.events.malformed:
        assert time.monotonic() < end
        owner.turn()
    assert owner.snapshots == 0
    assert ask(owner, follower, SNAPSHOT, is_last), "and the next question is heard"


def part(frames: list[bytes]) -> Snapshot:
    return msgspec.msgpack.decode(frames[2], type=Snapshot)


def test_asking_again_and_again_makes_few_snapshots() -> None:
    """A snapshot takes its owner's time: a tenth of that at most, and none while nothing has changed."""
    clock = VirtualClock()
    owner = Owner(clock)
    slow = owner.snapshot

    def snapshot() -> list[PageSegment]:
        clock.advance(0.5)
        return slow()

    owner.snapshot = snapshot
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            cluster_keys.client(socket).connect(owner.events.replay)
            for _ in range(3):
                ask(owner, socket, SNAPSHOT, is_last)
            assert owner.snapshots == 1
            owner.store(keys("a"))
            socket.send_multipart([b"", SNAPSHOT])
            for _ in range(5):
                socket.poll(10)
                owner.turn()
            assert owner.snapshots == 1
            clock.advance(5.0)
            while not socket.poll(0):
                owner.turn()
            assert owner.snapshots == 2
            assert part(socket.recv_multipart()).runs == (PageSegment(b"", key("a"), "CPU"),)
    finally:
        owner.events.close()
