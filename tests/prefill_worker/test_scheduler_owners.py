"""What routers own on a prefill worker, and whose turn it is when all its slots are taken."""

from baton.membership import RouterLost
from baton.messages import AttemptName, Cancel, Refused, RouterHeartbeat
from tests.prefill_worker.test_scheduler_decisions import PROMPT, done, order, worker
from tests.support.workers_and_stores import PAGE


def test_each_router_decides_about_its_own_and_hears_how_busy_the_other_keeps_us() -> None:
    one = worker(max_num_batched_tokens=PAGE)
    one.handle(order(PROMPT, "a"), "one")
    one.handle(order(PROMPT[::-1], "b"), "two")
    one.handle(Cancel("a", 1), "two")
    one.handle(RouterHeartbeat((AttemptName("b", 1),)), "two")
    beat = one.state.heartbeat(0, "one")
    assert [held.request for held in beat.attempts] == ["a"]
    assert beat.others.running + beat.others.waiting == 1
    assert beat.load.tokens_queued == 2 * beat.others.tokens_queued > 0
    one.handle(RouterLost("two"))
    one.rig.settle()
    assert [result.request for result in done(one.messages)] == ["a"]
    assert {letter.router for letter in one.letters} == {"one"}


def test_a_slot_goes_to_the_router_that_was_refused_and_has_less() -> None:
    one = worker(max_num_batched_tokens=PAGE, max_num_seqs=2)
    for request in ("a1", "a2"):
        one.handle(order(PROMPT, request), "one")
    one.handle(order(PROMPT, "b1"), "two")
    one.handle(Cancel("a1", 1), "one")
    one.handle(order(PROMPT, "a3"), "one")
    assert [message.request for message in one.messages if isinstance(message, Refused)] == ["b1", "a3"]
    one.handle(order(PROMPT, "b2"), "two")
    assert [held.request for held in one.state.heartbeat(0, "two").attempts] == ["b2"]
