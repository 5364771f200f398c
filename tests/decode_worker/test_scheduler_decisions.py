"""The decode worker's decisions, with a real store state and a device that notices a wrong page."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import messages as msg
from baton.clock import Tick
from baton.config import DecodeConfig
from baton.membership import RouterLost, SendToRouter
from baton.store_protocol import Acquire, EndLease, LeasedPage, PagesReady, Reserved
from decode_worker.scheduler import DecodeScheduler
from engine.step.batch import Sampled
from engine.step.outcome import StepDone, StepFailed
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CallStore, CopiedIn, CopiedOut, StoreUp
from kvstore.keys import pack_tokens
from tests.support.workers_and_stores import PAGE, PAGE_BYTES, ROOT, Rig, RigWorker, reference

GREEDY = msg.SamplingParams(temperature=0)


def order(
    prompt: list[int], count: int, request: str = "r", attempt: int = 1, known: list[int] | None = None, **more: object
) -> msg.Decode:
    tokens = pack_tokens(prompt + (known or []))
    return msg.Decode(request, attempt, ROOT, tokens, len(prompt), count, GREEDY, **more)  # type: ignore[arg-type]


def worker(slots: int = 64, pages: int = 32, **config: Any) -> RigWorker:
    return Rig(slots).worker("decode", pages, DecodeConfig(**config))


def tokens_of(messages: list[msg.Message], request: str = "r", attempt: int = 1) -> list[int]:
    """The attempt's tokens, which must come in order and without a gap."""
    tokens: dict[int, int] = {}
    for message in messages:
        for delta in message.deltas if isinstance(message, msg.Tokens) else ():
            if (delta.request, delta.attempt) == (request, attempt):
                tokens |= {delta.position + i: token for i, token in enumerate(delta.tokens)}
    assert sorted(tokens) == list(range(min(tokens, default=0), min(tokens, default=0) + len(tokens)))
    return [tokens[position] for position in sorted(tokens)]


def finishes(messages: list[msg.Message]) -> list[str]:
    return [d.finish for m in messages if isinstance(m, msg.Tokens) for d in m.deltas if d.finish]


PROMPT = [7, 3, 9, 1, 4, 4, 2, 8, 5, 6, 1]


@pytest.fixture
def one() -> RigWorker:
    return worker()


def test_a_request_without_help_gets_the_reference_tokens(one: RigWorker) -> None:
    one.handle(order(PROMPT, 20))
    one.rig.settle()
    assert isinstance(one.messages[0], msg.Accepted)
    assert isinstance(one.messages[1], msg.Started)
    assert tokens_of(one.messages) == reference(PROMPT, 20)
    assert finishes(one.messages) == ["length"]
    assert one.state.blocks.available == one.num_pages


def test_short_tails_take_every_other_step() -> None:
    steps = [msg.StepSample(0, 0, rows, rows * context, 0.01) for rows in (1, 2, 4) for context in (2, 40)]
    state, now = DecodeScheduler(DecodeConfig(), 16, 64, calibration=steps), 0.0

    def step(passed: float) -> dict[str, int]:
        nonlocal now
        plan = state.schedule(now := now + passed)
        drawn = [None if chunk.sample is None else Sampled(7) for chunk in plan.values()]
        state.handle(StepDone(plan, drawn), now := now + 0.01 + 0.004 * (len(plan) - 1))
        return {name.request: len(chunk.tokens) for name, chunk in plan.items()}

    state.handle(order([3], 9, "a"), now)
    assert step(0.0) == {"a": 1}
    state.handle(order([5] * 10, 9, "b"), now)
    assert [step(0.003), step(0.003), step(0.003), step(0.001)] == [
        {"a": 1},
        {"a": 1, "b": 4},
        {"a": 1},
        {"a": 1, "b": 4},
    ]


def test_a_stop_token_ends_it_and_is_said(one: RigWorker) -> None:
    expected = reference(PROMPT, 20)
    stop = expected[4]
    one.handle(order(PROMPT, 20, stop_token_ids=(stop,)))
    one.rig.settle()
    assert tokens_of(one.messages) == expected[: expected.index(stop) + 1]
    assert finishes(one.messages) == ["stop"]


def test_full_pages_are_written_through_and_fetched_by_another(one: RigWorker) -> None:
    one.handle(order(PROMPT, 10))
    one.rig.settle()
    assert one.rig.store.stats(0.0).sealed == (len(PROMPT) + 9) // PAGE
    other = one.rig.worker("decode", 32, DecodeConfig())
    other.handle(order(PROMPT, 10, fetch=2))
    one.rig.settle()
    assert other.messages[1] == msg.Started("r", 1, device_pages=0, fetched_pages=2)
    assert tokens_of(other.messages) == reference(PROMPT, 10)
    first = next(m for m in other.messages if isinstance(m, msg.Tokens)).deltas[0]
    assert first.computed == len(PROMPT) - 2 * PAGE


def test_the_device_cache_serves_a_repeat(one: RigWorker) -> None:
    for request in ("a", "b"):
        one.handle(order(PROMPT, 3, request))
        one.rig.settle()
    assert [m.device for m in one.messages if isinstance(m, msg.Accepted)] == [0, 2]
    assert tokens_of(one.messages, "b") == reference(PROMPT, 3)


def test_a_stale_hint_costs_a_recompute_and_no_token(one: RigWorker) -> None:
    one.handle(order(PROMPT, 8, fetch=2))  # the store has nothing
    one.rig.settle()
    assert not [m for m in one.messages if isinstance(m, msg.FetchIncomplete)]
    assert tokens_of(one.messages) == reference(PROMPT, 8)


def test_an_awaited_fetch_that_ends_short_is_the_routers_to_decide() -> None:
    one = worker(fetch_timeout_ms=100)
    one.handle(order(PROMPT, 8, fetch=2, prefilled_remotely=True))
    one.rig.settle()
    assert not [m for m in one.messages if isinstance(m, msg.FetchIncomplete)]
    assert not one.state.heartbeat(0).attempts[0].incomplete
    one.rig.now += 0.2
    one.handle(Tick())
    assert one.state.heartbeat(0).attempts[0].incomplete, "FetchIncomplete may get lost"
    assert [m.pages for m in one.messages if isinstance(m, msg.FetchIncomplete)] == [0]
    assert one.state.heartbeat(0).attempts[0].position == len(PROMPT)
    one.handle(order(PROMPT, 8, attempt=2))
    one.rig.settle()
    assert not one.state.heartbeat(0).attempts[0].incomplete
    assert tokens_of(one.messages, attempt=2) == reference(PROMPT, 8)
    assert one.rig.store.stats(0.0).waits == 0


def test_our_own_pause_does_not_end_a_fetch() -> None:
    one = worker(fetch_timeout_ms=100)
    one.handle(order(PROMPT, 8, fetch=2, prefilled_remotely=True))
    one.rig.now += 50.0
    one.handle(Tick(paused=50.0))
    assert not [m for m in one.messages if isinstance(m, msg.FetchIncomplete)]


def test_a_lost_store_ends_awaited_fetches_alone(one: RigWorker) -> None:
    one.handle(order(PROMPT, 30, "running"))
    one.turn()
    one.handle(order(PROMPT[::-1], 8, "waiting", fetch=2, prefilled_remotely=True))
    one.rig.restart_store()
    assert [m.request for m in one.messages if isinstance(m, msg.FetchIncomplete)] == ["waiting"]
    while one.turn():
        pass
    assert tokens_of(one.messages, "running") == reference(PROMPT, 30)


def test_failover_goes_on_where_the_tokens_end(one: RigWorker) -> None:
    expected = reference(PROMPT, 20)
    one.handle(order(PROMPT, 20, attempt=2, known=expected[:7]))
    one.rig.settle()
    assert tokens_of(one.messages, attempt=2) == expected[7:]
    assert finishes(one.messages) == ["length"]


def test_what_can_never_fit_is_refused_at_the_door_and_what_does_not_fit_now_is_busy() -> None:
    one = worker(pages=8)
    one.handle(order(PROMPT, 40, "never"))
    assert [m.reason for m in one.messages if isinstance(m, msg.Refused)] == ["too_large"]
    one.handle(order(PROMPT * 2, 4, "first"))
    one.handle(order(PROMPT[::-1], 4, "second"))
    assert [(m.request, m.reason) for m in one.messages if isinstance(m, msg.Refused)][1:] == [("second", "busy")]


def test_an_urgent_newcomer_displaces_the_less_urgent_until_these_have_waited_long_enough() -> None:
    for waited, displaced in ((9.0, True), (11.0, False)):
        one = worker(pages=12, ageing_ms=10_000)
        one.handle(order(PROMPT * 3, 8, "patient", priority=1))
        one.rig.now += waited
        one.handle(order(PROMPT[::-1] * 3, 8, "urgent"))
        busy = [m.request for m in one.messages if isinstance(m, msg.Refused)]
        assert (busy, one.state.stats().preemptions) == (([], 1) if displaced else (["urgent"], 0))
        one.rig.settle()
        assert tokens_of(one.messages, "patient") == reference(PROMPT * 3, 8)


def _step(state: DecodeScheduler, now: float) -> None:
    """One turn without a store."""
    state.prepare(now)
    plan = state.schedule(now)
    state.handle(StepDone(plan, [None if chunk.sample is None else Sampled(7) for chunk in plan.values()]), now + 0.01)
    state.validate()


def test_what_two_have_computed_at_the_same_time_lies_in_the_pool_once() -> None:
    common = list(range(40))
    state = DecodeScheduler(DecodeConfig(), PAGE, 64)
    state.handle(order([*common, *range(100, 180)], 8, "long"), 0.0)
    state.handle(order([*common, 60, 61, 62, 63, 64], 8, "short"), 0.001)
    for turn in range(3):
        _step(state, 0.1 * turn)
    running = state.heartbeat(0).load
    assert (running.running, running.pages_free) == (2, 64 - 31 - 2)


def test_an_urgent_newcomer_displaces_one_whose_pages_carry_anothers() -> None:
    """The victim's first pages are in use by the other one, and don't come free with it."""
    steps = [msg.StepSample(tokens, tokens * tokens // 2, 0, 0, 0.001 + tokens * 0.0005) for tokens in (16, 64, 128)]
    steps.append(msg.StepSample(0, 0, 1, 64, 0.005))
    common = list(range(40))
    state = DecodeScheduler(DecodeConfig(), PAGE, 64, calibration=steps)
    state.handle(order([*common, *range(100, 180)], 8, "stays"), 0.0)
    state.handle(order([*common, 60, 61, 62, 63, 64], 8, "goes"), 0.001)  # the shorter is computed first
    for turn in range(2):
        _step(state, 0.1 * turn)
    state.handle(order(list(range(200, 200 + 28 * PAGE)), 4, "urgent", priority=-1), 0.2)
    state.validate()
    assert state.stats().running == 3 - state.stats().preemptions


def test_abandoned_writes_end_before_preemption() -> None:
    for priority in (0, -1):
        state = DecodeScheduler(DecodeConfig(), PAGE, 40)
        state.handle(StoreUp(100, PAGE_BYTES), 0.0)
        state.handle(order(list(range(81)), 1, "gone"), 0.0)
        _step(state, 0.0)
        state.handle(msg.Cancel("gone", 1), 0.02)  # the store has not answered yet
        state.handle(order(list(range(500, 529)), 4, "runs"), 0.03)
        _step(state, 0.03)
        commands = state.handle(order(list(range(900, 957)), 4, "newcomer", priority=priority), 0.05)
        state.validate()
        assert any(isinstance(each.message, msg.Accepted) for each in commands if isinstance(each, SendToRouter))
        assert state.stats().preemptions == 0


def test_a_resumed_sequence_has_the_whole_fetch_time() -> None:
    one = worker(pages=12, ageing_ms=10_000, fetch_timeout_ms=100)
    one.handle(order(PROMPT * 3, 8, "patient", priority=1))
    one.handle(order(PROMPT[::-1] * 3, 8, "urgent"))
    assert one.state.stats().preemptions == 1
    one.rig.now += 5.0
    one.handle(msg.Cancel("urgent", 1))
    one.state.prepare(one.rig.now)
    before = one.state.stats().kv_loads_incomplete
    one.state.handle(Tick(), one.rig.now)
    assert one.state.stats().kv_loads_incomplete == before


def test_an_absurd_priority_is_no_more_than_the_highest() -> None:
    one = worker(pages=12, ageing_ms=10)
    one.handle(order(PROMPT * 3, 8, "patient", priority=8))
    one.rig.now += 1.0
    one.handle(order(PROMPT[::-1] * 3, 8, "urgent", priority=-(2**31)))
    assert one.state.stats().preemptions == 0


def test_cancel_heartbeat_and_a_lost_router_free_everything() -> None:
    for ending in (msg.Cancel("r", 1), msg.RouterHeartbeat(), RouterLost()):
        one = worker()
        one.handle(order(PROMPT, 30))
        one.turn()
        one.handle(ending)
        one.rig.settle()
        assert one.state.blocks.available == one.num_pages
        assert not one.state.heartbeat(0).attempts
        assert one.rig.store.stats(0.0).leases == 0


def test_a_router_heartbeat_keeps_what_it_lists(one: RigWorker) -> None:
    one.handle(order(PROMPT, 5))
    one.handle(msg.RouterHeartbeat((msg.AttemptName("r", 1),)))
    one.rig.settle()
    assert tokens_of(one.messages) == reference(PROMPT, 5)


def test_tokens_are_said_again_even_after_the_end_until_the_router_lets_go(one: RigWorker) -> None:
    one.handle(order(PROMPT, 6))
    one.rig.settle()
    one.messages.clear()
    one.handle(msg.Resend("r", 1, len(PROMPT) + 2))
    assert tokens_of(one.messages) == reference(PROMPT, 6)[2:]
    assert finishes(one.messages) == ["length"]
    assert one.state.heartbeat(0).attempts[0].ended
    one.handle(msg.Cancel("r", 1))
    one.messages.clear()
    one.handle(msg.Resend("r", 1, 0))
    assert not one.messages


def test_an_older_or_repeated_attempt_changes_nothing(one: RigWorker) -> None:
    one.handle(order(PROMPT, 6, attempt=2))
    one.handle(order(PROMPT, 6, attempt=1))
    one.handle(order(PROMPT, 6, attempt=2))
    one.rig.settle()
    assert len([m for m in one.messages if isinstance(m, msg.Accepted)]) == 1
    assert tokens_of(one.messages, attempt=2) == reference(PROMPT, 6)


def test_a_deadline_that_passes_is_said(one: RigWorker) -> None:
    one.handle(order(PROMPT, 30, deadline_ms=100))
    one.rig.now += 0.2
    one.handle(Tick())
    assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == ["deadline"]
    assert one.state.blocks.available == one.num_pages


def test_a_failed_step_fails_its_requests_alone(one: RigWorker) -> None:
    one.handle(order(PROMPT, 5, "bad"))
    plan = one.schedule()
    one.handle(order(PROMPT, 5, "good"))
    one.handle(StepFailed(plan, "RuntimeError: boom"))
    one.rig.settle()
    assert [(m.request, m.reason) for m in one.messages if isinstance(m, msg.AttemptFailed)] == [("bad", "internal")]
    assert tokens_of(one.messages, "good") == reference(PROMPT, 5)


def test_a_step_that_does_not_fit_is_made_smaller_and_run_again() -> None:
    """Of many sequences some wait for their turn then; each gets the tokens of a worker with more memory."""
    one = worker(max_num_batched_tokens=64, pages=64)
    one.most_tokens = 16
    prompts = {f"r{number}": [number, *PROMPT] for number in range(12)}
    for request, prompt in prompts.items():
        one.handle(order(prompt, 8, request))
    one.rig.settle()
    assert not [m for m in one.messages if isinstance(m, msg.AttemptFailed)]
    assert {request: tokens_of(one.messages, request) for request in prompts} == {
        request: reference(prompt, 8) for request, prompt in prompts.items()
    }
    assert one.state.step_tokens <= 16


def test_the_smallest_step_that_does_not_fit_fails_its_requests() -> None:
    one = worker(max_num_batched_tokens=64)
    one.most_tokens = 2 * PAGE - 1
    one.handle(order(PROMPT, 5, "large"))
    one.handle(order(PROMPT[:1], 5, "small"))
    one.rig.settle()
    failed = [m for m in one.messages if isinstance(m, msg.AttemptFailed)]
    assert {(m.reason, m.message) for m in failed} == {("internal", "CUDA out of memory")}
    assert "large" in {m.request for m in failed}
    one.handle(order(PROMPT[:2], 5, "later"))
    one.rig.settle()
    assert tokens_of(one.messages, "later") == reference(PROMPT[:2], 5)


@pytest.mark.parametrize("broken_step", [0, 1, 5])
def test_logits_that_are_not_finite_fail_their_request_and_no_other(broken_step: int) -> None:
    state = DecodeScheduler(DecodeConfig(), PAGE, 64)
    log: list[msg.Message] = []

    def handle(event: msg.Decode | StepDone) -> None:
        log.extend(each.message for each in state.handle(event, 0.0) if isinstance(each, SendToRouter))

    for request, prompt in (("bad", PROMPT), ("good", PROMPT[::-1])):
        handle(order(prompt, 9, request))
    cached = 0
    for step in range(9):
        assert not state.prepare(0.0)
        plan = state.schedule(0.0)
        broken = [step == broken_step and name.request == "bad" for name in plan]
        cached = len(state.blocks.pages()) if any(broken) else cached
        handle(StepDone(plan, [Sampled(7, finite=not bad) for bad in broken]))
        if step == broken_step:
            of_good = (len(PROMPT) + step) // PAGE
            assert len(state.blocks.pages()) <= max(cached + 1, of_good)  # no page of this step is the bad one's
    assert [(m.request, m.reason) for m in log if isinstance(m, msg.AttemptFailed)] == [("bad", "non_finite_logits")]
    assert tokens_of(log, "bad") == [7] * broken_step
    assert tokens_of(log, "good") == [7] * 9
    assert state.blocks.available == 64


def test_a_token_that_the_model_lacks_fails_its_own_request_alone() -> None:
    state = DecodeScheduler(DecodeConfig(), PAGE, 64, vocab_size=100)
    for request, prompt in (("fine", [1, 99]), ("odd", [1, 100])):
        commands = state.handle(order(prompt, 4, request), 0.0)
        failed = [
            each.message.reason
            for each in commands
            if isinstance(each, SendToRouter) and isinstance(each.message, msg.AttemptFailed)
        ]
        assert failed == ([] if request == "fine" else ["malformed_message"])
    assert state.stats().running == 1


def test_a_stop_token_that_the_model_lacks_is_never_forbidden() -> None:
    """A tokenizer may have more tokens than the model; to forbid one of these would fail the whole step."""
    state = DecodeScheduler(DecodeConfig(), PAGE, 64, vocab_size=100)
    rules = msg.LogitsRules(min_tokens=3)
    decode = order([1, 2], 4, stop_token_ids=(7, 100, 2**63 - 1, -1))
    state.handle(msgspec.structs.replace(decode, sampling=msg.SamplingParams(temperature=0, rules=rules)), 0.0)
    (chunk,) = state.schedule(0.0).values()
    assert list(chunk.sample.edits.forbidden) == [7]


def test_tokens_that_make_no_sense_are_refused(one: RigWorker) -> None:
    one.handle(msg.Decode("r", 1, ROOT, b"123", 1, 5, GREEDY))
    one.handle(msg.Decode("s", 1, ROOT, pack_tokens([1]), 2, 5, GREEDY))
    assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == ["malformed_message"] * 2


def computed_of(messages: list[msg.Message], request: str) -> int:
    """Prompt tokens that the worker says it computed for a request."""
    return next(d.computed for m in messages if isinstance(m, msg.Tokens) for d in m.deltas if d.request == request)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_that_was_computed_here_is_shared_to_its_last_token(one: RigWorker, length: int) -> None:
    """Full pages by reference, the beginning of the last one as a copy, while the first sample goes on in it."""
    prompt = (PROMPT * 2)[:length]
    one.handle(order(prompt, 9, "first"))
    one.step()
    for name in ("second", "third"):
        one.handle(order(prompt, 9, name))
    shared = one.state.blocks.stats()
    one.step()
    assert computed_of(one.messages, "second") == computed_of(one.messages, "third") == 1
    assert shared.referenced <= (length - 1) // PAGE + 3 * 2
    one.rig.settle()
    for name in ("first", "second", "third"):
        assert tokens_of(one.messages, name) == reference(prompt, 9)
    assert one.state.blocks.available == one.num_pages


def test_a_prompt_that_goes_on_with_the_first_token_of_another_is_computed_from_there(one: RigWorker) -> None:
    """As each step of a beam search does."""
    known = list(PROMPT)
    for number in range(9):
        one.handle(order(known, 1, f"r{number}"))
        one.rig.settle()
        assert computed_of(one.messages, f"r{number}") == (len(known) if number == 0 else 1)
        known += tokens_of(one.messages, f"r{number}")
    assert known == PROMPT + reference(PROMPT, 9)


@pytest.mark.parametrize("common", range(len(PROMPT) + 1))
def test_a_prompt_that_leaves_another_one_within_a_page_is_computed_from_there(one: RigWorker, common: int) -> None:
    one.handle(order(PROMPT, 5, "first"))
    one.rig.settle()
    prompt = [*PROMPT[:common], *[0] * (2 * PAGE)]
    one.handle(order(prompt, 9, "second"))
    one.rig.settle()
    copied = common % PAGE if common % PAGE >= 2 else 0
    assert computed_of(one.messages, "second") == len(prompt) - common // PAGE * PAGE - copied
    assert one.state.stats().tokens_copied == copied
    assert tokens_of(one.messages, "second") == reference(prompt, 9)


@given(data=st.data())
def test_whatever_prompts_have_in_common_tokens_are_those_of_the_reference(data: st.DataObject) -> None:
    """With few pages, which are handed out again and again, and among them those of sequences that are preempted."""
    one, prompts = worker(pages=10), dict[str, list[int]]()
    for number in range(data.draw(st.integers(2, 6))):
        prompt = prompts[f"r{number}"] = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3 * PAGE))
        one.handle(order(prompt, 6, f"r{number}"))
        for _ in range(data.draw(st.integers(0, 9))):
            one.step()
    one.rig.settle()
    for name, prompt in prompts.items():
        refused = any(isinstance(m, msg.Refused) and m.request == name for m in one.messages)
        assert refused or tokens_of(one.messages, name) == reference(prompt, 6)


def _one_token_too_many(page: int, count: int) -> tuple[int, int]:
    return page, count + (count == 2)


def _the_page_beside(page: int, count: int) -> tuple[int, int]:
    return page ^ 1, count


@pytest.mark.parametrize("mistake", [_one_token_too_many, _the_page_beside])
def test_a_mistake_in_copied_tokens_is_noticed(
    mistake: Callable[[int, int], tuple[int, int]], one: RigWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = DeviceBlockManager.find_beginning
    monkeypatch.setattr(DeviceBlockManager, "find_beginning", lambda *args: mistake(*find(*args)))
    one.handle(order(PROMPT, 5, "first"))
    one.rig.settle()
    one.handle(order([*PROMPT[:6], *[0] * PAGE], 9, "second"))
    with pytest.raises(AssertionError):
        one.rig.settle()


def test_the_beginning_of_a_page_is_forgotten_when_the_page_is_handed_out() -> None:
    one = worker(pages=6)
    one.handle(order(PROMPT, 1, "first"))
    one.rig.settle()
    one.handle(order([9, 9, 1], 4, "other"))  # takes the page that was given back last
    one.rig.settle()
    one.handle(order(PROMPT, 5, "second"))
    one.rig.settle()
    assert tokens_of(one.messages, "second") == reference(PROMPT, 5)


def test_a_write_of_which_the_store_says_nothing_keeps_its_pages_no_longer_than_a_fetch() -> None:
    """A silent store is alive as long as it sends heartbeats."""
    state, now = DecodeScheduler(DecodeConfig(fetch_timeout_ms=10_000), PAGE, 32), 0.0
    state.handle(StoreUp(64, PAGE_BYTES), now)
    state.handle(order([3] * (2 * PAGE), 1), now)
    called = list[Any]()
    while not finishes([command.message for command in called if isinstance(command, SendToRouter)]):
        plan = state.schedule(now := now + 0.01)
        drawn = [None if chunk.sample is None else Sampled(7) for chunk in plan.values()]
        called += state.handle(StepDone(plan, drawn), now)
    (lease,) = state.leases
    state.handle(Tick(0.0), now := now + 9.0)
    state.handle(Tick(5.0), now := now + 5.0)  # this worker itself was paused
    state.handle(Reserved(lease, (1, 2)), now)
    (first, last) = state.take_copies()
    state.handle(Tick(0.0), now := now + 9.0)
    state.handle(CopiedOut(lease, first.index, (8, 9)), now)
    assert last.index == first.index + 1
    state.handle(Tick(0.0), now := now + 9.0)
    assert state.leases == (lease,)
    assert state.blocks.available < 32
    assert CallStore(EndLease(lease)) in state.handle(Tick(0.0), now + 2.0)
    assert state.leases == ()
    assert state.blocks.available == 32
    state.validate()


@pytest.mark.parametrize(("overlap", "most"), [(False, 2), (True, 99)])
def test_copies_that_delay_steps_are_few_while_sequences_decode(overlap: bool, most: int) -> None:
    """They are made beside the worker's loop, which asks for more while a step runs. The device tells what they took:
    most of what passes until they are told of is the step before them."""
    steps = [msg.StepSample(0, 0, rows, 20 * rows, 0.010) for rows in (1, 2, 4)]
    state = DecodeScheduler(DecodeConfig(), PAGE, 512, calibration=steps, copies_overlap=overlap)
    state.handle(StoreUp(1_000, PAGE_BYTES), 0.0)
    state.handle(order([5], 500, "decodes"), 0.0)
    calls = state.handle(order([3] * (300 * PAGE + 1), 1, "fetches", fetch=300), 0.0)
    acquire = next(each.call for each in calls if isinstance(each, CallStore))
    assert isinstance(acquire, Acquire)
    pages = tuple(LeasedPage(index, index, 0) for index in range(100))
    state.handle(PagesReady(acquire.lease, pages[:1]), 0.0)
    (first,) = state.take_copies()
    state.handle(CopiedIn(first.lease, (first.index,), seconds=0.001), 1.0)
    state.handle(PagesReady(acquire.lease, pages[1:]), 1.0)
    copies = [len(state.take_copies()) for _ in range(3)]
    assert copies == [most, 0, 0]


def test_a_write_that_waits_for_its_own_worker_is_not_given_up() -> None:
    state, now = DecodeScheduler(DecodeConfig(fetch_timeout_ms=10_000), PAGE, 32), 0.0
    state.handle(StoreUp(64, PAGE_BYTES), now)
    state.handle(order([3] * (2 * PAGE), 1), now)
    while not state.leases:
        plan = state.schedule(now := now + 0.01)
        state.handle(StepDone(plan, [None if each.sample is None else Sampled(7) for each in plan.values()]), now)
    (lease,) = state.leases
    state.handle(Reserved(lease, (1, 2)), now)
    for _ in range(9):
        state.handle(Tick(0.0), now := now + 9.0)  # no copy has been made
    assert state.leases == (lease,)
    assert len(state.take_copies()) == 2


def test_a_sequence_on_pages_in_limbo_runs_when_they_have_left_it(one: RigWorker) -> None:
    pages = one.blocks.allocate(one.num_pages)
    assert pages is not None
    epoch = one.blocks.begin()
    one.blocks.free(pages)
    one.handle(order(PROMPT, 5, "r"))
    assert not one.schedule()
    assert not one.state.busy, "the loop would spin until the end of a copy"
    one.blocks.end(epoch)
    assert one.state.busy
    assert one.schedule()
