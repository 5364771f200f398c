"""How a worker belongs to a router: greeting, silence, replacement."""

from baton import messages as msg
from baton.errors import Incompatible
from baton.membership import Membership

ME = msg.Peer("decode", "d0", "n0", "me", 1)
HELLO = msg.Hello(ME)


def router(incarnation: str) -> msg.Peer:
    return msg.Peer("router", "router", "n0", incarnation, 2)


def envelope(incarnation: str, sequence: int, message: msg.Message) -> msg.Envelope[msg.Message]:
    return msg.Envelope(incarnation, "me", sequence, message)


def joined() -> Membership:
    membership = Membership(HELLO)
    assert membership.tick(0.0).send == (HELLO,)
    membership.handle(envelope("r1", 1, msg.Welcome(router("r1"), 100, 1_000)), 0.0)
    return membership


def test_hello_is_repeated_until_answered() -> None:
    membership = Membership(HELLO)
    assert [len(membership.tick(now).send) for now in (0.0, 0.5, 1.0, 1.5, 2.0)] == [1, 0, 1, 0, 1]


def test_a_welcome_sets_the_pace() -> None:
    membership = joined()
    assert membership.router == "r1"
    assert membership.heartbeat == 0.1
    assert not membership.tick(0.9).lost


def test_what_our_router_says_is_delivered_and_counted() -> None:
    membership = joined()
    assert membership.handle(envelope("r1", 2, msg.RouterHeartbeat()), 0.5).deliver
    assert membership.heard == 2
    assert not membership.handle(envelope("r2", 9, msg.RouterHeartbeat()), 0.5).deliver
    assert membership.heard == 2


def test_a_silent_router_loses_its_work_once() -> None:
    membership = joined()
    assert not membership.tick(1.0).lost
    verdict = membership.tick(1.1)
    assert verdict.lost
    assert verdict.send == (HELLO,)
    assert not membership.tick(1.2).lost


def test_our_own_pause_is_not_the_routers_silence() -> None:
    membership = joined()
    assert not membership.tick(60.0, paused=60.0).lost
    assert membership.tick(62.0).lost


def test_a_replaced_router_loses_the_work_of_its_predecessor() -> None:
    membership = joined()
    verdict = membership.handle(envelope("r2", 1, msg.RequestHello()), 0.2)
    assert verdict.lost
    assert verdict.send == (HELLO,)
    assert not membership.handle(envelope("r2", 2, msg.Welcome(router("r2"), 100, 1_000)), 0.3).lost
    assert membership.router == "r2"
    assert membership.handle(envelope("r3", 1, msg.Welcome(router("r3"), 100, 1_000)), 0.4).lost


def test_a_rejection_says_why_and_is_tried_again() -> None:
    membership = Membership(HELLO)
    membership.tick(0.0)
    membership.handle(envelope("r1", 1, msg.Rejected("incompatible", "page size 16 is not 32")), 0.1)
    assert isinstance(membership.rejected, Incompatible)
    assert membership.tick(1.1).send == (HELLO,)
    membership.handle(envelope("r1", 2, msg.Welcome(router("r1"), 100, 1_000)), 1.2)
    assert membership.rejected is None


def test_a_welcome_in_the_name_of_another_router_is_none() -> None:
    membership = joined()
    assert membership.handle(envelope("r1", 2, msg.Welcome(router("x"), 100, 86_400_000)), 0.1).lost is None
    assert membership.router == "r1"
    assert membership.tick(1.2).lost == "r1"
