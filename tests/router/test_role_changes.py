"""Role changes as the router carries them out: drained, told until it has happened, and nothing lost."""

import random

import pytest

from baton.errors import InvalidRequest, ProcessNotFound
from baton.messages import Accepted, ChangeRole, Heartbeat, LoadReport
from router.events import DrainWorker, Finished, SetRole
from tests.router.cluster import Cluster
from tests.router.lab import Lab, held, lab_with
from tests.router.model import card


def views(lab: Lab) -> dict[str, tuple[str, bool, str | None]]:
    """Role, whether it drains, and what it is to become, of each live worker."""
    live = [view for view in lab.state.processes(lab.now) if view.gone is None]
    return {view.peer.name: (view.peer.role, view.draining, view.changing_to) for view in live}


def becomes(lab: Lab, to: str) -> list[str]:
    return [message.role for message in lab.sent(ChangeRole, to)]


def test_an_idle_worker_is_told_at_once_and_joins_in_its_new_role(lab: Lab) -> None:
    lab.colocated(2)
    lab.tell(SetRole("decode-0", "prefill", 30.0))
    assert becomes(lab, "decode-0.1") == ["prefill"]
    assert views(lab)["decode-0"] == ("decode", True, "prefill")
    lab.join("prefill", "decode-0", incarnation="decode-0.2")
    assert views(lab)["decode-0"] == ("prefill", False, None)
    lab.join("store", "store-0")
    lab.submit("r", prompt=50)
    lab.say("decode-1.1", Accepted("r", 1, 0))
    assert lab.to(lab.prefill) == "decode-0.2"
    assert len(becomes(lab, "decode-0.1")) == 1


def test_what_it_has_is_finished_first(lab: Lab) -> None:
    busy, name = lab.busy()
    lab.tell(SetRole(name, "prefill", 30.0))
    lab.submit("s")
    assert lab.to(lab.decode) != busy
    assert not becomes(lab, busy)
    lab.tokens(busy, "r", 1, 10, 9, finish="length")
    assert lab.end("r").outcome == Finished("length")
    assert becomes(lab, busy) == ["prefill"]


def test_after_a_while_what_it_has_goes_elsewhere(lab: Lab) -> None:
    busy, name = lab.busy()
    lab.tokens(busy, "r", 1, 10, 9, 9)
    lab.tell(SetRole(name, "prefill", 0.5))
    for _ in range(2):
        lab.beat("decode-0.1", *([held("r", 1, 12)] if busy == "decode-0.1" else []))
        lab.beat("decode-1.1", *([held("r", 1, 12)] if busy == "decode-1.1" else []))
        lab.advance(0.3)
    assert lab.cancelled(busy) == [1]
    assert becomes(lab, busy) == ["prefill"]
    assert lab.to(lab.decode) != busy
    lab.tokens(lab.to(lab.decode), "r", 2, 12, 9, 9, 9, 9, finish="length")
    assert lab.emitted("r") == [9] * 6


def test_the_attempts_of_other_routers_are_waited_for_too(lab: Lab) -> None:
    lab.colocated(2)
    lab.say("decode-0.1", Heartbeat(lab.counts["decode-0.1"], LoadReport(running=1), others=LoadReport(running=1)))
    lab.tell(SetRole("decode-0", "prefill", 30.0))
    assert not becomes(lab, "decode-0.1")
    lab.say("decode-0.1", Heartbeat(lab.counts["decode-0.1"], LoadReport()))
    assert becomes(lab, "decode-0.1") == ["prefill"]


def test_a_worker_is_told_until_it_has_happened(lab: Lab) -> None:
    lab.colocated(2)
    lab.tell(SetRole("decode-0", "prefill", 30.0))
    for _ in range(3):
        lab.advance(0.25)
    assert becomes(lab, "decode-0.1") == ["prefill"] * 4
    lab.join("prefill", "decode-0", incarnation="decode-0.2")
    lab.advance(0.25)
    assert len(becomes(lab, "decode-0.1")) == 4
    assert not becomes(lab, "decode-0.2")


def test_a_worker_that_dies_meanwhile_has_a_successor_with_its_own_role(lab: Lab) -> None:
    lab.colocated(2)
    lab.tell(SetRole("decode-0", "prefill", 30.0))
    lab.join("decode", "decode-0", incarnation="decode-0.2")
    lab.advance(0.3)
    assert views(lab)["decode-0"] == ("decode", False, None)
    assert not becomes(lab, "decode-0.2")


def test_a_worker_that_was_silent_meanwhile_still_changes(lab: Lab) -> None:
    busy, name = lab.busy()
    lab.tell(SetRole(name, "prefill", 30.0))
    lab.tokens(busy, "r", 1, 10, 9)
    for _ in range(6):
        lab.advance(0.25)
        for other in {"decode-0.1", "decode-1.1"} - {busy}:
            lab.beat(other)
    assert name not in views(lab)
    lab.join("decode", name)
    assert views(lab)[name] == ("decode", True, "prefill")
    assert becomes(lab, busy) == ["prefill"]


def test_it_can_be_called_off(lab: Lab) -> None:
    busy, name = lab.busy()
    lab.tell(SetRole(name, "prefill", 30.0))
    lab.tell(DrainWorker(name, undo=True))
    lab.tokens(busy, "r", 1, 10, 9, finish="length")
    assert views(lab)[name] == ("decode", False, None)
    assert not becomes(lab, busy)


def test_the_last_decode_worker_stays_one(lab: Lab) -> None:
    busy, name = lab.busy()
    lab.tell(SetRole(name, "prefill", 30.0))
    (other,) = {"decode-0.1", "decode-1.1"} - {busy}
    lab.leaves(other)
    assert views(lab)[name] == ("decode", False, None)
    lab.tokens(busy, "r", 1, 10, 9, finish="length")
    assert not becomes(lab, busy)


def test_what_can_not_be(lab: Lab) -> None:
    lab.split()
    lab.join("prefill", "prefill-1", model=card(head=False))
    for name in ("store-0", "decode-9"):
        with pytest.raises(ProcessNotFound, match=name):
            lab.tell(SetRole(name, "prefill", 0.0))
    with pytest.raises(InvalidRequest, match="is a decode worker already"):
        lab.tell(SetRole("decode-0", "decode", 0.0))
    with pytest.raises(InvalidRequest, match="no process would generate tokens"):
        lab.tell(SetRole("decode-0", "prefill", 0.0))
    with pytest.raises(InvalidRequest, match=r"prefill\.lm_head"):
        lab.tell(SetRole("prefill-1", "decode", 0.0))
    assert not lab.sent(ChangeRole)
    assert not any(draining for _, draining, _ in views(lab).values())


@pytest.mark.parametrize("seed", range(8))
def test_roles_may_change_at_any_time(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster.of_two_nodes(seed)
    changed = 0
    for i in range(80):
        if rng.random() < 0.5:
            cluster.submit(f"r{i}", rng.randrange(1, 60), rng.randrange(1, 40), seed=i)
        workers = [p for p in cluster.processes.values() if p.peer.role != "store"]
        process = rng.choice(workers)
        if rng.random() < 0.2:
            role = "prefill" if process.peer.role == "decode" else "decode"
            try:
                cluster.tell(SetRole(process.peer.name, role, rng.choice([0.0, 0.2, 5.0])))
                changed += 1
            except (InvalidRequest, ProcessNotFound):
                pass
        elif rng.random() < 0.03 and sum(p.peer.role == "decode" for p in workers) > 1:
            cluster.kill(process)
            peer = process.peer
            cluster.start("decode" if peer.name.startswith("decode") else "prefill", peer.name, peer.node)
        cluster.round(loss=0.05, lag=0.2)
    cluster.settle()
    assert changed > 3
    cluster.assert_all_served()
    for view in cluster.state.processes(cluster.now):
        assert (view.draining, view.changing_to, view.attempts) == (False, None, 0)
    roles = {process.peer.name: process.peer.role for process in cluster.processes.values()}
    assert {view.peer.name: view.peer.role for view in cluster.state.processes(cluster.now)} == roles


def ask_for(lab: Lab, prompts: float) -> Lab:
    """So many seconds of prompt work and ten tokens in each second, for two minutes; workers are as quick as that."""
    for _ in range(240):
        lab.state._utilization.prompt(prompts / 2)
        lab.state._utilization.generated(5, 50)
        lab.advance(0.5)
        for incarnation in [view.peer.incarnation for view in lab.state.processes(lab.now) if view.gone is None]:
            lab.beat(incarnation)
    return lab


def busy(roles: str = "manual", prompts: float = 0.8) -> Lab:
    """A prefill worker and three decode workers."""
    lab = lab_with(roles=roles)
    lab.split()
    for name in ("decode-1", "decode-2"):
        lab.join("decode", name)
    return ask_for(lab, prompts)


def test_a_change_is_advised_from_what_was_asked() -> None:
    advice = busy().state.stats().advice
    assert (advice.role, advice.now.prefill) == ("prefill", pytest.approx(0.8, rel=0.05))
    assert advice.then.prefill == pytest.approx(0.4, rel=0.05)
    stats = busy(prompts=0.1).state.stats()
    assert stats.advice is None
    assert stats.utilization.prefill == pytest.approx(0.1, rel=0.05)


def test_what_is_advised_is_carried_out_where_that_is_wanted() -> None:
    assert not busy().sent(ChangeRole)
    lab = busy("auto")
    workers = {lab.to(message) for message in lab.sent(ChangeRole)}
    assert workers == {"decode-0.1"}, "one worker, and no other until it has changed"
    assert views(lab)["decode-0"] == ("decode", True, "prefill")
    lab.join("prefill", "decode-0", incarnation="decode-0.2")
    lab.log.clear()
    ask_for(lab, 0.8)
    assert not lab.sent(ChangeRole), "the same load asks for nothing more"


def test_what_was_asked_before_there_was_a_worker_of_each_kind_fades() -> None:
    lab = lab_with(roles="auto")
    lab.colocated(3)
    ask_for(lab, 3.0)
    for _ in range(300):
        lab.advance(1.0)
        for name in range(3):
            lab.beat(f"decode-{name}.1")
    lab.join("prefill", "prefill-0")
    ask_for(lab, 0.0)
    assert not lab.sent(ChangeRole)
