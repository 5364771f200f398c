"""Published rules in Baton's router: what they are shown, and that a request stays with the worker chosen for it."""

from collections.abc import Sequence
from typing import get_args

import pytest
from msgspec.structs import replace

from baton.config import PolicyName
from baton.messages import Accepted, Cancel, Decode, Prefill, Prefilled, Refused
from router.events import ClientGone, Failed, Finished
from router.placement.policy import PlacementPolicy
from router.placement.step_costs import DecodeCost, PrefillCost
from router.policies import POLICIES, policy_named
from router.policies.placer import RulePolicy
from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage
from router.queueing.admission import ModelLimits
from router.state import RouterState
from simulator.timing import EqualCosts
from tests.router.lab import Lab
from tests.router.model import CONFIG, CONTEXT, PAGE, ROUTER, VOCAB

_COSTS = EqualCosts(PrefillCost(0.0, 0.1, 0.0), DecodeCost(0.01, 0.0, 0.0))


class _ScriptedRule(Rule):
    """Chooses the worker that a test names, and keeps its inputs."""

    def __init__(self) -> None:
        self.choice: dict[Stage, str | None] = {}
        self.shown: list[tuple[Stage, dict[str, RuleWorker]]] = []

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker | None:
        by_name = {worker.name: worker for worker in workers}
        self.shown.append((stage, by_name))
        name = self.choice.get(stage, min(by_name))
        return by_name[name] if name is not None else None


def _lab(policy: PlacementPolicy) -> Lab:
    lab = Lab()
    lab.state = RouterState(ROUTER, CONFIG, ModelLimits(VOCAB, CONTEXT), policy)
    return lab


def _split(policy: PlacementPolicy) -> Lab:
    """Two workers of each kind on nodes a and b."""
    lab = _lab(policy)
    for node in "ab":
        lab.join("store", f"s{node}", node, data=f"tcp://{node}:1")
        lab.join("prefill", f"p{node}", node)
        lab.join("decode", f"d{node}", node)
    return lab


@pytest.fixture
def rule() -> _ScriptedRule:
    return _ScriptedRule()


@pytest.fixture
def lab(rule: _ScriptedRule) -> Lab:
    return _split(RulePolicy(rule, _COSTS, 1e9))


def _accept(lab: Lab, request: str) -> None:
    """Its decode worker has room, so that its prefill worker hears of it."""
    decode = [message for message in lab.sent(Decode) if message.request == request][-1]
    lab.say(lab.to(decode), Accepted(request, decode.attempt))


def test_a_pair_as_the_rule_says(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": "pa", "decode": "db"}
    lab.submit(prompt=10 * PAGE)
    _accept(lab, "r")
    assert (lab.to(lab.decode), lab.to(lab.prefill)) == ("db.1", "pa.1")
    assert [source.store for source in lab.decode.sources] == ["sa.1"]


def test_a_full_prefill_worker_is_waited_for(rule: _ScriptedRule, lab: Lab) -> None:
    """Two prompts at a time; the third stays with the worker chosen for it though another one is idle, and the one
    after it is not passed by."""
    rule.choice = {"prefill": "pa"}
    for name in ("r1", "r2", "r3", "r4"):
        lab.submit(name, prompt=10 * PAGE)
    assert [message.request for message in lab.sent(Decode)] == ["r1", "r2"]
    rule.choice = {"prefill": "pb"}
    _accept(lab, "r1")
    lab.say("pa.1", Prefilled("r1", 1, 10 * PAGE, 0, 9, 0, 0))
    assert [message.request for message in lab.sent(Decode)] == ["r1", "r2", "r3"]
    _accept(lab, "r3")
    assert {message.request: lab.to(message) for message in lab.sent(Prefill)} == {"r1": "pa.1", "r3": "pa.1"}
    stages = [stage for stage, _ in rule.shown if stage == "prefill"]
    assert len(stages) == 4, "once for each request"


def test_many_that_wait_for_one_worker_do_not_stand_before_those_of_another(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": "pb"}
    lab.submit("b1", prompt=10 * PAGE)
    lab.submit("b2", prompt=10 * PAGE)
    rule.choice = {"prefill": "pa"}
    for number in range(14):
        lab.submit(f"a{number}", prompt=10 * PAGE)
    rule.choice = {"prefill": "pb"}
    lab.submit("b3", prompt=10 * PAGE)
    _accept(lab, "b1")
    assert not [message for message in lab.sent(Decode) if message.request == "b3"]
    lab.say("pb.1", Prefilled("b1", 1, 10 * PAGE, 0, 9, 0, 0))
    assert lab.sent(Decode)[-1].request == "b3"


def test_what_a_rule_is_shown(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": "pa", "decode": "da"}
    order = lab.submit("r1", prompt=10 * PAGE)
    for name in ("r2", "r3"):
        lab.submit(name, prompt=20 * PAGE)  # r3 waits
    lab.holds("pa.1", order, 2, "GPU")
    lab.holds("sa.1", order, 5)
    lab.submit("r4", prompt=10 * PAGE)
    stage, shown = rule.shown[-1]
    assert stage == "prefill"
    pa, pb = shown["pa"], shown["pb"]
    assert (pa.requests, pa.prompts, pa.prompt_tokens) == (3, 3, 50 * PAGE - 3), "all before the last token"
    assert pa.queue == pytest.approx((50 * PAGE - 3) * 0.1)
    assert (pa.device, pa.host, pa.disk) == (2, 3, 0)
    assert (pb.requests, pb.prompts, pb.device, pb.host) == (0, 0, 0, 0)


def test_decode_workers_are_shown_what_they_have(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"decode": "db"}
    lab.submit("r1", prompt=10 * PAGE)
    lab.submit("r2", prompt=10 * PAGE)
    stage, shown = rule.shown[-1]
    assert stage == "decode"
    assert (shown["db"].requests, shown["db"].pages, shown["da"].requests) == (1, 10, 0)


def test_a_request_that_left_the_queue_is_forgotten(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": "pa"}
    for name in ("r1", "r2", "r3"):
        lab.submit(name, prompt=10 * PAGE)
    lab.advance(CONFIG.router.queue_timeout_ms / 1_000)
    assert isinstance(lab.end("r3").outcome, Failed)
    for role, kind in (("store", "s"), ("prefill", "p"), ("decode", "d")):
        lab.join(role, f"{kind}a", "a", f"{kind}a.2", data="tcp://a:1")  # the old ones have fallen silent
    lab.submit("r5", prompt=10 * PAGE)
    assert rule.shown[-1][1]["da"].requests == 0
    assert [shown["pa"].requests for stage, shown in rule.shown if stage == "prefill"][-1] == 0


def test_a_client_that_left_the_queue_is_forgotten_at_once(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": "pa"}
    for name in ("r1", "r2", "r3"):
        lab.submit(name, prompt=10 * PAGE)
    lab.tell(ClientGone("r3", "a test"))
    lab.submit("r4", prompt=10 * PAGE)
    assert [shown["pa"].requests for stage, shown in rule.shown if stage == "prefill"][-1] == 2


def test_a_worker_that_goes_is_chosen_for_anew(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": "pa"}
    for name in ("r1", "r2", "r3"):
        lab.submit(name, prompt=10 * PAGE)
    rule.choice = {"prefill": "pb"}
    lab.leaves("pa.1")
    _accept(lab, "r2")
    assert lab.to(lab.prefill) == "pb.1"


def test_colocated_workers_do_it_all(rule: _ScriptedRule) -> None:
    lab = _lab(RulePolicy(rule, _COSTS, 1e9))
    lab.colocated(2)
    rule.choice = {"both": "decode-1"}
    lab.submit("r1", prompt=10 * PAGE)
    lab.submit("r2", prompt=10 * PAGE)
    assert {lab.to(message) for message in lab.sent(Decode)} == {"decode-1.1"}
    assert rule.shown[-1][1]["decode-1"].prompts == 1
    _accept(lab, "r1")
    lab.tokens("decode-1.1", "r1", 1, 10 * PAGE, 9)
    lab.submit("r3", prompt=10 * PAGE)
    shown = rule.shown[-1][1]["decode-1"]
    assert (shown.requests, shown.prompts) == (2, 1), "one of the two is decoding"


def test_a_colocated_worker_that_has_prompts_enough_is_waited_for(rule: _ScriptedRule) -> None:
    lab = _lab(RulePolicy(rule, _COSTS, 1e9))
    lab.colocated(2)
    rule.choice = {"both": "decode-0"}
    for name in ("r1", "r2", "r3"):
        lab.submit(name, prompt=10 * PAGE)
    assert [message.request for message in lab.sent(Decode)] == ["r1", "r2"]
    _accept(lab, "r1")
    lab.tokens("decode-0.1", "r1", 1, 10 * PAGE, 9)
    assert [message.request for message in lab.sent(Decode)] == ["r1", "r2", "r3"]


def test_a_busy_worker_is_waited_for(rule: _ScriptedRule) -> None:
    lab = _lab(RulePolicy(rule, _COSTS, 1e9))
    first, second = lab.colocated(2)
    rule.choice = {"both": "decode-0"}
    lab.submit("r1", prompt=10 * PAGE)
    lab.say(first, Refused("r1", 1, "busy"))
    assert not lab.sent(Decode, second)


def test_a_rule_may_reject(rule: _ScriptedRule, lab: Lab) -> None:
    rule.choice = {"prefill": None}
    lab.submit(prompt=10 * PAGE)
    assert not lab.sent(Decode)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("costs", [_COSTS, None])
def test_every_policy_serves(policy: str, split: bool, costs: EqualCosts | None) -> None:
    """Both kinds of cluster, from submission to the last token, with a simulator's costs and with a router's own."""
    instance = policy_named(policy, 1, costs)
    lab = _split(instance) if split else _lab(instance)
    if not split:
        lab.colocated(2)
    lab.submit(prompt=10 * PAGE, max_tokens=1)
    _accept(lab, "r")
    if split:
        assert len(lab.sent(Prefill)) == 1
    lab.tokens(lab.to(lab.decode), "r", 1, 10 * PAGE, 5, finish="length", computed=10 * PAGE)
    assert isinstance(lab.end().outcome, Finished)
    assert len(lab.sent(Cancel)) <= 2


def test_the_configuration_names_every_policy() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)
    config = replace(CONFIG, router=replace(CONFIG.router, policy="round_robin"))
    state = RouterState(ROUTER, config, ModelLimits(VOCAB, CONTEXT))
    assert isinstance(state._manager._policy, RulePolicy)
