"""Membership and heartbeats: joining, leaving, being replaced, waking up; lost and late messages."""

from typing import Any

import msgspec
import pytest

from baton import messages as msg
from baton.clock import Tick
from baton.config import ModelConfig
from kvstore.events.changes import packed_digest
from kvstore.keys import namespace_root, page_keys
from router import events
from router.dashboard import operator_views
from tests.router.lab import Lab, held, named
from tests.router.model import CONFIG, NAMESPACE, PAGE, ROUTER, card

# --- joining ---


def test_a_hello_is_welcomed_followed_and_asked_for_its_pages(lab: Lab) -> None:
    commands = lab.hello("decode", "decode-0", events="tcp://127.0.0.1:5", replay="tcp://127.0.0.1:6")
    assert events.SendMessage("decode-0.1", msg.Welcome(ROUTER, 250, 1_000)) in commands
    assert events.Subscribe("decode-0.1", "tcp://127.0.0.1:5", "tcp://127.0.0.1:6") in commands
    assert events.AskSnapshot("decode-0.1") in commands
    assert lab.state.serving
    again = lab.hello("decode", "decode-0", events="tcp://127.0.0.1:5")
    assert [type(c) for c in again] == [events.SendMessage]  # welcomed again, and nothing else


def changed(**fields: Any):
    return card(namespace=msgspec.structs.replace(NAMESPACE, **fields))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"protocol": 99}, ("protocol is 99", f"speaks {msg.PROTOCOL_VERSION}")),
        ({"model": None}, ("model", "missing")),
        ({"model": changed(page_size=32)}, ("page_size is 32", "has 4")),
        ({"model": changed(kv_dtype="bfloat16")}, ("namespace.kv_dtype is 'bfloat16'", "has 'float32'")),
        ({"model": changed(kv_dtype="int8", model=b"x" * 16)}, ("namespace.kv_dtype is 'int8'", "has 'float32'")),
        ({"model": changed(kv_dtype="fp8", model=b"x" * 16)}, ("namespace.kv_dtype is 'fp8'", "has 'float32'")),
        ({"model": changed(quantization="int8", model=b"x" * 16)}, ("namespace.quantization is 'int8'", "has ''")),
        (
            {"model": changed(numerics="torch-1/00000000")},
            ("numerics is torch-1/00000000", "this cluster has test", "model.numerics: mixed"),
        ),
        ({"model": changed(model=b"x" * 16)}, ("namespace.model is " + b"x".hex() * 16, b"m".hex() * 16)),
        ({"model": msgspec.structs.replace(card(), page_bytes=1)}, ("page_bytes is 1", "has 1024")),
        ({"role": "router"}, ("role", "router")),
        ({"role": "store", "node": "a", "name": "store-9"}, ("node a", "store-0")),
    ],
)
def test_a_misfit_is_rejected_by_field_and_values(lab: Lab, more: dict[str, Any], says: tuple[str, ...]) -> None:
    lab.split()
    arguments = {"role": "decode", "name": "decode-9", "node": "b"} | more
    commands = lab.hello(**arguments)
    (rejected,) = lab.sent(msg.Rejected)
    assert rejected.reason == "incompatible"
    assert all(part in rejected.message for part in says), rejected.message
    assert commands[-1] == events.ForgetPeer(f"{arguments['name']}.1")
    assert len(lab.gone()) == 3


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({}, "LoRA adapters are none and this cluster has one, two"),
        ({"one": "1", "other": "2"}, "LoRA adapters are one, other and"),
        ({"one": "1", "two": "3"}, "LoRA adapter two is 3 and this cluster has 2"),
    ],
)
def test_all_workers_have_the_adapters_that_clients_may_ask_for(theirs: dict[str, str], says: str) -> None:
    lab = Lab(msgspec.structs.replace(CONFIG, model=ModelConfig(lora_modules={"two": "/2", "one": "/1"})))
    lab.join("decode", "decode-0", model=card(adapters={"one": "1", "two": "2"}))
    assert not lab.sent(msg.Rejected)
    lab.hello("decode", "decode-1", model=card(adapters=theirs))
    (rejected,) = lab.sent(msg.Rejected)
    assert says in rejected.message


def test_a_refusal_for_its_numerics_names_the_worker_in_the_log(lab: Lab) -> None:
    lab.join("decode", "decode-0")
    commands = lab.hello("decode", "decode-1", model=changed(numerics="torch-1/00000000"))
    (note,) = [command for command in commands if isinstance(command, events.Log)]
    assert note.warning
    assert note.text.startswith("rejected decode-1: numerics is torch-1/00000000 and this cluster has test")


def test_workers_of_several_classes_of_numerics_join_a_mixed_cluster(lab: Lab) -> None:
    classes = {"decode-0": "native-2/00000000", "decode-1": "torch-1/00000000"}
    for name, numerics in classes.items():
        lab.join("decode", name, model=msgspec.structs.replace(changed(numerics=msg.MIXED), numerics=numerics))
    assert not lab.sent(msg.Rejected)
    shown = {view.peer.name: operator_views.process(view).numerics for view in lab.state.processes(lab.now)}
    assert shown == classes
    assert lab.state.card.namespace.numerics == msg.MIXED
    lab.hello("decode", "decode-2", model=card())
    (rejected,) = lab.sent(msg.Rejected)
    assert "numerics is test and this cluster has mixed" in rejected.message


def test_the_first_live_worker_sets_the_namespace(lab: Lab) -> None:
    lab.join("decode", "decode-0")
    lab.join("decode", "decode-1", model=changed(numerics="other"))
    assert lab.sent(msg.Rejected)
    lab.advance(1.1)
    lab.join("decode", "decode-1", model=changed(numerics="other"))
    assert lab.state.card == changed(numerics="other")


def test_a_hello_for_another_process_is_dropped(lab: Lab) -> None:
    peer = msg.Peer("decode", "decode-0", "a", "victim", 1)
    lab.tell(events.MessageReceived(msg.Envelope("thief", "", 1, msg.Hello(peer, model=card()))))
    assert not lab.gone()


def test_a_stranger_is_asked_to_introduce_itself(lab: Lab) -> None:
    assert lab.say("nobody.1", msg.Accepted("r", 1)) == [
        events.SendMessage("nobody.1", msg.RequestHello()),
        events.ForgetPeer("nobody.1"),
    ]


# --- leaving ---


def test_a_silent_peer_is_gone_with_its_pages_in_one_step(lab: Lab, decode: str, prefill: str, store: str) -> None:
    order = lab.submit("first", prompt=14)
    lab.holds(store, order, 3)
    assert {v.peer.name: v.pages_known for v in lab.state.processes(lab.now)}["store-0"] == 3
    lab.now += 0.9
    lab.beat(decode, held("first", 1, 14))
    commands = lab.advance(0.2)
    assert events.Unsubscribe(store) in commands
    assert lab.gone() == {"decode-0": None, "prefill-0": "silent", "store-0": "silent"}
    lab.submit("second", prompt=14)
    assert lab.decode.fetch == 0


def test_a_stuck_worker_is_gone_though_its_heart_beats_and_is_left_alone_until_it_gets_on(lab: Lab) -> None:
    one, two = lab.colocated(2)
    lab.submit()
    assert lab.beat(one, held("r", 1, 10), age=5_001)
    assert lab.to(lab.decode) == two
    assert lab.gone() == {"decode-0": "stuck", "decode-1": None}
    assert lab.beat(one, held("r", 1, 10), age=9_000) == []
    assert [type(c.message) for c in lab.beat(one, age=0) if isinstance(c, events.SendMessage)] == [msg.RequestHello]


def test_a_hello_of_the_same_name_replaces_the_live_one_at_once(lab: Lab) -> None:
    old = lab.join("decode", "decode-0")
    lab.submit()
    new = lab.join("decode", "decode-0", incarnation="decode-0.2")
    assert lab.to(lab.decode) == new
    assert lab.decode.attempt == 2
    lab.tokens(old, "r", 1, 10, 50)
    lab.tokens(old, "r", 2, 10, 50)
    assert lab.emitted() == []
    assert len(lab.sent(msg.RequestHello, old)) == 2


def test_a_stopped_worker_that_wakes_is_rejected_while_its_successor_lives_and_no_longer(lab: Lab) -> None:
    old = lab.join("decode", "decode-0")
    lab.advance(1.1)
    new = lab.join("decode", "decode-0", incarnation="decode-0.2")
    lab.say(old, msg.Accepted("r", 1))
    assert lab.sent(msg.RequestHello, old)
    lab.hello("decode", "decode-0", incarnation=old)
    (rejected,) = lab.sent(msg.Rejected, old)
    assert "replaced by decode-0.2" in rejected.message
    lab.advance(1.1)  # now the successor is gone too
    lab.hello("decode", "decode-0", incarnation=old)
    assert lab.state.stats().live["decode"] == 1
    lab.hello("decode", "decode-0", incarnation=new)
    assert [view.peer.incarnation for view in lab.state.processes(lab.now)] == [new]


def test_a_returning_worker_starts_a_new_count(lab: Lab, decode: str) -> None:
    for _ in range(20):
        lab.advance(0.3)
        lab.beat(decode)
    stale = lab.counts[decode]
    lab.advance(1.1)
    lab.hello("decode", "decode-0")
    lab.submit()
    for _ in range(3):
        lab.beat(decode, heard=stale)
    assert lab.decode.attempt == 1


def test_a_pause_of_the_router_ends_no_peer(lab: Lab) -> None:
    lab.split()
    lab.submit(prompt=14)
    lab.now += 30
    lab.tell(Tick(paused=30))
    assert set(lab.gone().values()) == {None}
    assert lab.alive()
    lab.advance(1.1)
    assert None not in lab.gone().values()


# --- heartbeats ---


def test_a_stores_word_that_a_worker_of_its_node_is_gone_is_enough(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    other = lab.join("decode", "decode-1", node="b")
    lab.submit()
    assert lab.to(lab.decode) == decode
    for nonsense in (msg.WorkerDied(decode, 8), msg.WorkerDied(other, 7), msg.WorkerDied("nobody", 7)):
        lab.say(store, nonsense)
    assert len(lab.sent(msg.Decode)) == 1
    lab.say(store, msg.WorkerDied(decode, 7))
    assert lab.to(lab.decode) == other
    assert lab.gone()["decode-0"] == "dead"
    lab.say(store, msg.WorkerDied(decode, 7))
    assert lab.gone()["decode-0"] == "dead"


def test_heartbeats_list_what_a_worker_has_been_given(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    lab.advance(0.3)
    for peer, attempts in ((decode, (named("r", 1),)), (prefill, (named("r", 1),)), (store, ())):
        assert lab.sent(msg.RouterHeartbeat, peer)[-1].attempts == attempts
    lab.say(decode, msg.Started("r", 1))
    lab.say(prefill, msg.Prefilled("r", 1, computed=12, hit=0, stored=3))  # its account may come after its pages
    lab.advance(0.3)
    assert lab.sent(msg.RouterHeartbeat, prefill)[-1].attempts == ()


def test_an_attempt_is_lost_once_two_heartbeats_that_should_know_it_do_not(lab: Lab, decode: str) -> None:
    lab.submit()
    sent_at = lab.counts[decode]
    for _ in range(5):
        lab.beat(decode, heard=sent_at - 1)
    assert lab.decode.attempt == 1
    lab.beat(decode, heard=sent_at)
    assert lab.decode.attempt == 1
    lab.beat(decode, heard=sent_at)
    assert lab.decode.attempt == 2


def test_a_lost_prefill_is_a_new_attempt(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    lab.beat(prefill)
    lab.beat(prefill)
    assert lab.decode.attempt == 2
    assert lab.cancelled(decode) == [1]


def test_what_the_router_does_not_know_is_cancelled(lab: Lab, decode: str) -> None:
    lab.submit()
    commands = lab.beat(decode, held("r", 1, 10), held("old", 3, 5))
    assert [c.message for c in commands if isinstance(c, events.SendMessage)] == [msg.Cancel("old", 3)]


def test_a_lost_accepted_is_made_up_for_by_two_heartbeats(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.submit(prompt=14)
    lab.beat(decode, held("r", 1, 14))
    assert not lab.sent(msg.Prefill)
    lab.beat(decode, held("r", 1, 14))
    assert lab.to(lab.prefill) == prefill
    lab.say(decode, msg.Accepted("r", 1))
    assert len(lab.sent(msg.Prefill)) == 1


def test_lost_tokens_are_asked_for_after_two_heartbeats_that_show_more(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10, max_tokens=20)
    lab.tokens(decode, "r", 1, 10, 50)
    lab.beat(decode, held("r", 1, 12))
    assert not lab.sent(msg.Resend)
    lab.tokens(decode, "r", 1, 11, 51)  # they had only been overtaken
    lab.beat(decode, held("r", 1, 14))
    assert not lab.sent(msg.Resend)
    lab.beat(decode, held("r", 1, 14))
    assert lab.sent(msg.Resend) == [msg.Resend("r", 1, 12)]
    lab.tokens(decode, "r", 1, 12, 52, 53)
    assert lab.emitted() == [50, 51, 52, 53]


def test_a_lost_end_is_asked_for_too(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10, max_tokens=20)
    lab.tokens(decode, "r", 1, 10, 50)
    for _ in range(2):
        lab.beat(decode, held("r", 1, 11, ended=True))
    assert lab.sent(msg.Resend) == [msg.Resend("r", 1, 11)]
    lab.tokens(decode, "r", 1, 11, finish="stop")
    assert lab.end().outcome == events.Finished("stop")


def test_a_message_for_another_incarnation_of_the_router_is_dropped(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10)
    lab.say(decode, msg.Tokens(1, (msg.Delta("r", 1, 10, (50,)),)), addressee="router.0")
    assert lab.emitted() == []


# --- pages ---


def test_a_digest_that_differs_asks_for_a_snapshot(lab: Lab, decode: str, prefill: str, store: str) -> None:
    order = lab.submit("first", prompt=14)
    lab.holds(store, order, 2, sequence=4)
    keys = page_keys(namespace_root(NAMESPACE, order.tenant), order.tokens[: 2 * PAGE * 4], PAGE)
    before = lab.log.count(events.AskSnapshot(store))
    lab.say(store, msg.Heartbeat(lab.counts[store], msg.LoadReport(), events=4, digest=packed_digest(keys, "CPU")))
    assert lab.log.count(events.AskSnapshot(store)) == before
    lab.say(store, msg.Heartbeat(lab.counts[store], msg.LoadReport(), events=4, digest=packed_digest(keys, "DISK")))
    assert lab.log.count(events.AskSnapshot(store)) == before + 1
    stats = lab.state.stats().kv_index
    assert (stats.pages, stats.gaps, stats.divergences) == (2, 0, 1)


def test_a_live_process_cannot_turn_into_another(lab: Lab) -> None:
    lab.split()
    lab.hello("decode", "store-0", incarnation="store-0.1")
    (rejected,) = lab.sent(msg.Rejected)
    assert "store store-0 on a" in rejected.message
    lab.submit()
