"""What the followers of one publisher's KV events are still to be sent, and in which order. Pure.

Each turn sends a few messages, however many followers ask and however much they ask for. The followers take turns, one
message each. A follower has at most one replay and one snapshot under way: a newer question replaces the older one.
"""

# pyright: strict

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.events.wire_format import EncodedKvEventBatch, KvEventLog

FOLLOWERS = 32  # answered at a time; a follower beyond that is refused and asks again
PER_TURN = 16  # messages in one turn, to all followers together: about 0.1 ms
PATIENCE = 10.0  # seconds without room for a message after which an answer is given up


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """No more batches of this replay."""


@dataclass(frozen=True, slots=True)
class EncodedSnapshotPart:
    """A part of a snapshot, encoded."""

    payload: bytes


ReplayItem: TypeAlias = EncodedKvEventBatch | ReplayEnd | EncodedSnapshotPart
# Sends one item to a follower. True: sent; False: it has no room now; None: it has gone.
SendReplayItem: TypeAlias = Callable[[bytes, ReplayItem], bool | None]


@dataclass(slots=True)
class _Answer:
    since: float  # seconds: when the follower last took something, or asked
    first: int | None = None  # the next batch of its replay; none: it has asked for no replay
    last: int = -1  # the last batch of its replay: what is published later is not part of it
    waits: bool = False  # for a snapshot to be made
    parts: tuple[bytes, ...] = ()  # of its snapshot
    sent: int = 0  # how many of them

    @property
    def ready(self) -> bool:
        """There is something to send now."""
        return self.first is not None or self.sent < len(self.parts)


class ReplayQueue:
    """Every answer that is not complete."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._answers: dict[bytes, _Answer] = {}  # by follower; the first is next
        self.dropped = 0  # answers that a follower did not read, or that too many followers asked for
        self.under_way = False  # the last turn sent something, and there is more

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def needs_snapshot(self) -> bool:
        return any(answer.waits for answer in self._answers.values())

    def replay(self, follower: bytes, first: int, now: float) -> None:
        """The follower asks for the batches from sequence `first` to the latest one."""
        if (answer := self._of(follower, now)) is not None:
            answer.first, answer.last = first, self._log.last

    def snapshot(self, follower: bytes, now: float) -> None:
        """The follower asks for a snapshot, which `add_snapshot` brings."""
        if (answer := self._of(follower, now)) is not None:
            answer.waits = True

    def add_snapshot(self, parts: tuple[bytes, ...], now: float) -> None:
        """A snapshot, for every follower that waits for one."""
        for answer in self._answers.values():
            if answer.waits:
                answer.waits, answer.since, answer.parts, answer.sent = False, now, parts, 0

    def send_some(self, send: SendReplayItem, now: float) -> None:
        """Send some messages, each follower's in turn."""
        sent = 0
        full: set[bytes] = set()  # followers without room in this turn
        for _ in range(PER_TURN):
            follower = next((name for name, each in self._answers.items() if each.ready and name not in full), None)
            if follower is None:
                break
            answer = self._answers.pop(follower)
            accepted = send(follower, self._next(answer))
            if accepted:
                sent += 1
                answer.since = now
                self._advance(answer)
                if answer.ready or answer.waits:
                    self._answers[follower] = answer
            elif accepted is None or now - answer.since > PATIENCE:
                self.dropped += 1
            else:
                full.add(follower)
                self._answers[follower] = answer
        self.under_way = sent > 0 and any(answer.ready for answer in self._answers.values())

    def _of(self, follower: bytes, now: float) -> _Answer | None:
        answer = self._answers.get(follower)
        if answer is None:
            if len(self._answers) >= FOLLOWERS:
                self.dropped += 1
                return None
            answer = self._answers[follower] = _Answer(now)
        return answer

    def _next(self, answer: _Answer) -> ReplayItem:
        if answer.first is None:
            return EncodedSnapshotPart(answer.parts[answer.sent])
        answer.first = max(answer.first, self._log.first)  # older ones are not kept any more
        return self._log.batch(answer.first) if answer.first <= answer.last else ReplayEnd()

    def _advance(self, answer: _Answer) -> None:
        """The follower has got what `_next` returned."""
        if answer.first is None:
            answer.sent += 1
            if answer.sent == len(answer.parts):
                answer.parts, answer.sent = (), 0
        else:
            answer.first = answer.first + 1 if answer.first <= answer.last else None
