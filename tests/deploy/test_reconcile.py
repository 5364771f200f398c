"""What the supervisor does, replayed without Ray: conditions, actions, back-off."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.operator_api import Process, Status
from deploy.control_plane import reconcile as rec
from deploy.control_plane.observe import Facts, listed, observe, observe_router
from deploy.control_plane.process_ledger import ProcessLedger
from deploy.control_plane.reports import Failure
from deploy.placement.desired import ProcessSpec
from deploy.processes import ProcessIdentity

ROUTER = ProcessSpec("router", "router", "a")
OTHER = ProcessSpec("router-1", "router", "a")
STORE = ProcessSpec("store-0", "store", "a")
DECODE = ProcessSpec("decode-0", "decode", "a")
ALL = [ROUTER, STORE, DECODE]


def seen(name: str, condition: rec.Condition, **more: object) -> rec.ObservedProcess:
    return rec.ObservedProcess(name, "a", condition, **({"since": 0.0} | more))  # pyright: ignore[reportArgumentType]


LIVE = {spec.name: seen(spec.name, rec.Condition.LIVE) for spec in ALL}


def test_the_router_comes_first():
    assert rec.reconcile(ALL, {}, {}, 0.0) == [rec.StartProcess(ROUTER)]
    assert rec.reconcile(ALL, {"router": seen("router", rec.Condition.JOINING)}, {}, 0.0) == []
    assert rec.reconcile(ALL, {"router": LIVE["router"]}, {}, 0.0) == [
        rec.StartProcess(STORE),
        rec.StartProcess(DECODE),
    ]
    one_of_two = {"router": LIVE["router"], "router-1": seen("router-1", rec.Condition.ENDING)}
    assert rec.reconcile([OTHER, *ALL], one_of_two, {}, 0.0) == [rec.StartProcess(STORE), rec.StartProcess(DECODE)]


def test_a_whole_cluster_needs_nothing():
    assert rec.reconcile(ALL, LIVE, {}, 10_000.0) == []


def test_a_silent_process_is_ended_only_after_some_patience():
    """It may be stopped for a moment, and comes back with its weights."""
    actual = LIVE | {"decode-0": seen("decode-0", rec.Condition.SILENT, since=100.0)}
    assert rec.reconcile(ALL, actual, {}, 100.0 + rec.RESTART_PATIENCE - 1) == []
    assert rec.reconcile(ALL, actual, {}, 105.0, restart_patience=6.0) == []
    for patience in (6.0, rec.RESTART_PATIENCE):
        (action,) = rec.reconcile(ALL, actual, {}, 100.0 + patience, restart_patience=patience)
        assert isinstance(action, rec.KillProcess)
        assert f"{patience:.0f} s more" in action.why


def test_a_process_that_comes_back_is_kept_and_one_that_is_gone_is_replaced_at_once():
    ledger = ProcessLedger(restart_patience=10.0)
    ledger.started("router", "a", 0.0)
    ledger.started("decode-0", "a", 0.0)
    for now in range(1, 100):  # silent for 9 s in every 10
        facts = {"router": Facts(answers=True), "decode-0": Facts(listed="live" if now % 10 == 0 else "silent")}
        assert ledger.decide([ROUTER, DECODE], facts, float(now)) == []
    gone = {"router": Facts(answers=True), "decode-0": Facts(gone=True, listed="silent", why_gone="killed")}
    assert ledger.decide([ROUTER, DECODE], gone, 99.5) == [rec.ReapProcess("decode-0", "killed")]
    assert ledger.decide([ROUTER, DECODE], {"router": Facts(answers=True)}, 99.75) == [rec.StartProcess(DECODE)]


def test_a_process_that_never_joins_and_one_that_was_forgotten():
    joining = LIVE | {"decode-0": seen("decode-0", rec.Condition.JOINING)}
    assert rec.reconcile(ALL, joining, {}, rec.JOIN_PATIENCE) == []
    assert isinstance(rec.reconcile(ALL, joining, {}, rec.JOIN_PATIENCE + 1)[0], rec.KillProcess)
    lost = LIVE | {"decode-0": seen("decode-0", rec.Condition.JOINING, was_live=True)}
    assert rec.reconcile(ALL, lost, {}, rec.REJOIN_PATIENCE) == []
    assert isinstance(rec.reconcile(ALL, lost, {}, rec.REJOIN_PATIENCE + 1)[0], rec.KillProcess)


def test_unanswered_probes_end_the_router_alone():
    router = seen("router", rec.Condition.LIVE, was_live=True)
    worker = seen("decode-0", rec.Condition.LIVE, was_live=True)
    for turn in range(rec.ROUTER_MISSES):
        assert rec.reconcile([ROUTER, DECODE], {"router": router, "decode-0": worker}, {}, 100.0 + turn) == []
        router = observe_router(router, Facts(), 100.0 + turn)
        worker = observe(worker, Facts(listed="unknown"), 100.0 + turn)
    both, early = {"router": router, "decode-0": worker}, 100.0 + rec.RESTART_PATIENCE - 1
    assert rec.reconcile([ROUTER, DECODE], both, {}, early) == [], "it may be stopped for a moment"
    (action,) = rec.reconcile([ROUTER, DECODE], both, {}, 100.0 + rec.RESTART_PATIENCE)
    assert action == rec.KillProcess("router", f"it has not answered {rec.ROUTER_MISSES} times in a row")
    assert observe_router(router, Facts(answers=True), 200.0).misses == 0
    few = observe_router(seen("router", rec.Condition.LIVE, was_live=True), Facts(), 0.0)
    assert rec.reconcile([ROUTER], {"router": few}, {}, 1_000.0) == [], "we may have been held up ourselves"


def test_a_router_that_has_yet_to_start_is_given_time():
    router = seen("router", rec.Condition.JOINING)
    for turn in range(10 * rec.ROUTER_MISSES):
        router = observe_router(router, Facts(), float(turn) * rec.ROUTER_PATIENCE / (10 * rec.ROUTER_MISSES))
    assert rec.reconcile([ROUTER], {"router": router}, {}, rec.ROUTER_PATIENCE) == []
    assert isinstance(rec.reconcile([ROUTER], {"router": router}, {}, rec.ROUTER_PATIENCE + 1)[0], rec.KillProcess)


def test_back_off_grows_is_bounded_and_forgives():
    record, delays = rec.Crashes(), []
    for turn in range(9):
        record = rec.crashed(record, "killed", 0.0, 100.0 * turn)
        delays.append(record.not_before - 100.0 * turn)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, rec.LONGEST_DELAY, rec.LONGEST_DELAY, rec.LONGEST_DELAY]
    forgiven = rec.crashed(record, "killed", rec.STEADY, 1_000.0)
    assert (forgiven.count, forgiven.not_before, forgiven.total) == (1, 1_000.0, 10)


def test_a_crash_loop_waits():
    router = {"router": LIVE["router"]}
    crashes = {"decode-0": rec.Crashes(count=3, not_before=7.0)}
    assert rec.reconcile([ROUTER, DECODE], router, crashes, 6.9) == []
    assert rec.reconcile([ROUTER, DECODE], router, crashes, 7.0) == [rec.StartProcess(DECODE)]


def test_the_router_must_mean_this_very_process():
    status = Status(processes=[Process(name="decode-0", role="decode", pid=7, state="silent")])
    assert listed([status], "decode-0", ProcessIdentity(7, 1)) == "silent"
    assert listed([status], "decode-0", ProcessIdentity(8, 1)) == "absent"
    assert listed([status], "decode-1", ProcessIdentity(7, 1)) == "absent"
    assert listed([], "decode-0", ProcessIdentity(7, 1)) == "unknown"
    assert listed([status], "decode-0", None) == "unknown"


def test_of_several_routers_the_one_that_hears_a_process_is_believed():
    def says(*states: Any) -> str:
        words = [[Process(name="decode-0", role="decode", pid=7, state=state)] if state else [] for state in states]
        statuses = [Status(processes=word) for word in words]
        return listed(statuses, "decode-0", ProcessIdentity(7, 1))

    unlisted = ""
    assert says("silent", "live") == "live"
    assert says(unlisted, "silent") == "silent"
    assert says(unlisted, unlisted) == "absent"


def test_proof_outweighs_everything():
    facts = Facts(gone=True, ending=True, failure=Failure("model", "no"), listed="live")
    after = observe(seen("decode-0", rec.Condition.LIVE), facts, 1.0)
    assert after.condition is rec.Condition.GONE
    assert after.why == "no"


@given(st.lists(st.sampled_from(["live", "silent", "stuck", "absent", "unknown"]), min_size=1))
def test_since_changes_exactly_with_the_condition(conditions: list):
    before = seen("decode-0", rec.Condition.JOINING)
    for now, word in enumerate(conditions, 1):
        after = observe(before, Facts(listed=word), float(now))
        assert (after.since == before.since) == (after.condition is before.condition)
        assert word != "unknown" or after.condition is before.condition
        before = after


def test_a_pause_of_the_supervisor_ends_no_process():
    ledger = ProcessLedger()
    ledger.started("router", "a", 0.0)
    ledger.started("decode-0", "a", 0.0)
    specs = [ROUTER, DECODE]
    live = {"router": Facts(answers=True), "decode-0": Facts(listed="live")}
    assert ledger.decide(specs, live, 1.0) == []
    lost = {"router": Facts(answers=True), "decode-0": Facts(listed="absent")}
    assert ledger.decide(specs, lost, 2.0) == []
    assert ledger.decide(specs, lost, 500.0, held_up=498.0) == []
    assert isinstance(ledger.decide(specs, lost, 503.0 + rec.REJOIN_PATIENCE)[0], rec.KillProcess)


def test_the_ledger_tells_restarts_and_the_last_failure():
    ledger = ProcessLedger()
    ledger.started("router", "a", 0.0)
    ledger.decide([ROUTER], {"router": Facts(failure=Failure("port_in_use", "taken"))}, 1.0)
    ledger.decide([ROUTER], {"router": Facts(gone=True)}, 2.0)
    (view,) = ledger.views([ROUTER], 2.0)
    assert (view.condition, view.restarts, view.failure) == ("waiting", 1, Failure("port_in_use", "taken"))


def test_of_each_process_the_first_reason_counts_and_of_its_name_the_last_process():
    ledger = ProcessLedger()
    reasons = []
    for facts in (
        Facts(failure=Failure("port_in_use", "taken")),
        Facts(gone=True),
        None,  # another one under the same name
        Facts(gone=True, why_gone="killed"),
    ):
        if facts is None:
            ledger.started("router", "a", 100.0)
            continue
        if not reasons:
            ledger.started("router", "a", 0.0)
        ledger.decide([ROUTER], {"router": facts}, 100.0 + len(reasons))
        (view,) = ledger.views([ROUTER], 200.0)
        reasons.append(view.failure.message if view.failure else "")
    assert reasons == ["taken", "taken", "killed"]


def test_a_process_may_take_as_long_to_join_as_the_user_waits():
    for patience, ends in ((rec.JOIN_PATIENCE, True), (2 * rec.JOIN_PATIENCE, False)):
        ledger = ProcessLedger(patience)
        ledger.started("decode-0", "a", 0.0)
        actions = ledger.decide([DECODE], {"decode-0": Facts(listed="absent")}, rec.JOIN_PATIENCE + 1.0)
        assert any(isinstance(action, rec.KillProcess) for action in actions) == ends


@dataclass
class World:
    """A machine on which processes run, die, stop and fail; it does what the ledger says, late or at once."""

    running: dict[str, str] = field(default_factory=dict)  # name → "well" | "stopped" | "failed" | "ending" | "gone"
    started: int = 0


class SupervisorMachine(RuleBasedStateMachine):
    """Whatever happens, no name ever has two processes, and a quiet world becomes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.world, self.now = ProcessLedger(), World(), 0.0
        self.desired = [OTHER, *ALL]

    def facts(self, name: str) -> Facts:
        state = self.world.running[name]
        somebody_asks = any(self.world.running.get(router.name) == "well" for router in (ROUTER, OTHER))
        word = {"well": "live", "stopped": "silent"}.get(state, "unknown") if somebody_asks else "unknown"
        failure = Failure("internal", "broken") if state == "failed" else None
        flags = {"gone": state == "gone", "ending": state == "ending", "answers": state == "well"}
        return Facts(failure=failure, listed=word, **flags)  # pyright: ignore[reportArgumentType]

    def carry_out(self, action: rec.SupervisorAction) -> None:
        match action:
            case rec.StartProcess(spec):
                assert spec.name not in self.world.running, "two processes under one name"
                self.world.running[spec.name] = "well"
                self.ledger.started(spec.name, spec.node, self.now)
            case rec.KillProcess(name) | rec.StopProcess(name):
                assert self.world.running[name] not in ("ending", "gone")
                self.world.running[name] = "ending"
            case rec.ReapProcess(name):
                assert self.world.running.pop(name) == "gone"

    @rule(seconds=st.sampled_from([0.25, 1.0, 40.0]))
    def turn(self, seconds: float) -> None:
        self.now += seconds
        facts = {name: self.facts(name) for name in self.ledger.names}
        for action in self.ledger.decide(self.desired, facts, self.now):
            self.carry_out(action)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), fate=st.sampled_from(["gone", "stopped", "failed"]))
    def strike(self, data: st.DataObject, fate: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.running)))
        if self.world.running[name] == "well":
            self.world.running[name] = fate

    @precondition(lambda self: "ending" in self.world.running.values())
    @rule()
    def endings_end(self) -> None:
        for name, state in self.world.running.items():
            if state == "ending":
                self.world.running[name] = "gone"

    @rule(decode=st.booleans())
    def scale(self, decode: bool) -> None:
        self.desired = [OTHER, *ALL] if decode else [OTHER, ROUTER, STORE]

    @invariant()
    def the_book_knows_every_process(self) -> None:
        assert set(self.ledger.names) == set(self.world.running)

    def teardown(self) -> None:
        for _ in range(rec.ROUTER_MISSES + 12):
            self.endings_end()
            self.turn(40.0)
        assert self.world.running == {spec.name: "well" for spec in self.desired}


TestSupervisor = SupervisorMachine.TestCase


def test_a_worker_that_no_node_can_have_waits_and_says_why():
    nowhere = ProcessSpec("decode-1", "decode", "", blocked="no node has a GPU")
    assert rec.reconcile([*ALL, nowhere], LIVE, {}, 0.0) == []
    views = {view.name: view for view in ProcessLedger().views([*ALL, nowhere], 0.0)}
    assert (views["decode-1"].condition, views["decode-1"].failure) == (
        "waiting",
        Failure("startup", "no node has a GPU"),
    )
    assert views["decode-0"].failure is None
