"""What a worker's device has cached is offered to a store that has restarted.

With real store states and schedulers, and devices that notice a wrong page."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Cancel, Decode, Prefill, Refused, SamplingParams, Started
from baton.store_protocol import EndLease, NotReserved, Reserve
from kvstore.client import refill
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.refill import StoreRefill
from kvstore.client.transfer import CallStore
from kvstore.keys import pack_tokens, prompt_keys
from kvstore.server.events import Disconnected
from tests.kvstore.chains import key, keys, parent
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, reference

ROLES = ("prefill", "decode")
SHARED = list(range(1, 3 * PAGE + 1))
CHAINS = st.lists(
    st.builds(
        lambda shared, own: SHARED[: shared * PAGE] + own,
        st.integers(0, 3),
        st.lists(st.integers(30, 32), min_size=PAGE, max_size=4 * PAGE),
    ),
    min_size=1,
    max_size=4,
)


def worker(rig: Rig, role: str, pages: int = 40, **more: Any) -> RigWorker:
    return rig.worker("prefill", pages, PrefillConfig(**more)) if role == "prefill" else rig.worker(
        "decode", pages, DecodeConfig(**more)
    )  # fmt: skip


def order(one: RigWorker, prompt: Sequence[int], request: str, count: int = 1) -> None:
    if one.role == "prefill":
        one.handle(Prefill(request, 1, ROOT, pack_tokens(prompt[: len(prompt) // PAGE * PAGE])))
    else:
        greedy = SamplingParams(temperature=0)
        one.handle(Decode(request, 1, ROOT, pack_tokens(prompt), len(prompt), count, greedy))


def serve(one: RigWorker, prompts: Sequence[Sequence[int]]) -> None:
    """Compute these prompts, one after another, and forget them. Their pages stay cached."""
    for number, prompt in enumerate(prompts):
        order(one, prompt, f"r{number}")
        one.rig.settle()
        one.handle(Cancel(f"r{number}", 1))


def restart(one: RigWorker) -> None:
    one.rig.restart_store()
    assert one.state.leases == ()
    one.attach()


def idle(one: RigWorker, turns: int = 40) -> None:
    """Let it go on without work of its own."""
    for _ in range(turns):
        one.rig.now += 0.05
        one.handle(Tick())
        one.rig.settle()


def full_keys(tokens: Sequence[int]) -> list[bytes]:
    return prompt_keys(ROOT, pack_tokens(tokens[: len(tokens) // PAGE * PAGE]), PAGE)


def cached(one: RigWorker) -> set[bytes]:
    return {page.key for page in one.state.blocks.pages()}


def stored(rig: Rig) -> set[bytes]:
    return {key for key, _ in rig.store._pages.pages()}


@pytest.mark.parametrize("role", ROLES)
@given(prompts=CHAINS, evicted=st.integers(0, 8), run=st.integers(1, 4))
def test_all_that_is_cached_comes_to_the_new_store(role: str, prompts: list[list[int]], evicted: int, run: int) -> None:
    """Whatever is evicted before and meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refill, "_RUN", run)
        one = worker(Rig(64), role)
        serve(one, prompts)
        before = cached(one)
        restart(one)
        for _ in range(evicted):
            one.handle(Tick())
            one.hear()
            pages = one.state.blocks.allocate(one.state.blocks.stats().free + 1)  # a page of what is cached goes
            if pages is not None:
                one.state.blocks.free(pages)
            one.copy()
        idle(one)
    assert cached(one) <= stored(one.rig) <= before
    assert one.state.stats().pages_refilled == len(stored(one.rig))
    assert one.state.leases == ()
    assert one.state.blocks.available == one.num_pages
    assert one.rig.store.stats(0.0).reserved == one.rig.store.stats(0.0).held == 0


@pytest.mark.parametrize("role", ROLES)
def test_another_worker_gets_from_the_new_store_what_only_the_first_ones_device_had(role: str) -> None:
    rig = Rig(64)
    one, other = worker(rig, role), worker(rig, "decode")
    prompt = SHARED + [7] * (2 * PAGE + 1)
    serve(one, [prompt])
    restart_with(rig, one, other)
    idle(one)
    rig.kill(one)
    pages = len(prompt) // PAGE
    other.handle(Decode("x", 1, ROOT, pack_tokens(prompt), len(prompt), 1, SamplingParams(temperature=0), fetch=pages))
    rig.settle()
    assert [m.fetched_pages for m in other.messages if isinstance(m, Started)] == [pages]


def restart_with(rig: Rig, *workers: RigWorker) -> None:
    rig.restart_store()
    for each in workers:
        each.attach()


@pytest.mark.parametrize("role", ROLES)
def test_what_the_store_has_is_not_copied_again(role: str) -> None:
    one = worker(Rig(64), role)
    serve(one, [[*SHARED, 7]])
    one.node.handle(Disconnected(one.connection))
    one.lose_store()
    one.attach()  # to the same one
    idle(one)
    assert one.state.stats().pages_refilled == 0
    assert stored(one.rig) == cached(one)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("moments", range(6))
def test_a_store_that_dies_again_at_any_step_leaves_nothing_behind(
    role: str, moments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refill, "_RUN", 2)
    one = worker(Rig(64), role)
    serve(one, [SHARED + [7] * PAGE])
    restart(one)
    for _ in range(moments):
        for act in (lambda: one.handle(Tick()), one.hear, one.copy)[moments % 3 :]:
            act()
    restart(one)
    assert one.state.blocks.available == one.num_pages
    idle(one)
    assert stored(one.rig) == cached(one)


@pytest.mark.parametrize("role", ROLES)
def test_a_run_gives_way_to_a_request_and_is_offered_later(role: str) -> None:
    """The pages of a run are refused to no request, not even to one that needs all."""
    one = worker(Rig(64), role, pages=8)
    serve(one, [[*SHARED, 7], [8] * (3 * PAGE + 1)])
    restart(one)
    one.handle(Tick())
    assert one.state.blocks.available == 5
    order(one, list(range(31, 31 + 6 * PAGE)), "large")
    assert not [m for m in one.messages if isinstance(m, Refused)]
    idle(one)
    assert len(cached(one) & set(full_keys(SHARED))) == 2, "the test is to leave some of the run"
    assert cached(one) <= stored(one.rig)


@pytest.mark.parametrize("role", ROLES)
def test_while_there_is_work_runs_begin_seldom_and_are_short(role: str) -> None:
    one = worker(Rig(400), role, pages=200, max_num_batched_tokens=2 * PAGE)
    rng = random.Random(1)
    serve(one, [[rng.randrange(50) for _ in range(10 * PAGE)] for _ in range(8)])
    restart(one)
    one.rig.now += 1.0
    busy = [rng.randrange(50) for _ in range(40 * PAGE)]
    order(one, busy, "busy")
    for _ in range(10):
        one.handle(Tick())
        one.turn()
        one.rig.now += 0.005
    assert one.state.stats().pages_refilled <= refill._RUN
    idle(one)
    assert stored(one.rig) >= set(full_keys(busy))


@pytest.mark.parametrize("role", ROLES)
def test_a_small_arena_gets_what_was_used_last(role: str) -> None:
    one = worker(Rig(5), role)
    one.rig.slots = 5
    serve(one, [[number] * (2 * PAGE + 1) for number in range(6)])
    serve(one, [[1] * (2 * PAGE + 1)])  # once more
    restart(one)
    idle(one)
    assert one.state.stats().pages_refilled <= 5
    assert stored(one.rig) >= {*full_keys([5] * 2 * PAGE), *full_keys([1] * 2 * PAGE)}


def test_a_full_arena_takes_nothing() -> None:
    rig = Rig(4)
    one, other = worker(rig, "decode"), worker(rig, "prefill")
    serve(one, [[1] * (3 * PAGE + 1)])
    restart_with(rig, one, other)
    order(other, [2] * (4 * PAGE), "holds all")
    for _ in range(20):
        other.turn()
    assert rig.store.stats(0.0).held == 4
    idle(one)
    assert one.state.stats().pages_refilled == 0
    assert one.state.leases == ()


def test_a_sequence_that_was_running_writes_through_again() -> None:
    one = worker(Rig(64), "decode")
    order(one, SHARED, "r", count=6 * PAGE)
    while not cached(one):
        one.turn()
    restart(one)
    for _ in range(200):
        one.turn()
        one.handle(Tick())
        one.rig.now += 0.01
    known = SHARED + reference(SHARED, 6 * PAGE)
    assert stored(one.rig) == set(full_keys(known[:-1]))


def test_the_order_of_use_has_parents_first_and_the_last_used_last() -> None:
    cache = DeviceBlockManager(10)

    def use(chain: str) -> list[int]:
        pages = cache.allocate_with_prefix(keys(chain), len(chain))
        assert pages is not None
        for index, page in enumerate(pages):
            cache.cache_block(key(chain[: index + 1]), parent(chain, index), page)
        return pages

    for chain in ("ab", "c", "abd", "e", "c"):
        cache.free(use(chain))
    held = use("e")
    assert cache.keys_by_use() == [key(each) for each in ("a", "ab", "abd", "c", "e")]
    cache.free(held)


def chain_of_two() -> tuple[DeviceBlockManager, StoreRefill]:
    """Cached, with a first run of one page under way."""
    cache = DeviceBlockManager(4)
    pages = cache.allocate(2)
    cache.cache_block(key("a"), b"", pages[0])
    cache.cache_block(key("ab"), key("a"), pages[1])
    cache.free(pages)
    offers = StoreRefill(cache, itertools.count(1))
    offers.begin(16)
    assert [call.call.keys for call in offers.tick(1.0, 0.0, 2.0, idle=True) if isinstance(call.call, Reserve)] == [
        key("a")
    ]
    return cache, offers


def test_a_run_that_gave_way_is_not_offered_again_at_once() -> None:
    cache, offers = chain_of_two()
    assert cache.available == 3
    offers.handle(1, NotReserved(1, "quota"), 1.0)
    assert cache.available == 4
    assert offers.tick(1.05, 0.0, 2.0, idle=True) == []
    (again,) = offers.tick(1.1, 0.0, 2.0, idle=True)
    assert isinstance(again.call, Reserve)
    assert again.call.keys == key("a")


def test_a_store_that_says_nothing_is_asked_no_more() -> None:
    cache, offers = chain_of_two()
    assert offers.tick(2.9, 0.0, 2.0, idle=True) == []
    assert offers.tick(4.0, 1.2, 2.0, idle=True) == [], "this worker was paused"
    assert offers.tick(4.3, 0.0, 2.0, idle=True) == [CallStore(EndLease(1))]
    assert cache.available == 4
    assert offers.tick(9.0, 0.0, 2.0, idle=True) == []
