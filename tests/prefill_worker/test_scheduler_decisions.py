"""The prefill worker's decisions, with a real store state and a device that notices a wrong page."""

from baton import messages as msg
from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.membership import RouterLost
from baton.store_protocol import NotReserved, Reserved
from engine.step.outcome import StepDone, StepFailed, StepLaunched, StepOutOfMemory
from kvstore.keys import cacheable_pages, pack_tokens
from prefill_worker.prefill_request import PrefillPhase
from simulator.worker_shell import at_once
from tests.decode_worker.test_scheduler_decisions import tokens_of
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, reference

PROMPT = [7, 3, 9, 1, 4, 4, 2, 8, 5, 6, 1, 2, 3, 3]  # three full pages and two tokens


def handed(prompt: list[int], request: str = "r") -> msg.Prefill:
    """All but the last token, as for a decode worker."""
    return msg.Prefill(request, 1, ROOT, pack_tokens(prompt[:-1]))


def awaits(prompt: list[int], count: int, request: str = "r", **more: object) -> msg.Decode:
    pages, tokens = -(-(len(prompt) - 1) // PAGE), pack_tokens(prompt)
    greedy = msg.SamplingParams(temperature=0)
    return msg.Decode(
        request, 1, ROOT, tokens, len(prompt), count, greedy, fetch=pages, prefilled_remotely=True, **more
    )  # type: ignore[arg-type]


def order(prompt: list[int], request: str = "r", attempt: int = 1, **more: object) -> msg.Prefill:
    full = cacheable_pages(len(prompt), PAGE) * PAGE
    return msg.Prefill(request, attempt, ROOT, pack_tokens(prompt[:full]), **more)  # type: ignore[arg-type]


def worker(slots: int = 64, pages: int = 32, **config: int) -> RigWorker:
    return Rig(slots).worker("prefill", pages, PrefillConfig(**config))


def done(messages: list[msg.Message]) -> list[msg.Prefilled]:
    return [m for m in messages if isinstance(m, msg.Prefilled)]


def test_the_result_is_every_page_sealed_and_held() -> None:
    one = worker()
    one.handle(order(PROMPT))
    one.rig.settle()
    (result,) = done(one.messages)
    assert (result.computed, result.hit, result.stored) == (3 * PAGE, 0, 3)
    stats = one.rig.store.stats(0.0)
    assert (stats.sealed, stats.held) == (3, 3)
    assert one.state.blocks.available == one.num_pages
    one.handle(msg.Cancel("r", 1))
    assert one.rig.store.stats(0.0).held == 0


def test_what_is_there_already_is_held_and_not_computed() -> None:
    one = worker()
    for request in ("a", "b"):
        one.handle(order(PROMPT, request))
        one.rig.settle()
    assert [(m.computed, m.hit, m.stored) for m in done(one.messages)] == [(3 * PAGE, 0, 3), (0, 3, 0)]


def test_what_the_device_has_is_copied_to_a_new_store() -> None:
    one = worker()
    one.handle(order(PROMPT, "a"))
    one.rig.settle()
    one.rig.restart_store()
    one.attach()
    one.handle(order(PROMPT, "b"))
    one.rig.settle()
    assert (done(one.messages)[-1].computed, done(one.messages)[-1].stored) == (0, 3)


def test_what_the_store_has_is_read_to_compute_what_follows() -> None:
    one = worker()
    one.handle(order(PROMPT[:9], "a"))
    one.rig.settle()
    other = one.rig.worker("prefill", 32, PrefillConfig())
    other.handle(order(PROMPT, "b"))
    one.rig.settle()
    assert [(m.computed, m.hit, m.stored) for m in done(other.messages)] == [(PAGE, 2, 1)]
    assert other.state.stats().pages_hit_in_store == 2


def test_a_prompt_looks_again_only_when_its_step_has_ended() -> None:
    """Pages that the store has lost while a step runs beside the loop. What the store has by then is not copied over
    the step's pages, nor counted on top of them."""
    rig = Rig(64)
    one, other, decode = (
        rig.worker("prefill", 32, PrefillConfig(max_num_batched_tokens=PAGE)),
        rig.worker("prefill", 32, PrefillConfig()),
        rig.worker("decode", 32, DecodeConfig()),
    )
    one.handle(handed(PROMPT))
    one.hear()
    plan = one.schedule()
    (job,) = one.state._requests.values()
    assert job.steps
    one.handle(NotReserved(job.store.lease, "orphan"))
    other.handle(order(PROMPT[:9], "other"))
    while not done(other.messages):
        other.turn()
    one.hear()
    one.handle(at_once(one.run_step(plan)))
    decode.handle(awaits(PROMPT, 9))
    rig.settle()
    (result,) = done(one.messages)
    assert (result.computed, result.hit) == (2 * PAGE + 1, 1)
    assert tokens_of(decode.messages) == reference(PROMPT, 9)


def test_a_step_is_launched_behind_a_short_one_alone() -> None:
    for seconds, starts in ((0.002, [0, PAGE, 2 * PAGE]), (0.03, [0])):
        one = worker(max_num_batched_tokens=PAGE)
        one.state._step_costs.calibrate([msg.StepSample(PAGE, PAGE * (PAGE + 1) // 2, 0, 0, seconds)])
        one.handle(order(PROMPT))
        one.hear()
        plans = []
        while plan := one.schedule():
            plans.append(plan)
            one.handle(StepLaunched(plan))
        assert [chunk.start for plan in plans for chunk in plan.values()] == starts
        one.handle(at_once(one.run_step(plans[-1])) if len(plans) == 1 else StepFailed(plans[0], "so it is"))
        one.state.validate()


def test_what_was_launched_behind_a_step_without_memory_does_not_count() -> None:
    rig = Rig(64)
    one = rig.worker("prefill", 32, PrefillConfig(max_num_batched_tokens=2 * PAGE))
    decode = rig.worker("decode", 32, DecodeConfig())
    one.handle(handed(PROMPT))
    one.hear()
    first = one.schedule()
    one.handle(StepLaunched(first))
    behind = one.schedule()
    assert [chunk.start for plan in (first, behind) for chunk in plan.values()] == [0, 2 * PAGE]
    one.handle(StepLaunched(behind))
    one.handle(StepOutOfMemory(first, "so it is"))
    again = one.schedule()
    assert [(chunk.start, chunk.end) for chunk in again.values()] == [(0, PAGE)]
    one.handle(StepDone(behind, [None]))
    one.handle(at_once(one.run_step(again)))
    decode.handle(awaits(PROMPT, 9))
    rig.settle()
    assert [m.computed for m in done(one.messages)] == [len(PROMPT) - 1]
    assert tokens_of(decode.messages) == reference(PROMPT, 9)


def test_a_prompt_whose_pages_another_worker_seals_meanwhile_is_done_before_its_step_has_ended() -> None:
    """A step runs beside the loop, and the store answers that it has every page. The step's end changes nothing."""
    rig = Rig(64)
    one = rig.worker("prefill", 32, PrefillConfig())
    one.handle(order(PROMPT))
    one.hear()  # the store has nothing
    plan = one.schedule()
    (job,) = one.state._requests.values()
    assert job.steps
    lease = job.store.lease
    one.handle(Reserved(lease, (None, None, None)))
    assert [m.stored for m in done(one.messages)] == [0]
    one.handle(at_once(one.run_step(plan)))
    assert job.phase is PrefillPhase.DONE
    one.state.validate()
    one.handle(order(PROMPT, "next"))
    one.state.validate()


def test_pages_arrive_at_a_waiting_decode_worker_while_later_chunks_are_computed() -> None:
    rig = Rig(64)
    prefill = rig.worker("prefill", 32, PrefillConfig(max_num_batched_tokens=PAGE))
    decode = rig.worker("decode", 32, DecodeConfig())
    tokens = pack_tokens(PROMPT)
    decode.handle(
        msg.Decode(
            "r", 1, ROOT, tokens, len(PROMPT), 9, msg.SamplingParams(temperature=0), fetch=3, prefilled_remotely=True
        )
    )
    prefill.handle(order(PROMPT))
    prefill.turn()
    prefill.turn()
    decode.turn()
    decode.turn()  # a page counts when the store has confirmed its lease
    assert 0 < decode.state.stats().prompt_pages_fetched < 3
    rig.settle()
    assert msg.Started("r", 1, fetched_pages=3) in decode.messages
    assert tokens_of(decode.messages) == reference(PROMPT, 9)


def test_a_partial_page_is_handed_off_and_not_cached() -> None:
    rig = Rig(64)
    prefill, decode = rig.worker("prefill", 32, PrefillConfig()), rig.worker("decode", 32, DecodeConfig())
    decode.handle(awaits(PROMPT, 5))
    prefill.handle(handed(PROMPT))
    rig.settle()
    (result,) = done(prefill.messages)
    assert (result.computed, result.hit, result.stored) == (len(PROMPT) - 1, 0, 4)
    assert msg.Started("r", 1, fetched_pages=4) in decode.messages
    assert tokens_of(decode.messages) == reference(PROMPT, 5)
    first = next(m for m in decode.messages if isinstance(m, msg.Tokens)).deltas[0]
    assert first.computed == 1, "the decode worker began with the last token"
    written = (len(PROMPT) + 4) // PAGE
    assert rig.store.stats(0.0).sealed == written + 1, "whoever made it holds it"
    assert sum(len(run.keys) // msg.KEY_BYTES for run in rig.store.snapshot()) == written, "nobody was told of it"
    prefill.handle(msg.Cancel("r", 1))
    assert rig.store.stats(0.0).sealed == written
    prefill.handle(handed(PROMPT, "again"))
    rig.settle()
    assert [(m.computed, m.hit) for m in done(prefill.messages)][1:] == [(1, 3)], "only the partial page is made again"
    assert decode.state.blocks.available == prefill.state.blocks.available == 32


def test_only_equal_partial_pages_are_shared() -> None:
    rig = Rig(64)
    one = rig.worker("prefill", 32, PrefillConfig(max_num_batched_tokens=PAGE, max_num_seqs=3))
    other = [*PROMPT[:-2], 9, 9]
    for request, prompt in (("a", PROMPT), ("b", PROMPT), ("c", other)):
        one.handle(handed(prompt, request))
    rig.settle()
    assert {m.request: m.computed for m in done(one.messages)} == {"a": len(PROMPT) - 1, "b": 0, "c": 1}


def test_a_partial_page_that_does_not_come_is_computed() -> None:
    rig = Rig(64)
    prefill = rig.worker("prefill", 32, PrefillConfig())
    decode = rig.worker("decode", 32, DecodeConfig(fetch_timeout_ms=100))
    decode.handle(awaits(PROMPT, 5))
    prefill.handle(order(PROMPT))  # the full pages, and no more
    rig.settle()
    assert not tokens_of(decode.messages)
    rig.now += 0.2
    decode.handle(Tick())
    rig.settle()
    assert not [m for m in decode.messages if isinstance(m, msg.FetchIncomplete)]
    assert msg.Started("r", 1, fetched_pages=3) in decode.messages
    assert tokens_of(decode.messages) == reference(PROMPT, 5)


def test_a_partial_page_of_another_node_stays_there() -> None:
    rig = Rig(64, nodes=("a", "b"))
    prefill = rig.worker("prefill", 32, PrefillConfig(), "a")
    decode = rig.worker("decode", 32, DecodeConfig(), "b")
    decode.handle(awaits(PROMPT, 5, sources=(rig.stores["a"].source(4),)))
    prefill.handle(handed(PROMPT))
    rig.settle()
    assert msg.Started("r", 1, fetched_pages=4) in decode.messages
    assert tokens_of(decode.messages) == reference(PROMPT, 5)
    prefill.handle(msg.Cancel("r", 1))
    stats = {node: store.state.stats(0.0) for node, store in rig.stores.items()}
    assert {node: (each.sealed, each.held, each.unlisted) for node, each in stats.items()} == {
        "a": (3, 0, 0),
        "b": ((len(PROMPT) + 4) // PAGE, 0, 0),
    }


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    one = worker(max_num_batched_tokens=2 * PAGE, pages=64)
    one.handle(order([1] * 80, "long"))
    one.turn()
    one.handle(order(PROMPT, "short"))
    one.rig.settle()
    assert [m.request for m in done(one.messages)] == ["short", "long"]


def test_a_step_waits_for_the_store_where_that_lets_a_prompt_in() -> None:
    one = worker(max_num_batched_tokens=2 * PAGE, pages=64, step_ms=100)
    one.handle(order(PROMPT, "first"))
    assert one.state.patience == 0  # there is no step that could wait
    one.hear()
    assert one.state.patience == 0  # nothing is to be said that matters
    one.handle(order([1] * 40, "second"))
    assert 0 < one.state.patience <= 0.01
    one.hear()
    assert one.state.patience == 0
    assert one.step()
    assert one.state._requests["second"].computed == PAGE


def test_a_prompt_that_had_to_share_the_arena_has_all_of_it_once_it_is_alone() -> None:
    rig = Rig(400)  # a writer may reserve 200 slots
    one = rig.worker("prefill", 600, PrefillConfig(max_num_batched_tokens=100 * PAGE))
    one.handle(order([i % 97 for i in range(200 * PAGE)], "first"))
    one.handle(order([i % 89 for i in range(190 * PAGE)], "second"))
    turns = 0
    while len(done(one.messages)) < 2:
        rig.tick(0.05)
        one.handle(Tick())
        one.turn()
        turns += 1
        assert turns < 60, "a page at a time it takes over 180"


def test_a_full_store_is_asked_again_and_its_silence_ends_the_prompt() -> None:
    rig = Rig(8)
    holder = rig.worker("prefill", 32, PrefillConfig())
    holder.handle(order([9] * (4 * PAGE + 1), "h1"))
    rig.settle()
    holder.handle(order([8] * (4 * PAGE + 1), "h2"))
    rig.settle()
    one = rig.worker("prefill", 32, PrefillConfig(store_timeout_ms=1_000))
    one.handle(order(PROMPT))
    rig.settle()
    assert not done(one.messages)
    holder.handle(msg.Cancel("h1", 1))
    rig.now += 0.1
    one.handle(Tick())
    rig.settle()
    assert [m.request for m in done(one.messages)] == ["r"]

    one.handle(order(PROMPT[::-1], "late"))
    rig.settle()
    rig.now += 1.1
    one.handle(Tick())
    assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == ["store"]
    assert one.state.blocks.available == one.num_pages


def test_our_own_pause_is_not_the_stores_silence() -> None:
    for paused, failed in ((50.0, []), (0.0, ["store"])):
        one = worker(store_timeout_ms=1_000)
        one.handle(order(PROMPT))  # the store has not answered yet
        one.rig.now += 50.0
        one.handle(Tick(paused=paused))
        assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == failed


def test_two_that_take_each_others_pages_from_the_store_do_not_go_on_so_for_ever() -> None:
    rig = Rig(8, hold=5.0, admit_after=1, load_share=0.5)
    one = rig.worker(
        "prefill", 40, PrefillConfig(max_num_batched_tokens=3 * PAGE, max_num_seqs=6, store_timeout_ms=2_000)
    )
    one.handle(order([9] * (4 * PAGE + 1), "held"))
    rig.settle()
    for number, request in enumerate(("a", "b")):  # each needs more slots than are left, and passes through a window
        one.handle(order([number] * (5 * PAGE + 1), request))
    for _ in range(8):
        rig.settle()
        rig.tick(0.5)
        one.handle(Tick())
    assert [m.request for m in done(one.messages)] == ["held"]
    failures = {m.request: m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)}
    assert failures == {"a": "store", "b": "store"}


def test_a_lost_store_fails_its_prompts() -> None:
    one = worker(max_num_batched_tokens=PAGE)
    one.handle(order(PROMPT))
    one.turn()
    one.rig.restart_store()
    assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == ["store_gone"]
    one.handle(order(PROMPT, "too early"))
    assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == ["store_gone"] * 2
    assert one.state.blocks.available == one.num_pages


def test_limits_are_said() -> None:
    one = worker(slots=16, pages=4, max_num_seqs=1)
    one.handle(order([1] * 80, "beyond the arena"))
    one.handle(order([1] * 40, "beyond the device"))
    one.handle(order(PROMPT, "a"))
    one.handle(order(PROMPT[::-1], "b"))
    assert [(m.request, m.reason) for m in one.messages if isinstance(m, msg.Refused)] == [
        ("beyond the arena", "too_large"),
        ("beyond the device", "too_large"),
        ("b", "busy"),
    ]
    one.handle(msg.Prefill("c", 1, ROOT, pack_tokens([1, 2, 3])))
    assert [m.reason for m in one.messages if isinstance(m, msg.AttemptFailed)] == ["malformed_message"]


def test_cancel_heartbeat_and_a_lost_router_free_everything() -> None:
    for ending in (msg.Cancel("r", 1), msg.RouterHeartbeat(), RouterLost()):
        one = worker(max_num_batched_tokens=PAGE)
        one.handle(order(PROMPT))
        one.turn()
        one.handle(ending)
        one.rig.settle()
        assert one.state.blocks.available == one.num_pages
        assert (one.rig.store.stats(0.0).leases, one.rig.store.stats(0.0).reserved) == (0, 0)


def test_a_newer_attempt_replaces_an_older_one() -> None:
    one = worker(max_num_batched_tokens=PAGE)
    one.handle(order(PROMPT))
    one.turn()
    one.handle(order(PROMPT, attempt=2))
    one.handle(order(PROMPT, attempt=1))
    one.rig.settle()
    assert [m.attempt for m in done(one.messages)] == [2]


def test_a_deadline_and_a_failed_step_are_said() -> None:
    one = worker(max_num_batched_tokens=PAGE)
    one.handle(order(PROMPT[::-1], "bad"))
    one.hear()
    plan = one.schedule()
    one.handle(order(PROMPT, "late", deadline_ms=100))
    one.handle(StepFailed(plan, "boom"))
    one.rig.now += 0.2
    one.handle(Tick())
    assert [(m.request, m.reason) for m in one.messages if isinstance(m, msg.AttemptFailed)] == [
        ("bad", "internal"),
        ("late", "deadline"),
    ]


def test_a_step_that_does_not_fit_is_made_smaller_and_run_again() -> None:
    """No request notices, and no later step is as large."""
    one = worker(max_num_batched_tokens=8 * PAGE)
    one.most_tokens = 2 * PAGE
    one.handle(order(PROMPT * 2))
    one.handle(order(PROMPT[::-1] * 2, "s"))
    one.rig.settle()
    assert {m.request for m in done(one.messages)} == {"r", "s"}
    assert one.state.step_tokens <= 2 * PAGE


def test_the_smallest_step_that_does_not_fit_fails_its_requests() -> None:
    one = worker(max_num_batched_tokens=8 * PAGE)
    one.most_tokens = PAGE - 1
    one.handle(order(PROMPT * 2))
    one.rig.settle()
    assert [(m.request, m.reason, m.message) for m in one.messages if isinstance(m, msg.AttemptFailed)] == [
        ("r", "internal", "CUDA out of memory")
    ]
    assert one.state.step_tokens == PAGE
    one.most_tokens = PAGE
    one.handle(order(PROMPT, "later"))
    one.rig.settle()
    assert [m.request for m in done(one.messages)] == ["later"]


def test_a_step_waits_for_the_seal_of_another_prompt_s_last_page() -> None:
    """What is done is said before others' next step, not after it."""
    one = worker(max_num_batched_tokens=16 * PAGE, pages=64, step_ms=100)
    one.handle(order(PROMPT, "short"))
    one.handle(order([1] * 200, "long"))
    one.hear()
    while one.state._requests["short"].pending:
        assert one.step()
    assert one.state.patience == 0  # its pages are not even written
    one.copy()
    assert 0 < one.state.patience <= 0.01
    one.hear()
    assert one.state.patience == 0
    assert [m.request for m in done(one.messages)] == ["short"]


def test_a_prompt_like_one_that_waits_for_slots_has_all_its_tokens_and_no_more() -> None:
    """Its partial page, too, is complete on the device."""
    one = worker(slots=4)
    one.handle(order([9] * (3 * PAGE), "full"))
    one.rig.settle()  # holds three of four slots
    for request in ("first", "alike"):
        one.handle(handed(PROMPT, request))
        for _ in range(4):
            one.turn()
    assert [(job.pending, job.phase) for job in one.state._requests.values() if job.active] == [
        (0, PrefillPhase.COMMITTING)
    ] * 2
    assert not one.state.busy
    one.handle(msg.Cancel("full", 1))
    for _ in range(2):  # the second asks while the first one's pages are being written
        one.rig.tick(0.1)
        one.handle(Tick())
        one.rig.settle()
    assert [m.request for m in done(one.messages)] == ["full", "first", "alike"]


def test_a_prompt_on_pages_in_limbo_is_computed_when_they_have_left_it() -> None:
    one = worker()
    pages = one.blocks.allocate(one.num_pages)
    assert pages is not None
    epoch = one.blocks.begin()
    one.blocks.free(pages)
    one.handle(order(PROMPT))
    one.hear()
    assert not one.schedule()
    assert not one.state.busy, "the loop would spin until the end of a copy"
    one.blocks.end(epoch)
    assert one.state.busy
    assert one.schedule()


def test_a_prompt_that_leaves_another_one_within_a_page_is_computed_from_there() -> None:
    one = worker()
    for number, common in enumerate(range(len(PROMPT) - 1)):
        one.handle(order(PROMPT, "first"))
        one.rig.settle()
        before = one.state.stats().tokens_copied
        prompt = [*PROMPT[:common], *[20 + number] * (2 * PAGE)]
        one.handle(handed(prompt, f"r{number}"))
        one.rig.settle()
        copied = common % PAGE if common % PAGE >= 2 else 0
        assert one.state.stats().tokens_copied == before + copied
        assert done(one.messages)[-1].computed == len(prompt) - 1 - common // PAGE * PAGE - copied


def test_pages_begun_as_copies_are_handed_to_a_decode_worker() -> None:
    rig = Rig(64)
    prefill, decode = rig.worker("prefill", 32, PrefillConfig()), rig.worker("decode", 32, DecodeConfig())
    for number, prompt in enumerate([PROMPT, [*PROMPT[:6], *[0] * 9], [*PROMPT[:11], 5]]):
        decode.handle(awaits(prompt, 5, f"r{number}"))
        prefill.handle(handed(prompt, f"r{number}"))
        rig.settle()
        assert tokens_of(decode.messages, f"r{number}") == reference(prompt, 5)
    assert prefill.state.stats().tokens_copied == 2 + 2
