"""What a router's requests wait for."""

import pytest
from msgspec import structs

from baton import config as settings
from baton.messages import Accepted, Cancel, Decode, Prefilled, Refused
from tests.router.lab import Lab
from tests.router.model import CONFIG, ROUTER


def test_a_request_waits_for_its_workers_as_long_as_it_needs_them(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.submit(prompt=10)
    me = ("request", ROUTER.incarnation, "r")
    order = lab.decode
    lab.say(decode, Accepted(order.request, order.attempt, 0))
    assert set(lab.state.waits()) == {(me, ("sequence", decode, "r")), (me, ("prompt", prefill, "r"))}
    lab.say(prefill, Prefilled(order.request, order.attempt, 8, 0, 2, 0, 0))
    assert set(lab.state.waits()) == {(me, ("sequence", decode, "r"))}


def test_a_request_in_the_queue_waits_for_no_process(lab: Lab) -> None:
    lab.submit(prompt=10)
    assert not set(lab.state.waits())


def with_quantum(tokens: int) -> Lab:
    classes = {0: settings.ObjectivesConfig(quantum_tokens=tokens)}
    return Lab(structs.replace(CONFIG, router=structs.replace(CONFIG.router, slo_classes=classes)))


@pytest.mark.parametrize(("priority", "yields"), [(0, True), (1, False)], ids=["equally-urgent", "less-urgent"])
def test_a_runaway_gives_its_place_to_one_that_waits_and_goes_on_with_its_next_token(
    priority: int, yields: bool
) -> None:
    """Its worker has no room for both. Nothing is lost, and nothing is said twice."""
    lab = with_quantum(3)
    (decode,) = lab.colocated()
    lab.submit("long", max_tokens=8)
    lab.say(decode, Accepted("long", 1, 0))
    lab.tokens(decode, "long", 1, 10, 21, 22)
    lab.submit("waits", priority=priority)
    lab.say(decode, Refused("waits", 1, "busy"))
    lab.advance(0.1)
    lab.tokens(decode, "long", 1, 12, 23)
    assert bool(lab.sent(Cancel, decode)) == yields
    if not yields:
        return
    assert [order.request for order in lab.sent(Decode)] == ["long", "waits", "waits", "long"], "there is room now"
    lab.say(decode, Refused("long", 2, "busy"))
    lab.say(decode, Accepted("waits", 2, 0))
    lab.tokens(decode, "waits", 2, 10, 31, 32, 33, 34, 35, finish="length")
    assert lab.outputs["waits"] == [31, 32, 33, 34, 35]
    lab.beat(decode)
    order = lab.decode
    assert (order.request, order.attempt) == ("long", 3)
    lab.say(decode, Accepted("long", 3, 0))
    lab.tokens(decode, "long", 3, 13, 24, 25)
    assert lab.outputs["long"] == [21, 22, 23, 24, 25]
    assert "long" not in lab.ends


def test_a_runaway_that_waits_for_too_long_stands_before_all_newcomers() -> None:
    lab = with_quantum(1)
    (decode,) = lab.colocated()
    lab.submit("long")
    lab.say(decode, Accepted("long", 1, 0))
    lab.submit("waits")
    lab.say(decode, Refused("waits", 1, "busy"))
    lab.advance(0.1)
    lab.tokens(decode, "long", 1, 10, 21)
    seen = 2
    first = list[str]()
    while "waits" not in lab.ends or len(first) < 20:  # it may wait for so long and no longer
        assert "long" not in lab.ends
        if "waits" in lab.ends and "newcomer" not in lab.requests:
            lab.submit("newcomer")
        orders = lab.sent(Decode)[seen:]
        seen += len(orders)
        first += [order.request for order in orders[:1]]
        for order in orders:
            lab.say(decode, Refused(order.request, order.attempt, "busy"))
        lab.advance(0.4)
        lab.beat(decode)
    assert list(dict.fromkeys(first)) == ["waits", "long"]
    assert "newcomer" in lab.requests
