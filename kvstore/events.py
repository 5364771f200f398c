"""KV events on the wire, in the format that vLLM publishes, so that other routers can read ours.

A batch is three ZMQ frames: topic, sequence (u64, big-endian), payload. The payload is MessagePack: an array of
[time, events, data parallel rank], each event a map of its fields with its name under "type".

vLLM wrote events as arrays too until mid 2026; since then only the batch is one, and readers take events as maps.
What we add must not disturb those readers, some of which refuse a batch with a fourth element. So the publisher's
incarnation travels in the topic, "kv@<incarnation>@<model>", where such readers look for the name of a pod.

Token ids are the users' prompts and stay empty. Block hashes are our page keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from baton.errors import MalformedMessage
from baton.messages import Key, Medium
from kvstore.changes import Change, Cleared, Removed, Stored
from kvstore.keys import START
from kvstore.prefix_map import PrefixMap


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
    """The publisher has nothing (any more)."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Payload(Struct, frozen=True, array_like=True):
    ts: float  # seconds since 1970
    events: tuple[Event, ...]
    data_parallel_rank: int  # always written: some readers take exactly three elements


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The three frames of one batch, as `baton.wire.Publisher.send` takes them."""

    topic: bytes
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """One decoded batch. `holder` is the publisher's incarnation."""

    holder: str
    sequence: int
    events: tuple[Event, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Payload)


class EventLog:
    """Numbers a publisher's batches from 0 and keeps the last ones.

    Batch 0 is there from the start and says that nothing is held: true of every new process, and it gives a snapshot
    taken before any page was stored a sequence to name."""

    def __init__(self, incarnation: str, model: str, timestamp: float, keep: int = 1_000) -> None:
        """`timestamp`: seconds since 1970; `keep`: how many batches `replay` reaches back."""
        self._topic = f"kv@{incarnation}@{model}".encode()
        self._kept: deque[EncodedBatch] = deque(maxlen=keep)
        self.last = -1  # the sequence of the latest batch
        self._append((AllBlocksCleared(),), timestamp)

    def append(self, changes: Sequence[Change], medium: Medium, page_size: int, timestamp: float) -> EncodedBatch:
        """The next batch. `page_size` in tokens, `timestamp` in seconds since 1970."""
        return self._append(tuple(_event(change, medium, page_size) for change in changes), timestamp)

    def replay(self, first: int = 0) -> list[EncodedBatch]:
        """The batches still here, from sequence `first` on."""
        return [batch for batch in self._kept if batch.sequence >= first]

    def _append(self, events: tuple[Event, ...], timestamp: float) -> EncodedBatch:
        self.last += 1
        batch = EncodedBatch(self._topic, self.last, _encoder.encode(_Payload(timestamp, events, 0)))
        self._kept.append(batch)
        return batch


def decode(topic: bytes, sequence: int, payload: bytes) -> Batch:
    """Read what `EventLog` wrote. Raises MalformedMessage."""
    parts = topic.split(b"@", 2)
    try:
        if len(parts) != 3 or parts[0] != b"kv" or not parts[1]:
            raise ValueError(f"topic {topic!r} is not kv@<incarnation>@<model>")
        return Batch(parts[1].decode(), sequence, _decoder.decode(payload).events)
    except (ValueError, msgspec.MsgspecError) as error:
        raise MalformedMessage(f"{len(payload)} bytes that are no batch of KV events: {error}") from None


def apply(prefixes: PrefixMap, holder: str, events: Sequence[Event]) -> bool:
    """Bring `prefixes` up to date. False when an event named a parent that is not there: a snapshot is due."""
    whole = True
    for event in events:
        match event:
            case BlockStored(block_hashes=keys, parent_block_hash=parent, medium=medium):
                whole &= prefixes.stored(holder, parent or START, keys, medium)
            case BlockRemoved(block_hashes=keys, medium=medium):
                prefixes.removed(holder, keys, medium)
            case AllBlocksCleared():
                prefixes.cleared(holder)
    return whole


def _event(change: Change, medium: Medium, page_size: int) -> Event:
    match change:
        case Stored(parent=parent, keys=keys):
            return BlockStored(keys, parent or None, (), page_size, None, medium, None)
        case Removed(keys=keys):
            return BlockRemoved(keys, medium)
        case Cleared():
            return AllBlocksCleared()
