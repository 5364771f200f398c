"""EventTracker by example: what it asks for, and when. `tests/router/test_kv_index.py` drives it over lossy links."""

from baton.messages import PageSegment, Snapshot
from kvstore.events.changes import snapshot_parts
from kvstore.events.wire_format import BlockStored, KvEventBatch
from kvstore.prefix_map.event_tracker import ApplyEvents, EventTracker, LoadSnapshot, RequestSnapshot
from tests.kvstore.chains import key, keys


def stored(sequence: int, chain: str) -> KvEventBatch:
    return KvEventBatch("h", sequence, (BlockStored(tuple(keys(chain)), None, (), 16, None, "GPU", None),))


def test_batches_that_overtake_the_snapshot_are_applied_after_it() -> None:
    tracker = EventTracker()
    assert tracker.track("h", 0.0) == [RequestSnapshot("h")]
    assert tracker.track("h", 0.0) == []
    assert tracker.batch(stored(4, "a"), 0.0) == []
    assert tracker.batch(stored(5, "b"), 0.0) == []
    (snapshot,) = snapshot_parts(4, [])
    assert tracker.snapshot("h", snapshot, 0.0) == [
        LoadSnapshot("h", (), True, 4),
        ApplyEvents("h", stored(5, "b").events, 5),
    ]
    assert tracker.batch(stored(6, "c"), 0.0) == [ApplyEvents("h", stored(6, "c").events, 6)]
    assert tracker.batch(stored(6, "c"), 0.0) == []
    assert tracker.batch(stored(8, "a"), 0.0) == [RequestSnapshot("h")]
    assert not tracker.following("h")
    assert tracker.gaps == 1


def test_a_snapshot_in_pieces_that_do_not_fit_is_asked_for_again() -> None:
    tracker = EventTracker()
    tracker.track("h", 0.0)
    runs = (PageSegment(b"", key("a"), "CPU"),)
    assert tracker.snapshot("h", Snapshot(1, runs, 0, False), 0.0) == [LoadSnapshot("h", runs, True, None)]
    assert tracker.snapshot("h", Snapshot(1, (), 2, True), 0.0) == [RequestSnapshot("h")]
    assert tracker.snapshot("h", Snapshot(1, (), 3, True), 0.0) == [], "the rest of what has been given up"
    assert tracker.snapshot("h", Snapshot(1, (), 0, False), 0.0) == [LoadSnapshot("h", (), True, None)]
    assert tracker.snapshot("h", Snapshot(2, (), 1, True), 0.0) == [RequestSnapshot("h")]
    assert not tracker.following("h")
    assert tracker.snapshot("h", Snapshot(3, runs, 0, False), 0.0) == [LoadSnapshot("h", runs, True, None)]
    assert tracker.snapshot("h", Snapshot(3, (), 1, True), 0.0) == [LoadSnapshot("h", (), False, 3)]
    assert tracker.following("h")


def test_silence_is_answered_by_asking_again() -> None:
    tracker = EventTracker()
    tracker.track("h", 0.0)
    assert tracker.tick(0.5) == []
    assert tracker.tick(1.0) == [RequestSnapshot("h")]
    assert tracker.tick(1.5) == []


def test_strangers_are_ignored() -> None:
    tracker = EventTracker()
    assert tracker.batch(stored(0, "a"), 0.0) == []
    assert tracker.snapshot("h", Snapshot(0, ()), 0.0) == []
    assert tracker.lost("h", 0.0) == []


def following(digest: int = 7) -> EventTracker:
    """A tracker that has just loaded batch 4, with that digest in the map."""
    tracker = EventTracker()
    tracker.track("h", 0.0)
    tracker.snapshot("h", Snapshot(4, ()), 0.0)
    assert tracker.applied("h", 4, digest, 0.0) == []
    return tracker


def test_a_digest_is_compared_after_the_same_batch_only() -> None:
    tracker = following()
    assert tracker.digest_reported("h", 4, 7, 7, 0.0) == []
    assert tracker.digest_reported("h", 3, 99, 7, 0.0) == [], "from before the snapshot"
    assert tracker.digest_reported("h", 5, 8, 7, 0.0) == [], "batch 5 is still on its way"
    tracker.batch(stored(5, "a"), 0.1)
    assert tracker.applied("h", 5, 8, 0.1) == []
    assert tracker.divergences == 0
    assert tracker.digest_reported("h", 6, 9, 8, 0.2) == []
    tracker.batch(stored(6, "b"), 0.3)
    assert tracker.applied("h", 6, 10, 0.3) == [RequestSnapshot("h")]
    assert (tracker.divergences, tracker.gaps) == (1, 0)
    assert tracker.digest_reported("h", 6, 9, 10, 0.4) == [], "it is being healed"


def test_a_map_that_changes_between_two_batches_is_found_out() -> None:
    tracker = following()
    assert tracker.digest_reported("h", 4, 7, 7, 1.0) == []
    assert tracker.digest_reported("h", 4, 7, 8, 2.0) == [RequestSnapshot("h")]


def test_a_batch_that_only_a_heartbeat_knows_of_counts_as_lost_after_a_while() -> None:
    tracker = following()
    tracker.digest_reported("h", 6, 1, 7, 10.0)
    assert tracker.tick(11.5) == []
    tracker.batch(stored(5, "a"), 11.6)
    assert tracker.tick(13.5) == [], "they do come"
    assert tracker.tick(13.7) == [RequestSnapshot("h")]
    assert tracker.gaps == 1


def test_a_source_that_never_agrees_is_asked_less() -> None:
    tracker = following()
    now, asks = 0.0, 0
    while now < 300.0:
        asks += len(tracker.digest_reported("h", 4, 99, 7, now))
        if not tracker.following("h"):
            tracker.snapshot("h", Snapshot(4, ()), now)
            tracker.applied("h", 4, 7, now)
        now += 0.25
    assert 5 <= asks <= 12
    assert tracker.divergences == asks
    assert tracker.digest_reported("h", 4, 7, 7, now) == [], "agreed at last"
    tracker.batch(stored(5, "a"), now)
    tracker.applied("h", 5, 1, now)
    assert tracker.digest_reported("h", 5, 2, 1, now + 60.0) == [RequestSnapshot("h")]


def test_a_snapshot_that_makes_no_sense_is_asked_for_again_later() -> None:
    tracker = following()
    tracker.unusable("h", 20.0)
    assert not tracker.following("h")
    assert tracker.tick(20.5) == []
    assert tracker.tick(21.0) == [RequestSnapshot("h")]


def test_what_waits_for_a_snapshot_is_bounded() -> None:
    tracker = EventTracker()
    tracker.track("h", 0.0)
    many = BlockStored(tuple(key("a") for _ in range(100_000)), None, (), 16, None, "GPU", None)
    for sequence in range(50):
        tracker.batch(KvEventBatch("h", sequence, (many,)), 0.0)
    assert [batch.sequence for batch in tracker._sources["h"].backlog] == list(range(41, 50))
    assert tracker.snapshot("h", Snapshot(10, ()), 0.0) == [LoadSnapshot("h", (), True, 10), RequestSnapshot("h")], (
        "a gap at 11"
    )
