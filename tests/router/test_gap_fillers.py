"""The lowest class fills gaps: it never delays other requests, gives way to them, and goes on with the same tokens."""

import pytest

from baton import messages as msg
from baton.messages import LOWEST_CLASS
from router.events import Finished
from tests.router.lab import Lab, lab_with


def of_lowest(lab: Lab, name: str, **more: object) -> None:
    lab.submit(name, priority=LOWEST_CLASS, **more)  # type: ignore[arg-type]


def start(lab: Lab, worker: str, name: str, *tokens: int) -> None:
    lab.say(worker, msg.Accepted(name, 1))
    lab.say(worker, msg.Started(name, 1))
    lab.tokens(worker, name, 1, 10, *tokens, computed=10)


def placed(lab: Lab) -> list[str]:
    return [order.request for order in lab.sent(msg.Decode)]


@pytest.mark.technique("Batches that fill gaps")
def test_a_request_that_runs_gives_way_and_goes_on_with_every_token() -> None:
    lab = lab_with(queue_timeout_ms=500)
    decode = lab.join("decode", "decode-0")
    of_lowest(lab, "batch")
    start(lab, decode, "batch", 50, 51)
    lab.submit("urgent")
    assert lab.cancelled(decode, "batch") == [1]
    assert placed(lab) == ["batch", "urgent"]
    start(lab, decode, "urgent", 60)
    lab.advance(0.6)  # a new request may not wait for so long
    assert lab.alive("batch")
    assert placed(lab) == ["batch", "urgent"]
    lab.tokens(decode, "urgent", 1, 11, 61, finish="stop")
    again = lab.decode
    assert (again.request, again.attempt, again.prompt, len(again.tokens)) == ("batch", 2, 10, 4 * 12)
    lab.say(decode, msg.Accepted("batch", 2))
    lab.tokens(decode, "batch", 2, 12, 52, finish="stop")
    assert lab.emitted("batch") == [50, 51, 52]
    assert lab.end("batch").outcome == Finished("stop")
    assert lab.end("batch").summary.served.attempts == 2


@pytest.mark.technique("A quantum of service for runaways")
def test_a_runaway_yields_once_others_wait_and_goes_on_with_the_same_tokens() -> None:
    lab = lab_with(service_quantum={0: 3})
    decode = lab.join("decode", "decode-0")
    lab.submit("long", max_tokens=20)
    start(lab, decode, "long", 50, 51, 52, 53)
    assert not lab.sent(msg.Cancel)  # no other request waits
    lab.submit("other")
    lab.say(decode, msg.Refused("other", 1, "busy"))
    lab.tokens(decode, "long", 1, 14, 54)
    assert lab.cancelled(decode, "long") == [1]
    assert placed(lab)[2:] == ["other", "long"]
    order = lab.decode
    assert (order.attempt, len(order.tokens)) == (2, 4 * 15)
    lab.say(decode, msg.Accepted("long", 2))
    lab.tokens(decode, "long", 2, 15, 55, finish="stop")
    assert lab.emitted("long") == [50, 51, 52, 53, 54, 55]
    assert lab.end("long").summary.served.attempts == 2


def test_a_class_without_a_quantum_never_yields() -> None:
    lab = lab_with(service_quantum={1: 3})
    decode = lab.join("decode", "decode-0")
    lab.submit("long", max_tokens=20)
    start(lab, decode, "long", 50, 51, 52, 53)
    lab.submit("other")
    lab.say(decode, msg.Refused("other", 1, "busy"))
    lab.tokens(decode, "long", 1, 14, 54)
    assert not lab.sent(msg.Cancel)


def test_while_others_wait_none_of_the_lowest_class_begins(lab: Lab) -> None:
    lab.submit("first")  # no worker is live
    of_lowest(lab, "batch")
    decode = lab.join("decode", "decode-0")
    assert placed(lab) == ["first"]
    lab.say(decode, msg.Refused("first", 1, "busy"))
    lab.advance(1.0)
    assert "batch" not in placed(lab)


def test_a_flood_of_another_tenants_batch_is_shed_before_any_other_request() -> None:
    lab = lab_with(max_queued=3)
    for number in range(3):
        of_lowest(lab, f"batch {number}", tenant="a")
    for number in range(3):
        lab.submit(f"urgent {number}", tenant="b")
    assert [name for name in (f"batch {n}" for n in range(3)) if lab.alive(name)] == []
    assert all(lab.alive(f"urgent {number}") for number in range(3))


def test_one_that_has_yielded_is_not_shed() -> None:
    lab = lab_with(max_queued=1)
    decode = lab.join("decode", "decode-0")
    of_lowest(lab, "batch")
    start(lab, decode, "batch", 50)
    lab.submit("urgent")
    start(lab, decode, "urgent", 60)
    for number in range(3):
        of_lowest(lab, f"new {number}")
    assert lab.alive("batch")


def test_requests_of_the_lowest_class_share_a_worker(lab: Lab, decode: str) -> None:
    for name in "abc":
        of_lowest(lab, name)
    assert placed(lab) == ["a", "b"]  # as many prompts at a time as a worker takes
    start(lab, decode, "a", 50)
    lab.advance(0.1)
    assert placed(lab) == ["a", "b", "c"]
    assert not lab.sent(msg.Cancel)


def test_requests_that_run_give_way_to_one_that_waits_for_room(lab: Lab, decode: str) -> None:
    of_lowest(lab, "running")
    start(lab, decode, "running", 50)
    of_lowest(lab, "refused")
    lab.say(decode, msg.Refused("refused", 1, "busy"))
    assert not lab.cancelled(decode, "running")
    lab.submit("urgent")
    assert lab.cancelled(decode, "running") == [1]
    assert placed(lab) == ["running", "refused", "urgent"]
