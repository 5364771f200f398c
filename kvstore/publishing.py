"""KV events as their publisher sends them: a worker, or a store.

    changes ──publish──▶ numbered, digested ──PUB──▶ whoever follows
                              kept                       │ missed some
    snapshot ◀──answer──── replay socket ◀───────────────┘

Any number of followers may ask, for batches that were published or for a snapshot: nothing here knows who they are.
Answers go out as fast as each follower reads and no faster, some of them each turn, and are given up for one that does
not read: it costs its publisher neither time nor memory. A snapshot is made once for all who wait for it, and making
them takes a small share of the owner's time, however often somebody asks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton import hosts
from baton.clock import Clock
from baton.messages import PageRun
from baton.metrics import Sample
from baton.wire import Publisher, Replayer
from kvstore.changes import TierChanges, in_parts, packed_digest, snapshot_parts
from kvstore.events import EncodedBatch, EventLog

log = logging.getLogger(__name__)

_FOLLOWERS = 32  # answered at a time; who asks beyond that asks again
_PER_TURN = 128  # messages to one follower
_PATIENCE = 10.0  # seconds without room for a message after which an answer is given up
_SHARE = 10  # a snapshot that took a second is not followed by another within ten

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Answer:
    """What one follower is still to get. `whole`: it waits for a snapshot."""

    since: float  # when it last took something, seconds
    whole: bool = False
    batches: deque[EncodedBatch | None] = field(default_factory=deque[EncodedBatch | None])  # None is their end
    parts: deque[bytes] = field(default_factory=deque[bytes])


class PageEvents:
    """One publisher's sockets, its numbered batches, and the digest that its heartbeats tell."""

    def __init__(self, incarnation: str, model: str, clock: Clock, host: str = "127.0.0.1") -> None:
        """`model`: its name. Raises PortInUse or StartupError."""
        self._clock = clock
        self._log = EventLog(incarnation, model, time.time())
        self._publisher = Publisher(hosts.endpoint(host))
        try:
            self._replayer = Replayer(hosts.endpoint(host))
        except BaseException:
            self._publisher.close()
            raise
        self._answers: dict[bytes, _Answer] = {}
        self._made: tuple[bytes, ...] = ()  # the parts of a snapshot that is still true
        self._next_snapshot = float("-inf")
        self._given_up = 0  # answers that somebody did not read, or that too many asked for
        self._corrected = 0  # times that our digest was not that of what we hold: a mistake of ours

    @property
    def endpoint(self) -> str:
        """Of the batches: for `Hello.events`."""
        return self._publisher.endpoint

    @property
    def replay(self) -> str:
        """Of the replay socket: for `Hello.replay`."""
        return self._replayer.endpoint

    @property
    def socket(self) -> Any:
        """For a Poller: somebody asks."""
        return self._replayer.socket

    @property
    def sequence(self) -> int:
        """Of the last batch: for `Heartbeat.events`."""
        return self._log.last

    @property
    def digest(self) -> int:
        """Of all that was held once that batch had happened: for `Heartbeat.digest`."""
        return self._log.digest

    @property
    def malformed(self) -> int:
        """Questions that were none."""
        return self._replayer.malformed

    @property
    def figures(self) -> Mapping[str, Sample]:
        """For the metrics page."""
        return {"kv_event_answers_dropped": self._given_up, "kv_event_digests_corrected": self._corrected}

    def publish(self, changes: Sequence[TierChanges], page_size: int) -> None:
        """What has changed since the last call, by tier, in as many batches as that takes."""
        for part in in_parts(changes):
            batch = self._log.append(part, page_size, time.time())
            self._publisher.send(batch.topic, batch.sequence, batch.payload)
            self._made = ()

    def answer(self, snapshot: Callable[[], Iterable[PageRun]]) -> None:
        """Hear what followers ask and go on answering. Call every turn, after `publish` and before anything changes:
        `snapshot` must tell of exactly what has been published."""
        now = self._clock.now()
        for follower, question in self._replayer.receive():
            answer = self._answers.get(follower)
            if answer is None:
                if len(self._answers) >= _FOLLOWERS:
                    self._given_up += 1
                    continue
                answer = self._answers[follower] = _Answer(now)
            if isinstance(question, int):
                answer.batches = deque([*self._log.replay(question), None])
            else:
                answer.whole = True
        if any(answer.whole for answer in self._answers.values()) and (made := self._snapshot(snapshot, now)):
            for answer in self._answers.values():
                if answer.whole:
                    answer.whole, answer.since, answer.parts = False, now, deque(made)
        for follower, answer in list(self._answers.items()):
            self._go_on(follower, answer, now)

    def close(self) -> None:
        self._publisher.close()
        self._replayer.close()

    def _go_on(self, follower: bytes, answer: _Answer, now: float) -> None:
        """Send as much as fits."""
        for _ in range(_PER_TURN):
            if answer.batches:
                batch = answer.batches[0]
                sequence, payload = (-1, b"") if batch is None else (batch.sequence, batch.payload)
                sent = self._replayer.send_batch(follower, sequence, payload)
            elif answer.parts:
                sent = self._replayer.send_part(follower, self._log.topic, answer.parts[0])
            elif answer.whole:
                return
            else:
                del self._answers[follower]
                return
            if sent:
                answer.since = now
                (answer.batches or answer.parts).popleft()
            else:
                if sent is None or now - answer.since > _PATIENCE:
                    self._given_up += 1
                    del self._answers[follower]
                return

    def _snapshot(self, snapshot: Callable[[], Iterable[PageRun]], now: float) -> tuple[bytes, ...]:
        """One of the present; nothing if it is too early for another."""
        if not self._made and now >= self._next_snapshot:
            runs = list(snapshot())
            self._check(runs)
            self._made = tuple(_encode(part) for part in snapshot_parts(self._log.last, runs))
            self._next_snapshot = now + _SHARE * (self._clock.now() - now)
        return self._made

    def _check(self, runs: Iterable[PageRun]) -> None:
        """What is held is the truth. Whoever followed our events sees from the digest that they told something else."""
        truth = 0
        for run in runs:
            truth ^= packed_digest(run.keys, run.medium)
        if truth != self._log.digest:
            log.error("the events up to %d do not add up to the pages that are held", self._log.last)
            self._corrected += 1
            self._log.digest = truth
