"""Fairness between routers: of the routers that were refused, the one that has least goes first."""

from baton.router_fairness import RouterFairness


def test_room_is_kept_for_a_refused_router_with_less() -> None:
    turns = RouterFairness()
    held = {"a": 3, "b": 1}
    assert not turns.must_wait("a", held, 0.0)
    turns.refused("b", 0.0)
    assert turns.must_wait("a", held, 0.5)
    assert not turns.must_wait("b", held, 0.5)
    assert not turns.must_wait("a", {"a": 1, "b": 1}, 0.5)


def test_two_that_were_refused_do_not_wait_for_each_other() -> None:
    turns = RouterFairness()
    turns.refused("a", 0.0)
    turns.refused("b", 0.0)
    assert [turns.must_wait(router, {"a": 2}, 0.1) for router in "ab"] == [True, False]
    assert [turns.must_wait(router, {}, 0.1) for router in "ab"] == [False, False]


def test_room_is_kept_for_a_short_time() -> None:
    turns = RouterFairness()
    turns.refused("b", 0.0)
    assert not turns.must_wait("a", {"a": 1}, 1.0)
    turns.refused("b", 2.0)
    turns.admitted("b")
    assert not turns.must_wait("a", {"a": 1}, 2.1)
