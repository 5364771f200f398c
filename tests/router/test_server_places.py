"""Which connections are closed when places or memory run out."""

from router.frontend.api.server import SPARE, Places


class One:
    ended = False

    def abort(self) -> None:
        self.ended = True


def many(count: int) -> list[One]:
    return [One() for _ in range(count)]


def test_the_longest_idle_connection_goes_first_and_a_served_one_never() -> None:
    places: Places[One] = Places(2)
    ones = many(2 + SPARE)
    for number, one in enumerate(ones):
        assert places.enter(one, number + 1)
    places.leave(ones[0])  # it is served
    places.leave(ones[1])
    places.waits(ones[1], 0)  # it was served, and is the last in the line now
    for expected in (ones[2], ones[3]):
        assert places.enter(One(), 3 + SPARE)
        assert expected.ended
    assert not ones[0].ended
    assert not ones[1].ended


def test_there_is_no_place_only_while_all_are_served() -> None:
    places: Places[One] = Places(2)
    ones = many(2 + SPARE)
    for number, one in enumerate(ones):
        places.enter(one, number + 1)
        places.leave(one)
    assert not places.enter(One(), 3 + SPARE)
    places.waits(ones[5], 0)
    assert places.enter(One(), 3 + SPARE)
    assert ones[5].ended


def test_bytes_of_all_that_wait_are_bounded() -> None:
    places: Places[One] = Places(100, held=1_000)
    idle, first, second, third = many(4)
    for one in (idle, first, second, third):
        places.enter(one, 1)
    places.waits(first, 400)
    places.waits(second, 400)
    places.waits(first, 500)  # it keeps its turn
    places.waits(third, 300)
    assert (idle.ended, first.ended, second.ended, third.ended) == (False, True, False, False)
    places.waits(second, 0)  # its head has come
    places.waits(third, 1_000)
    assert not third.ended
    places.waits(third, 1_001)
    assert third.ended
    places.leave(second)
    places.leave(third)  # again, when the connection is lost
    places.waits(idle, 1_000)
    assert not idle.ended
