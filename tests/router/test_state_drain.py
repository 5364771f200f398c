"""Workers that are to be given nothing new: what they have goes on, or goes elsewhere at once."""

import random

import pytest

from baton.errors import InvalidRequest, ProcessNotFound
from baton.messages import Accepted, Decode, Prefill
from router.events import DrainWorker, Finished
from tests.router.cluster import Cluster
from tests.router.lab import Lab


def test_a_draining_worker_is_given_nothing_new_and_keeps_what_it_has(lab: Lab) -> None:
    drained, name = lab.busy()
    lab.tell(DrainWorker(name))
    for i in range(6):
        lab.submit(f"s{i}")
        assert lab.to(lab.decode) != drained
    view = {view.peer.name: view for view in lab.state.processes(lab.now)}[name]
    assert (view.draining, view.attempts) == (True, 1)
    lab.tokens(drained, "r", 1, 10, 9, finish="length")
    assert lab.end("r").outcome == Finished("length")
    assert {view.peer.name: view.attempts for view in lab.state.processes(lab.now)}[name] == 0
    lab.tell(DrainWorker(name, undo=True))
    lab.submit("t")
    assert lab.to(lab.decode) == drained


def test_what_a_decode_worker_has_goes_elsewhere_at_once(lab: Lab) -> None:
    drained, name = lab.busy()
    lab.tokens(drained, "r", 1, 10, 9, 9)
    lab.tell(DrainWorker(name, at_once=True))
    assert lab.cancelled(drained) == [1]
    assert lab.to(lab.decode) != drained
    assert len(lab.decode.tokens) == 4 * 12
    lab.tokens(lab.to(lab.decode), "r", 2, 12, 9, 9, 9, 9, finish="length")
    assert lab.emitted("r") == [9] * 6


def test_prompts_of_a_drained_prefill_worker_are_made_elsewhere(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.accepted(prompt=50)
    lab.tell(DrainWorker("prefill-0", at_once=True))
    assert lab.cancelled(prefill) == lab.cancelled(decode) == [1]
    assert lab.decode.attempt == 2
    lab.say(decode, Accepted("r", 2, 0))
    assert len(lab.sent(Prefill)) == 1, "the decode worker computes it itself"


def test_what_can_not_be_drained(lab: Lab) -> None:
    lab.split()
    with pytest.raises(InvalidRequest, match="nowhere to go"):
        lab.tell(DrainWorker("decode-0", at_once=True))
    for name in ("store-0", "decode-9"):
        with pytest.raises(ProcessNotFound, match=name):
            lab.tell(DrainWorker(name))
    assert lab.state.serving
    lab.tell(DrainWorker("decode-0"))
    assert not lab.state.serving


def test_a_process_that_was_silent_comes_back_draining_and_its_successor_does_not(lab: Lab) -> None:
    first, _second = lab.colocated(2)
    lab.tell(DrainWorker("decode-0"))
    lab.advance(5)  # both are silent
    assert lab.join("decode", "decode-0") == first
    lab.submit("r")
    assert lab.alive("r")
    assert not lab.sent(Decode)
    lab.join("decode", "decode-0", incarnation="decode-0.2")
    assert lab.to(lab.decode) == "decode-0.2"


@pytest.mark.parametrize("seed", range(8))
def test_drains_at_any_time_lose_nothing_and_are_obeyed(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster.of_two_nodes(seed)
    workers = [process.peer.name for process in cluster.processes.values() if process.peer.role != "store"]
    drained: dict[str, int] = {}  # with the attempts that each had left
    for i in range(60):
        if rng.random() < 0.5:
            cluster.submit(f"r{i}", rng.randrange(1, 60), rng.randrange(1, 40), seed=i)
        if rng.random() < 0.3:
            name = rng.choice(workers)
            undo = name in drained or sum(other.startswith("decode") for other in drained) >= 3
            cluster.tell(DrainWorker(name, at_once=rng.random() < 0.5, undo=undo))
            drained.pop(name, None)
            if not undo:
                drained[name] = attempts(cluster)[name]
        cluster.round(loss=0.05, lag=0.2)
        left = attempts(cluster)
        assert all(left[name] <= before for name, before in drained.items()), (left, drained)
        drained = {name: left[name] for name in drained}
    cluster.settle()
    cluster.assert_all_served()
    assert all(attempts(cluster)[name] == 0 for name in workers)


def attempts(cluster: Cluster) -> dict[str, int]:
    return {view.peer.name: view.attempts for view in cluster.state.processes(cluster.now)}
