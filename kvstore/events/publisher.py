"""KV events as their publisher sends them: a worker, or a store.

    changes ──publish──▶ numbered, digested ──PUB──▶ whoever follows
                              kept                       │ missed some
    snapshot ◀──answer──── replay socket ◀───────────────┘

Any number of followers may ask, for batches that were published or for a snapshot. The publisher does not know them.
Each turn reads a few requests and sends a few messages (`kvstore.events.replay`). A snapshot is made once for all its
waiters, and making snapshots takes a small share of the owner's time, however often followers ask.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from baton import hosts
from baton.clock import Clock
from baton.messages import PageSegment
from baton.samples import Sample
from baton.wire import Publisher, ReplayServer
from kvstore.events.changes import TierChanges, in_parts, packed_digest, snapshot_parts
from kvstore.events.replay import EncodedSnapshotPart, ReplayEnd, ReplayItem, ReplayQueue
from kvstore.events.wire_format import EncodedKvEventBatch, KvEventLog

log = logging.getLogger(__name__)

_QUESTIONS = 16  # heard in one turn, of all followers together
_SHARE = 10  # a snapshot that took a second is not followed by another within ten

_encode = msgspec.msgpack.Encoder().encode


class KvEventPublisher:
    """One publisher's sockets, its numbered batches, and the digest that its heartbeats tell."""

    def __init__(self, incarnation: str, model: str, clock: Clock, host: str = "127.0.0.1") -> None:
        """`model`: its name. Raises PortInUse or StartupError."""
        self._clock = clock
        self._log = KvEventLog(incarnation, model, time.time())
        self._publisher = Publisher(hosts.endpoint(host))
        try:
            self._replayer = ReplayServer(hosts.endpoint(host))
        except BaseException:
            self._publisher.close()
            raise
        self.endpoint = self._publisher.endpoint  # of the batches: for `Hello.events`
        self.replay = self._replayer.endpoint  # for `Hello.replay`
        self.socket = self._replayer.socket  # on which followers ask, for a Poller
        self._answers = ReplayQueue(self._log)
        self._parts: tuple[bytes, ...] = ()  # the parts of a snapshot that is still true
        self._next_snapshot = float("-inf")
        self._corrected = 0  # times that our digest was not that of what we hold: a mistake of ours

    @property
    def sequence(self) -> int:
        """Of the last batch: for `Heartbeat.events`."""
        return self._log.last

    @property
    def digest(self) -> int:
        """Of all that was held once that batch had happened: for `Heartbeat.digest`."""
        return self._log.digest

    @property
    def under_way(self) -> bool:
        """Followers take what they asked for, and there is more: the next turn should come soon."""
        return self._answers.under_way

    @property
    def malformed(self) -> int:
        """Questions that were none."""
        return self._replayer.malformed

    @property
    def metric_samples(self) -> Mapping[str, Sample]:
        return {"kv_event_answers_dropped": self._answers.dropped, "kv_event_digests_corrected": self._corrected}

    def publish(self, changes: Sequence[TierChanges], page_size: int) -> None:
        """What has changed since the last call, by tier, in as many batches as that takes."""
        for part in in_parts(changes):
            batch = self._log.append(part, page_size, time.time())
            self._publisher.send(batch.topic, batch.sequence, batch.payload)
            self._parts = ()

    def answer(self, snapshot: Callable[[], Iterable[PageSegment]]) -> None:
        """Hear what followers ask and go on answering. Call every turn, after `publish` and before anything changes:
        `snapshot` must tell of exactly what has been published."""
        now = self._clock.now()
        for follower, question in self._replayer.receive(_QUESTIONS):
            if isinstance(question, int):
                self._answers.replay(follower, question, now)
            else:
                self._answers.snapshot(follower, now)
        if self._answers.needs_snapshot and (parts := self._snapshot(snapshot, now)):
            self._answers.add_snapshot(parts, now)
        self._answers.send_some(self._send, now)

    def close(self) -> None:
        self._publisher.close()
        self._replayer.close()

    def _send(self, follower: bytes, item: ReplayItem) -> bool | None:
        match item:
            case EncodedKvEventBatch(sequence=sequence, payload=payload):
                return self._replayer.send_batch(follower, sequence, payload)
            case ReplayEnd():
                return self._replayer.send_batch(follower, -1, b"")
            case EncodedSnapshotPart(payload=payload):
                return self._replayer.send_part(follower, self._log.topic, payload)

    def _snapshot(self, snapshot: Callable[[], Iterable[PageSegment]], now: float) -> tuple[bytes, ...]:
        """One of the present; nothing if it is too early for another."""
        if not self._parts and now >= self._next_snapshot:
            runs = list(snapshot())
            self._check(runs)
            self._parts = tuple(_encode(part) for part in snapshot_parts(self._log.last, runs))
            self._next_snapshot = now + _SHARE * (self._clock.now() - now)
        return self._parts

    def _check(self, runs: Iterable[PageSegment]) -> None:
        """The held pages are the truth. Followers of our events see by the digest that the events said something
        else."""
        truth = 0
        for run in runs:
            truth ^= packed_digest(run.keys, run.medium)
        if truth != self._log.digest:
            log.error("the events up to %d do not add up to the pages that are held", self._log.last)
            self._corrected += 1
            self._log.digest = truth
