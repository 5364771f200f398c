"""Queue scans: the first requests in service order whenever there may be room, and every request in time."""

import hypothesis.strategies as st
from hypothesis import given

from router.members import ClusterChanges
from router.queueing.fairness import TenantFairness
from router.queueing.queue_scan import QueueScan
from router.queueing.waiting_queue import WaitingQueue
from router.request import Request
from tests.router.model import submit


class Waiting:
    """Requests of a queue, some of which are placed in a scan."""

    def __init__(self, count: int = 0) -> None:
        self.queue = WaitingQueue(TenantFairness(lambda tenant: 1.0), ageing=10.0)
        self.changes = ClusterChanges()
        self.rounds = QueueScan(self.queue, self.changes)
        self.come = 0
        self.comes(count)

    def comes(self, count: int = 1) -> None:
        for _ in range(count):
            self.queue.add(Request(submit(f"r{self.come}", 10), self.come, 0.0), 0.0)
            self.come += 1

    def round(self, *placed: int) -> list[int]:
        """Return the requests that a scan tries, when only those in `placed` can be placed."""
        tried: list[int] = []
        for request in self.rounds.scan(0.0):
            tried.append(int(request.name[1:]))
            if tried[-1] in placed:
                self.queue.remove(request, 0.0, placed=True)
            else:
                self.rounds.mark_unplaceable(request)
        return tried

    def room(self, *placed: int) -> list[int]:
        self.changes.room = True
        return self.round(*placed)

    def tick(self, *placed: int) -> list[int]:
        self.rounds.tick(again=False)
        return self.round(*placed) if self.rounds.due else []


def several(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def test_without_room_no_request_is_tried() -> None:
    waiting = Waiting(3)
    assert not waiting.rounds.due
    assert waiting.tick() == []
    waiting.changes.room = True
    assert waiting.rounds.due
    assert waiting.round() == [0, 1, 2]
    assert not waiting.rounds.due
    assert waiting.tick() == []


def test_the_first_eight_in_vain_end_a_round_and_ticks_bring_the_others_once() -> None:
    waiting = Waiting(20)
    assert waiting.room() == several(0, 7)
    assert waiting.tick() == [*several(0, 7), *several(8, 15)]
    assert waiting.tick() == [*several(0, 7), *several(16, 19)]
    assert waiting.tick() == []


def test_placed_requests_count_for_nothing() -> None:
    waiting = Waiting(20)
    assert waiting.room(0, 1, 5) == several(0, 10)
    assert waiting.tick(2, 12, 13) == [*several(2, 4), *several(6, 19)]
    assert waiting.tick() == []


def test_room_meanwhile_brings_those_once_more_that_have_been_tried() -> None:
    waiting = Waiting(30)
    waiting.room()
    assert waiting.tick() == [*several(0, 7), *several(8, 15)]
    assert waiting.room() == several(0, 7)
    assert waiting.tick() == [*several(0, 7), *several(16, 23)]
    assert waiting.tick() == [*several(0, 7), *several(24, 29)]
    assert waiting.tick() == [*several(0, 7), *several(8, 15)]


def test_the_first_are_tried_again_when_time_alone_may_let_them_go() -> None:
    waiting = Waiting(2)
    waiting.room()
    waiting.rounds.tick(again=True)
    assert waiting.rounds.due
    assert waiting.round() == [0, 1]


def test_a_round_that_is_left_early_is_taken_up() -> None:
    waiting = Waiting(20)
    waiting.room()
    waiting.rounds.tick(again=False)
    for request in waiting.rounds.scan(0.0):
        if request.name == "r10":
            break
        waiting.rounds.mark_unplaceable(request)
    assert waiting.tick() == [*several(0, 7), *several(10, 17)]


@given(st.lists(st.one_of(st.integers(1, 15), st.sampled_from(["room", "tick"])), max_size=30), st.data())
def test_every_request_is_tried_after_room(events: list[int | str], data: st.DataObject) -> None:
    """Every request is tried within the ticks that eight at a time need, and none twice in a scan."""
    waiting = Waiting()
    for event in events:
        if isinstance(event, int):
            waiting.comes(event)
            continue
        placed = data.draw(st.sets(st.integers(0, waiting.come), max_size=5))
        tried = waiting.room(*placed) if event == "room" else waiting.tick(*placed)
        assert len(set(tried)) == len(tried)
    left = {int(request.name[1:]) for request in waiting.queue.in_order(0.0)}
    missing = left.difference(waiting.room())
    for _ in range(2 * (len(left) // 8 + 1)):  # the rest of an old look, and a new one
        missing.difference_update(waiting.tick())
    assert not missing
    assert waiting.tick() == []
