"""Pages are computed again while a worker is idle, and one that differs is used no more: the pure core, schedulers with
devices that remember what was computed, and the engine."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Cancel, Prefilled, Started
from baton.store_protocol import Acquire, EndLease, LowerTierHits
from engine.engine import Engine
from engine.step.batch import Chunk
from engine.step.outcome import StepDone, StepFailed
from engine.step.recomputation import NAME, ComparePages, PagesCompared, Recomputation
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CallStore
from kvstore.events.changes import PagesRemoved
from tests.decode_worker.test_scheduler_decisions import finishes
from tests.kvstore.chains import key, keys, parent
from tests.kvstore.test_refill import cached, full_keys, order, serve, stored
from tests.support.workers_and_stores import PAGE, Rig, RigWorker

PROMPT = [7, 3, 9, 1, 4, 4, 2, 8, 5, 6, 1, 2, 3, 3, 5, 9, 2, 2, 8, 1]
KEYS = full_keys(PROMPT)


def worker(role: str, share: float = 1.0) -> RigWorker:
    config = PrefillConfig() if role == "prefill" else DecodeConfig()
    return Rig(64).worker(role, 32, config, recompute_share=share)  # type: ignore[arg-type]


def idle(one: RigWorker, turns: int = 20) -> None:
    for _ in range(turns):
        one.turn()


def spoil(one: RigWorker, number: int) -> None:
    """Flip something in the device page that is cached under that key."""
    page = one.state.blocks.find(KEYS[number]).page
    one.device.pages[page] = [one.device.pages[page][0] + 1, *one.device.pages[page][1:]]


def ask(one: RigWorker, request: str) -> None:
    order(one, [*PROMPT, 1] if one.role == "decode" else PROMPT, request)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sound_pages_are_recomputed_once_and_stay(role: str) -> None:
    one = worker(role)
    ask(one, "a")
    one.rig.settle()
    one.handle(Cancel("a", 1))
    idle(one)
    assert (one.state.stats().pages_recomputed, one.state.stats().pages_differing) == (5, 0)
    assert cached(one) == set(KEYS) == stored(one.rig)
    assert one.state.blocks.available == one.num_pages


@pytest.mark.technique("Pages checked by recomputation")
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_page_that_differs_is_dropped_with_its_chain_here_and_in_the_store(role: str, number: int) -> None:
    one = worker(role)
    ask(one, "a")
    while not cached(one):
        one.turn()
    spoil(one, number)
    idle(one)
    one.handle(Cancel("a", 1))
    assert one.state.stats().pages_differing == 1
    assert cached(one) == set(KEYS[:number]) == stored(one.rig)
    assert one.state.leases == ()
    assert one.state.blocks.available == one.num_pages
    ask(one, "b")
    one.rig.settle()
    if role == "prefill":
        assert [m.computed for m in one.messages if isinstance(m, Prefilled)] == [5 * PAGE, (5 - number) * PAGE]
    else:
        assert [m.device_pages for m in one.messages if isinstance(m, Started)] == [0, number]


def test_a_sequence_that_runs_on_a_differing_page_goes_on() -> None:
    one = worker("decode")
    ask(one, "a")
    one.rig.settle()
    order(one, [*PROMPT, 1], "b", count=30)
    one.state.blocks.forget(KEYS[2])
    one.rig.settle()
    assert finishes(one.messages) == ["length"] * 2
    one.handle(Cancel("a", 1))
    one.handle(Cancel("b", 1))
    idle(one)
    assert one.state.blocks.available == one.num_pages


def test_nothing_is_recomputed_unless_it_is_asked_for_and_only_while_there_is_no_work() -> None:
    one = worker("decode", 0.0)
    ask(one, "a")
    idle(one)
    assert one.state.stats().pages_recomputed == 0
    one = worker("decode")
    order(one, PROMPT, "long", count=40)
    order(one, PROMPT, "short", count=1)
    while "length" not in finishes(one.messages):
        one.turn()
    idle(one, 10)
    assert one.state.stats().running == 1
    assert one.state.stats().pages_recomputed == 0


def test_a_share_of_the_pages_is_chosen() -> None:
    one = worker("prefill", 0.25)
    for number in range(20):
        serve(one, [[number] * 10 * PAGE])
        idle(one, 11)
    assert 30 <= one.state.stats().pages_recomputed <= 70


# --- the pure core --------------------------------------------------------------------------------------------------


@pytest.fixture
def noted() -> tuple[DeviceBlockManager, Recomputation]:
    cache = DeviceBlockManager(6)
    pages = cache.allocate_with_prefix(keys("abc"), 3)
    assert pages is not None
    for index, page in enumerate(pages):
        cache.cache_block(key("abc"[: index + 1]), parent("abc", index), page)
    cache.free(pages)
    cache.drain_events()
    again = Recomputation(cache, itertools.count(1), PAGE, 1.0)
    again.note(PROMPT, keys("abc"), 3, "")
    return cache, again


def test_a_step_is_one_page_over_its_cached_prefix(noted: tuple[DeviceBlockManager, Recomputation]) -> None:
    cache, again = noted
    for number in range(3):
        plan = again.plan()
        chunk = plan[NAME]
        assert (list(chunk.tokens), chunk.start) == (PROMPT[number * PAGE : (number + 1) * PAGE], number * PAGE)
        assert again.plan() == {}, "one at a time"
        (compare,) = again.step_ended(StepDone(plan, [None]))
        assert isinstance(compare, ComparePages)
        assert compare.scratch == chunk.pages[-1] != compare.page
        assert [*chunk.pages[:-1], compare.page] == [
            page.page for name in keys("abc")[: number + 1] if (page := cache.find(name)) is not None
        ]
        assert again.compared(PagesCompared(True)) == []
    assert again.plan() == {}
    assert cache.available == 6


def test_what_was_evicted_is_skipped_and_a_failed_step_lets_go(noted: tuple[DeviceBlockManager, Recomputation]) -> None:
    cache, again = noted
    pages = cache.allocate(5)  # "abc" and "ab" go
    assert pages is not None
    cache.free(pages)
    plan = again.plan()
    assert plan[NAME].start == 0
    assert again.step_ended(StepFailed(plan, "it broke")) == []
    assert cache.available == 6
    assert again.plan() == {}


def test_a_page_that_differs_is_asked_for_and_told_to_be_corrupt(
    noted: tuple[DeviceBlockManager, Recomputation],
) -> None:
    cache, again = noted
    again.step_ended(StepDone(again.plan(), [None]))
    assert again.compared(PagesCompared(False)) == [CallStore(Acquire(1, key("a")))]
    assert cache.drain_events() == [PagesRemoved((key("abc"), key("ab"), key("a")))]
    assert again.leases == (1,)
    assert again.handle(1, LowerTierHits(1, 0, ())) == [CallStore(EndLease(1))]
    assert again.leases == ()
    assert again.plan() == {}, "the pages after it are not cached any more"
    cache.validate()


# --- the engine -----------------------------------------------------------------------------------------------------


def test_the_engine_compares_every_bit(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cpu", 8, 16, False, 1)
    tokens = list(range(3, 51))
    engine.step([Chunk(tokens, 0, [0, 1, 2])])
    engine.step([Chunk(tokens[32:], 32, [0, 1, 5])])
    assert engine.same_contents(2, 5)
    engine.pages.view(2)[-1] ^= 1
    assert not engine.same_contents(2, 5)
