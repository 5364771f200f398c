"""What a router's requests wait for."""

from baton.messages import Accepted, Prefilled
from tests.router.lab import Lab
from tests.router.model import ROUTER


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
