"""KV events on the wire: what any reader of vLLM's format sees, and what we read back."""

from typing import Any

import msgpack
import pytest

from baton.errors import MalformedMessage
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.events import changes as kv
from kvstore.events.wire_format import AllBlocksCleared, BlockRemoved, BlockStored, KvEventLog, decode
from kvstore.prefix_map.event_tracker import apply_events
from kvstore.prefix_map.prefix_map import PrefixMap
from tests.kvstore.chains import key, keys, parent


def log() -> KvEventLog:
    return KvEventLog("store-0-abc", "tiny@model", 1.5)


def test_a_plain_messagepack_reader_sees_vllms_fields() -> None:
    changes: list[kv.CacheChange] = [
        kv.PagesStored(b"", tuple(keys("ab"))),
        kv.PagesStored(key("ab"), (key("abc"),)),
        kv.PagesRemoved((key("abc"),)),
    ]
    batch = log().append([("CPU", [*changes, kv.PagesCleared()])], 16, 1700000000.25)
    assert batch.topic == b"kv@store-0-abc@tiny@model"
    assert batch.sequence == 1
    stored = {
        "type": "BlockStored",
        "block_hashes": keys("ab"),
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    payload: list[Any] = msgpack.unpackb(batch.payload)
    assert payload == [
        1700000000.25,
        [
            stored,
            stored | {"block_hashes": [key("abc")], "parent_block_hash": key("ab")},
            {"type": "BlockRemoved", "block_hashes": [key("abc")], "medium": "CPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_a_new_log_begins_by_saying_that_nothing_is_held() -> None:
    first = [log().batch(0)]
    assert [(batch.sequence, msgpack.unpackb(batch.payload)) for batch in first] == [
        (0, [1.5, [{"type": "AllBlocksCleared"}], 0])
    ]


def test_what_is_written_is_read_back() -> None:
    batch = log().append(
        [("DISK", [kv.PagesStored(key("a"), (key("ab"),)), kv.PagesRemoved((key("ab"),)), kv.PagesCleared()])], 16, 2.0
    )
    read = decode(batch.topic, batch.sequence, batch.payload)
    assert read.holder == "store-0-abc"
    assert read.sequence == 1
    assert read.events == (
        BlockStored((key("ab"),), key("a"), (), 16, None, "DISK", None),
        BlockRemoved((key("ab"),), "DISK"),
        AllBlocksCleared(),
    )


def test_the_log_keeps_the_last_batches() -> None:
    events = KvEventLog("i", "m", 0.0, keep=3)
    for _ in range(5):
        events.append([("CPU", [kv.PagesCleared()])], 16, 0.0)
    assert events.first == 3
    assert [events.batch(sequence).sequence for sequence in (3, 4, 5)] == [3, 4, 5]
    with pytest.raises(KeyError):
        events.batch(2)
    assert events.last == 5


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        (b"kv@i@m", b"garbage"),
        (b"kv@i@m", msgpack.packb([1.0, [{"type": "BlockMoved"}], 0])),
        (b"kv@i@m", msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [b"short"], "medium": "CPU"}], 0])),
        (b"kv@i", msgpack.packb([1.0, [], 0])),
        (b"kv@\xff@m", msgpack.packb([1.0, [], 0])),
        (b"", b""),
    ],
)
def test_what_is_no_batch_is_a_typed_error(topic: bytes, payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(topic, 0, payload)


def test_fields_that_others_add_do_not_disturb_us() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [key("a")], "medium": "CPU", "group_idx": None, "new": 1}
    assert decode(b"kv@i@m", 7, msgpack.packb([1.0, [event], 0, "more"])).events == (BlockRemoved((key("a"),), "CPU"),)


def test_events_fill_a_map_and_a_missing_parent_is_told() -> None:
    prefixes = PrefixMap()
    assert apply_events(prefixes, "h", [BlockStored(tuple(keys("ab")), None, (), 16, None, "CPU", None)])
    assert not apply_events(prefixes, "h", [BlockStored((key("xyz"),), key("xy"), (), 16, None, "CPU", None)])
    assert prefixes.match(keys("ab"))["h"].pages == 2
    assert apply_events(prefixes, "h", [BlockRemoved((key("ab"),), "CPU")])
    assert prefixes.pages("h") == 1
    assert apply_events(prefixes, "h", [AllBlocksCleared()])
    assert prefixes.pages("h") == 0


def test_neighbouring_changes_are_joined_and_never_reordered() -> None:
    changes = kv.ChangeLog()
    for page in range(3):
        changes.stored(key("abc"[: page + 1]), parent("abc", page))
    changes.stored(key("x"), b"")
    changes.removed(key("abc"))
    changes.removed(key("ab"))
    changes.stored(key("ab"), key("a"))
    assert changes.drain() == [
        kv.PagesStored(b"", tuple(keys("abc"))),
        kv.PagesStored(b"", (key("x"),)),
        kv.PagesRemoved((key("abc"), key("ab"))),
        kv.PagesStored(key("a"), (key("ab"),)),
    ]
    assert changes.drain() == []
    changes.stored(key("a"), b"")
    changes.cleared()
    assert changes.drain() == [kv.PagesCleared()]


def test_snapshots_come_in_bounded_parts() -> None:
    chain = [number.to_bytes(16, "big") for number in range(200_000)]
    runs = list(kv.page_runs(zip(chain, [b"", *chain], strict=False), "CPU"))
    assert all(len(run.keys) <= 1_024 * 16 for run in runs)
    parts = kv.snapshot_parts(7, runs)
    assert len(parts) > 1
    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.sequence for part in parts} == {7}
    prefixes = PrefixMap()
    prefixes.load_snapshot("h", [run for part in parts for run in part.runs])
    assert prefixes.match(chain)["h"].pages == len(chain)
    assert [part.last for part in kv.snapshot_parts(0, [])] == [True]


def test_tokens_are_told_with_their_pages_only_where_that_is_asked_for() -> None:
    for tell, token_ids in ((True, (1, 2, 3, 4, 5, 6)), (False, ())):
        cache = DeviceBlockManager(4, tell_tokens=tell)
        pages = cache.allocate_with_prefix(keys("abc"), 3)
        for place, tokens in enumerate([(1, 2), (3, 4), (5, 6)]):
            cache.cache_block(key("abc"[: place + 1]), parent("abc", place), pages[place], tokens)
        changes = cache.drain_events()
        assert changes == [kv.PagesStored(b"", tuple(keys("abc")), token_ids)]
        batch = log().append([("GPU", changes)], 2, 0.0)
        (event,) = msgpack.unpackb(batch.payload)[1]
        assert event["token_ids"] == list(token_ids)
        assert (cache.drain_events(), decode(batch.topic, 1, batch.payload).sequence) == ([], 1)


def test_tokens_stay_with_their_pages_when_a_change_is_cut() -> None:
    chain = [number.to_bytes(16, "big") for number in range(20_000)]
    whole = kv.PagesStored(b"", tuple(chain), tuple(range(40_000)))
    parts = [change for part in kv.in_parts([("GPU", [whole])]) for _, changes in part for change in changes]
    assert len(parts) > 2
    assert [key for change in parts for key in change.keys] == chain
    for change in parts:
        first = chain.index(change.keys[0])
        assert change.parent == (chain[first - 1] if first else b"")
        assert change.tokens == tuple(range(2 * first, 2 * (first + len(change.keys))))
