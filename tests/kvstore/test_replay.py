"""Answers to followers of KV events, as pure state: bounded per turn, fair, and one of a kind for each follower."""

from collections import Counter

import pytest

from kvstore.events.changes import PagesCleared
from kvstore.events.replay import FOLLOWERS, PATIENCE, PER_TURN, EncodedSnapshotPart, ReplayEnd, ReplayItem, ReplayQueue
from kvstore.events.wire_format import EncodedKvEventBatch, KvEventLog


class Followers:
    """Takes what is sent, and knows what each follower got."""

    def __init__(self, batches: int = 100, keep: int = 10_000) -> None:
        self.log = KvEventLog("i", "m", 0.0, keep=keep)
        self.publish(batches)
        self.answers = ReplayQueue(self.log)
        self.got: dict[bytes, list[ReplayItem]] = {}
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.now = 0.0

    def publish(self, batches: int) -> None:
        for _ in range(batches):
            self.log.append([("CPU", [PagesCleared()])], 16, 0.0)

    def send(self, follower: bytes, item: ReplayItem) -> bool | None:
        if follower in self.gone:
            return None
        if follower in self.full:
            return False
        self.got.setdefault(follower, []).append(item)
        return True

    def turn(self) -> None:
        self.answers.send_some(self.send, self.now)

    def sequences(self, follower: bytes) -> list[int]:
        """Of the batches that a follower got; -1 is the end of a replay."""
        return [
            item.sequence if isinstance(item, EncodedKvEventBatch) else -1
            for item in self.got[follower]
            if not isinstance(item, EncodedSnapshotPart)
        ]


def test_a_turn_sends_a_bounded_number_of_messages_however_many_ask() -> None:
    followers = Followers(10_000)
    names = [bytes([number]) for number in range(FOLLOWERS)]
    for name in names:
        followers.answers.replay(name, 0, 0.0)
    before = 0
    for _ in range(100):
        followers.turn()
        sent = sum(map(len, followers.got.values()))
        assert sent - before == PER_TURN
        before = sent
        counts = Counter({name: len(followers.got.get(name, ())) for name in names})
        assert max(counts.values()) - min(counts.values()) <= 1  # they take turns
    assert followers.answers.under_way


def test_a_replay_is_what_was_published_until_it_was_asked_for() -> None:
    followers = Followers(50)
    followers.answers.replay(b"a", 3, 0.0)
    followers.turn()
    followers.publish(10)
    while followers.answers:
        followers.turn()
    assert followers.sequences(b"a") == [*range(3, 51), -1]
    assert not followers.answers.under_way
    followers.answers.replay(b"b", 2**63, 0.0)
    followers.turn()
    assert followers.sequences(b"b") == [-1]


def test_a_newer_question_replaces_the_older_one() -> None:
    followers = Followers(1_000)
    followers.answers.replay(b"a", 0, 0.0)
    followers.turn()
    for _ in range(500):  # costs nothing but the last one's answer
        followers.answers.replay(b"a", 990, 0.0)
    while followers.answers:
        followers.turn()
    assert followers.sequences(b"a") == [*range(PER_TURN), *range(990, 1_001), -1]


def test_a_slow_follower_goes_on_with_the_oldest_batch_that_is_kept() -> None:
    followers = Followers(30, keep=20)
    followers.answers.replay(b"a", 0, 0.0)
    followers.turn()
    assert followers.sequences(b"a")[0] == 11
    followers.publish(15)  # 25 to 45 are kept now; the replay ends with 30
    while followers.answers:
        followers.turn()
    assert followers.sequences(b"a") == [*range(11, 11 + PER_TURN), *range(27, 31), -1]
    followers.answers.replay(b"b", 0, 0.0)
    followers.publish(100)  # none of what was asked for is kept
    while followers.answers:
        followers.turn()
    assert followers.sequences(b"b") == [-1]


def test_a_snapshot_is_sent_to_each_that_waits_and_a_replay_goes_before_it() -> None:
    followers = Followers(2)
    followers.answers.snapshot(b"a", 0.0)
    followers.answers.snapshot(b"b", 0.0)
    followers.answers.replay(b"b", 1, 0.0)
    assert followers.answers.needs_snapshot
    followers.turn()
    followers.answers.add_snapshot((b"1", b"2"), 1.0)
    assert not followers.answers.needs_snapshot
    followers.turn()
    assert followers.got[b"a"] == [EncodedSnapshotPart(b"1"), EncodedSnapshotPart(b"2")]
    kinds = [type(item) for item in followers.got[b"b"]]
    assert kinds == [EncodedKvEventBatch, EncodedKvEventBatch, ReplayEnd, EncodedSnapshotPart, EncodedSnapshotPart]
    assert not followers.answers


def test_a_follower_that_does_not_read_is_given_up_and_delays_no_other() -> None:
    followers = Followers(100)
    followers.full = {b"slow"}
    followers.gone = {b"gone"}
    for name in (b"slow", b"gone", b"good"):
        followers.answers.replay(name, 0, 0.0)
    for _ in range(20):
        followers.turn()
    assert followers.sequences(b"good") == [*range(101), -1]
    assert (followers.answers.dropped, len(followers.answers)) == (1, 1)
    assert not followers.answers.under_way  # nothing was sent: the next turn need not come soon
    followers.now = PATIENCE + 0.1
    followers.turn()
    assert (followers.answers.dropped, len(followers.answers)) == (2, 0)


@pytest.mark.parametrize("kind", ["replay", "snapshot"])
def test_followers_beyond_the_limit_are_refused(kind: str) -> None:
    followers = Followers(1)
    for number in range(FOLLOWERS + 5):
        name = number.to_bytes(2, "big")
        if kind == "replay":
            followers.answers.replay(name, 0, 0.0)
        else:
            followers.answers.snapshot(name, 0.0)
    assert (len(followers.answers), followers.answers.dropped) == (FOLLOWERS, 5)
