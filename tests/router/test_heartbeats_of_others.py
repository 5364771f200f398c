"""What a router makes of other routers' work on its workers, as heartbeats tell of it."""

from baton.messages import Accepted, Heartbeat, LoadReport
from tests.router.lab import Lab


def tell(lab: Lab, sender: str, others: LoadReport) -> None:
    """A heartbeat of a worker that has nothing but others' work; it has heard of ours, which lasts."""
    load = LoadReport(others.running, others.waiting, 200, 256, others.tokens_queued, context=others.context)
    lab.say(sender, Heartbeat(0, load, others=others))


def test_an_idle_worker_is_better_than_one_that_another_router_keeps_busy() -> None:
    for busy in (0, 1):
        lab = Lab()
        workers = lab.colocated(2)
        tell(lab, workers[busy], LoadReport(running=8, waiting=4, tokens_queued=4_000, context=9_000))
        lab.submit()
        assert lab.to(lab.decode) == workers[1 - busy]


def test_a_prompt_goes_to_the_prefill_worker_with_fewer_of_others() -> None:
    for busy in (0, 1):
        lab = Lab()
        decode, one, _ = lab.split()
        makers = [one, lab.join("prefill", "prefill-1")]
        tell(lab, makers[busy], LoadReport(running=1, tokens_queued=4_000))
        lab.submit(prompt=60)
        lab.say(decode, Accepted("r", 1))
        assert lab.to(lab.prefill) == makers[1 - busy]


def test_slots_that_others_fill_are_waited_for_and_asked_for_where_we_have_none(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    tell(lab, prefill, LoadReport(running=1, waiting=1))
    lab.submit("a", prompt=60)
    lab.say(decode, Accepted("a", 1))
    assert lab.to(lab.prefill) == prefill  # it may refuse
    lab.submit("b", prompt=60, seed=2)
    assert lab.state.stats().queued == 1
    tell(lab, prefill, LoadReport())
    assert lab.state.stats().queued == 0  # another router has given slots back


def test_others_prompts_count_in_full_on_a_worker_that_has_none_of_ours(lab: Lab) -> None:
    busy, idle = lab.colocated(2)
    lab.now += 60.0
    for sender, others in (
        (busy, LoadReport(running=1, tokens_queued=4_000)),
        (idle, LoadReport(running=3, context=300)),
    ):
        tell(lab, sender, others)
    lab.submit()
    assert lab.to(lab.decode) == idle
