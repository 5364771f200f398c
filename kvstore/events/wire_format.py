"""KV events on the wire, in the format that vLLM publishes, so that other routers can read ours.

A batch is three ZMQ frames: topic, sequence (u64, big-endian), payload. The payload is MessagePack: an array of
[time, events, data parallel rank], each event a map of its fields with its name under "type".

vLLM wrote events as arrays too until mid 2026; since then only the batch is one, and readers take events as maps.
What we add must not disturb those readers, some of which refuse a batch with a fourth element. So the publisher's
incarnation travels in the topic, "kv@<incarnation>@<model>", where such readers look for the name of a pod.

Block hashes are our page keys. Token ids are the users' prompts: they stay empty unless `store.event_tokens` is set,
and then everything here is encrypted. Stores never learn them, and leave them empty even so.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from baton.errors import MalformedMessage
from baton.messages import UNREADABLE, Key, Medium
from kvstore.events.changes import CacheChange, PagesCleared, PagesRemoved, PagesStored, TierChanges, digest


class _Event(Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every event. Fields without a default are always written, as their readers expect."""


class BlockStored(_Event, frozen=True):
    """`block_hashes`, each following the one before, can be found on `medium`."""

    block_hashes: tuple[Key, ...]
    parent_block_hash: Key | None
    token_ids: tuple[int, ...]
    block_size: int  # tokens
    lora_id: int | None
    medium: Medium
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None


class BlockRemoved(_Event, frozen=True):
    """`block_hashes` are no longer on `medium`."""

    block_hashes: tuple[Key, ...]
    medium: Medium
    group_idx: int | None = None


class AllBlocksCleared(_Event, frozen=True):
    """The publisher has nothing (any more), on any tier."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Payload(Struct, frozen=True, array_like=True):
    ts: float  # seconds since 1970
    events: tuple[KvEvent, ...]
    data_parallel_rank: int  # always written: some readers take exactly three elements


class EncodedKvEventBatch(Struct, frozen=True):
    """The three frames of one batch, as `baton.wire.Publisher.send` takes them."""

    topic: bytes
    sequence: int
    payload: bytes


class KvEventBatch(Struct, frozen=True):
    """One decoded batch. `holder` is the publisher's incarnation."""

    holder: str
    sequence: int
    events: tuple[KvEvent, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Payload)


class KvEventLog:
    """Numbers a publisher's batches from 0, keeps the last ones, and the digest of all that they say is held.

    Batch 0 is there from the start and says that nothing is held: true of every new process, and it gives a snapshot
    taken before any page was stored a sequence to name."""

    def __init__(
        self, incarnation: str, model: str, timestamp: float, keep: int = 10_000, keep_bytes: int = 16 * 2**20
    ) -> None:
        """`timestamp`: seconds since 1970; `keep`, `keep_bytes`: how many batches are kept at most, and
        how many bytes of them."""
        self.topic = f"kv@{incarnation}@{model}".encode()
        self._batches: dict[int, EncodedKvEventBatch] = {}  # by sequence, without a gap
        self._keep, self._keep_bytes = keep, keep_bytes
        self._log_bytes = 0
        self.last = -1  # the sequence of the latest batch
        self.digest = 0  # of all that is held once that has happened: see `kvstore.events.changes.digest`
        self._append((AllBlocksCleared(),), timestamp)

    def append(self, changes: Sequence[TierChanges], page_size: int, timestamp: float) -> EncodedKvEventBatch:
        """The next batch. `page_size` in tokens, `timestamp` in seconds since 1970.

        Each change must be one: a page stored that was not there, or removed that was. What is said twice makes the
        digest that of something else."""
        events: list[KvEvent] = []
        for medium, of_tier in changes:
            for change in of_tier:
                events.append(event_of(change, medium, page_size))
                self.digest = 0 if isinstance(change, PagesCleared) else self.digest ^ digest(change.keys, medium)
        return self._append(tuple(events), timestamp)

    @property
    def first(self) -> int:
        """The sequence of the oldest batch that is still here."""
        return self.last - len(self._batches) + 1

    def batch(self, sequence: int) -> EncodedKvEventBatch:
        """That batch. Raises KeyError if it is not here, or not here any more."""
        return self._batches[sequence]

    def _append(self, events: tuple[KvEvent, ...], timestamp: float) -> EncodedKvEventBatch:
        self.last += 1
        batch = EncodedKvEventBatch(self.topic, self.last, _encoder.encode(_Payload(timestamp, events, 0)))
        self._batches[batch.sequence] = batch
        self._log_bytes += len(batch.payload)
        while len(self._batches) > self._keep or self._log_bytes > self._keep_bytes:
            self._log_bytes -= len(self._batches.pop(self.first).payload)
        return batch


def publisher_of(topic: bytes) -> str | None:
    """The incarnation that a topic names; none for another topic."""
    parts = topic.split(b"@", 2)
    if len(parts) != 3 or parts[0] != b"kv" or not parts[1]:
        return None
    try:
        return parts[1].decode()
    except UnicodeDecodeError:
        return None


def decode(topic: bytes, sequence: int, payload: bytes) -> KvEventBatch:
    """Read what `KvEventLog` wrote. Raises MalformedMessage."""
    try:
        if (holder := publisher_of(topic)) is None:
            raise ValueError(f"topic {topic!r} is not kv@<incarnation>@<model>")
        return KvEventBatch(holder, sequence, _decoder.decode(payload).events)
    except UNREADABLE as error:
        raise MalformedMessage(f"{len(payload)} bytes that are no batch of KV events: {error}") from None


def event_of(change: CacheChange, medium: Medium, page_size: int) -> KvEvent:
    match change:
        case PagesStored(parent=parent, keys=keys, tokens=tokens):
            return BlockStored(keys, parent or None, tokens, page_size, None, medium, None)
        case PagesRemoved(keys=keys):
            return BlockRemoved(keys, medium)
        case PagesCleared():
            return AllBlocksCleared()
