"""A change of weights as the router carries it out: nothing loads before all are empty, and one model is served."""

import msgspec
import pytest

from baton import messages as msg
from baton.errors import InvalidRequest, Unavailable
from baton.messages import Accepted, Heartbeat, LoadReport, LoadWeights
from router.events import DrainWorker, Failed, Finished, ReloadWeights, SetRole
from tests.router.lab import Lab
from tests.router.model import CONFIG, NAMESPACE, card

RELOAD = ReloadWeights("/new", 30.0)
NEW = card(namespace=msgspec.structs.replace(NAMESPACE, model=b"n" * 16))


def orders(lab: Lab, to: str) -> list[str]:
    return [message.path for message in lab.sent(LoadWeights, to)]


def draining(lab: Lab) -> set[str]:
    return {view.peer.name for view in lab.state.processes(lab.now) if view.gone is None and view.draining}


def tell(lab: Lab, *workers: str) -> None:
    """Order new weights. Then time passes until all routers know of it, and these workers tell that they are empty."""
    lab.tell(RELOAD)
    lab.advance(2 * CONFIG.cluster.heartbeat_ms / 1_000)
    for worker in workers:
        lab.beat(worker)


def test_what_another_router_gave_before_it_heard_of_the_order_is_waited_for(lab: Lab) -> None:
    (decode,) = lab.colocated()
    lab.beat(decode)
    lab.tell(RELOAD)
    assert not orders(lab, decode), "its last heartbeat is older than the order"
    lab.advance(CONFIG.cluster.heartbeat_ms / 1_000)
    lab.beat(decode)
    assert not orders(lab, decode)
    lab.advance(CONFIG.cluster.heartbeat_ms / 1_000)
    lab.say(decode, Heartbeat(lab.counts[decode], LoadReport(running=1), others=LoadReport(running=1)))
    assert not orders(lab, decode)
    lab.say(decode, Heartbeat(lab.counts[decode], LoadReport()))
    assert orders(lab, decode) == ["/new"]


def test_idle_workers_are_told_at_once_and_the_first_decides_what_is_served(lab: Lab) -> None:
    decode, prefill, _ = lab.split()
    tell(lab, decode, prefill)
    assert orders(lab, decode) == orders(lab, prefill) == ["/new"]
    assert lab.state.card is None
    lab.join("prefill", "prefill-0", incarnation="prefill-0.2", model=NEW)
    assert lab.state.card == NEW
    assert draining(lab) == {"decode-0"}
    lab.join("decode", "decode-0", incarnation="decode-0.2", model=NEW)
    assert not draining(lab)
    lab.submit("r")
    assert lab.to(lab.decode) == "decode-0.2"


def test_all_wait_for_the_last_request_and_later_ones_wait_for_all(lab: Lab) -> None:
    first, second = lab.colocated(2)
    lab.submit("r")
    busy = lab.to(lab.decode)
    lab.tell(RELOAD)
    lab.submit("late")
    assert not orders(lab, first)
    assert not orders(lab, second)
    lab.tokens(busy, "r", 1, 10, 9, finish="length")
    assert lab.end("r").outcome == Finished("length")
    lab.advance(2 * CONFIG.cluster.heartbeat_ms / 1_000)
    lab.beat(first)
    assert not orders(lab, first)
    lab.beat(second)
    assert orders(lab, first) == orders(lab, second) == ["/new"]
    assert len(lab.sent(msg.Decode)) == 1
    lab.join("decode", "decode-1", incarnation="decode-1.2", model=NEW)
    assert lab.to(lab.decode) == "decode-1.2"


def test_other_routers_requests_are_waited_for(lab: Lab) -> None:
    (decode,) = lab.colocated()
    tell(lab)
    lab.say(decode, Heartbeat(lab.counts[decode], LoadReport(running=1), others=LoadReport(running=1)))
    assert not orders(lab, decode)
    lab.say(decode, Heartbeat(lab.counts[decode], LoadReport()))
    assert orders(lab, decode) == ["/new"]


def test_when_the_time_is_up_texts_of_two_models_fail_and_others_begin_anew(lab: Lab) -> None:
    (decode,) = lab.colocated()
    lab.submit("old")
    lab.tokens(decode, "old", 1, 10, 9, 9)
    lab.submit("fresh")
    lab.say(decode, Accepted("fresh", 1, 0))
    lab.tell(ReloadWeights("/new", 0.0))
    assert orders(lab, decode) == ["/new"]
    lab.join("decode", "decode-0", incarnation="decode-0.2", model=NEW)
    outcome = lab.end("old").outcome
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Unavailable)
    assert "the model was replaced" in str(outcome.error)
    assert lab.decode.request == "fresh"
    assert lab.to(lab.decode) == "decode-0.2"


def test_workers_are_told_until_they_have_gone(lab: Lab) -> None:
    decode, other = lab.colocated(2)
    tell(lab, decode, other)
    lab.advance(0.25)
    lab.beat(decode)
    lab.beat(other)
    assert len(orders(lab, decode)) == 2
    lab.join("decode", "decode-0", incarnation="decode-0.2", model=NEW)
    lab.advance(0.25)
    assert len(orders(lab, decode)) == 2
    assert len(orders(lab, other)) == 3
    assert not orders(lab, "decode-0.2")


def test_the_same_weights_again(lab: Lab) -> None:
    tell(lab, *lab.colocated())
    lab.join("decode", "decode-0", incarnation="decode-0.2")
    lab.submit("r")
    assert lab.to(lab.decode) == "decode-0.2"


def test_a_worker_with_the_weights_before_may_not_join(lab: Lab) -> None:
    tell(lab, *lab.colocated(2))
    lab.join("decode", "decode-0", incarnation="decode-0.2", model=NEW)
    lab.hello("decode", "decode-1", incarnation="decode-1.2")
    (refusal,) = lab.sent(msg.Rejected, "decode-1.2")
    assert refusal.message.startswith("namespace.model is")


def test_a_worker_that_joins_or_is_undrained_meanwhile_takes_no_work(lab: Lab) -> None:
    (decode,) = lab.colocated()
    lab.submit("r")
    lab.tell(RELOAD)
    lab.tell(DrainWorker("decode-0", undo=True))
    lab.join("decode", "decode-1")
    lab.submit("s")
    assert draining(lab) == {"decode-0", "decode-1"}
    assert len(lab.sent(msg.Decode)) == 1
    lab.tokens(decode, "r", 1, 10, 9, finish="length")
    lab.advance(2 * CONFIG.cluster.heartbeat_ms / 1_000)
    lab.beat(decode)
    lab.beat("decode-1.1")
    assert orders(lab, "decode-1.1") == ["/new"]


def test_a_worker_that_dies_while_it_loads_holds_nothing_up(lab: Lab) -> None:
    tell(lab, *lab.colocated(2))
    lab.leaves("decode-1.1")
    lab.join("decode", "decode-0", incarnation="decode-0.2", model=NEW)
    tell(lab, "decode-0.2")  # that change is over, so there may be another
    assert orders(lab, "decode-0.2") == ["/new"]


def test_what_can_not_be_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidRequest, match="no worker is live, so none can load weights"):
        lab.tell(RELOAD)
    tell(lab, *lab.colocated(2))
    with pytest.raises(InvalidRequest, match="the weights of /new are being loaded; wait"):
        lab.tell(RELOAD)
    with pytest.raises(InvalidRequest, match="all workers load new weights"):
        lab.tell(SetRole("decode-0", "prefill", 1.0))
    tuned = msgspec.structs.replace(CONFIG.model, lora_modules={"tuned": "/tuned"})
    other = Lab(msgspec.structs.replace(CONFIG, model=tuned))
    other.join("decode", "decode-0", model=card(adapters={"tuned": "digest"}))
    with pytest.raises(InvalidRequest, match="the LoRA adapters tuned belong to the present weights"):
        other.tell(RELOAD)


def test_adapters_that_were_loaded_meanwhile_are_refused_too(lab: Lab) -> None:
    lab.join("decode", "decode-0", model=card(adapters={"added": "digest"}))
    with pytest.raises(InvalidRequest, match="the LoRA adapters added belong to the present weights; unload them"):
        lab.tell(RELOAD)


def test_a_change_of_role_is_called_off(lab: Lab) -> None:
    busy, idle = lab.colocated(2)
    lab.say(busy, Heartbeat(lab.counts[busy], LoadReport(running=1), others=LoadReport(running=1)))
    lab.tell(SetRole("decode-0", "prefill", 30.0))
    tell(lab, idle)
    lab.say(busy, Heartbeat(lab.counts[busy], LoadReport()))
    assert orders(lab, busy) == ["/new"]
    assert not lab.sent(msg.ChangeRole)
