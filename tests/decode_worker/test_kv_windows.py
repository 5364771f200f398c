"""Requests with sinks and a window: how many pages they hold, what others may have of them, and how they go on after a
preemption and on another worker. The device notices a page that another kind of sequence has made."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import DecodeConfig
from baton.messages import Accepted, AttemptFailed, Cancel, Decode, KvCompression, Refused, SamplingParams, Tokens
from decode_worker.request_reader import RequestReader
from decode_worker.sequence import Sequence
from kvstore.keys import pack_tokens
from kvstore.kv_window import KvWindow
from kvstore.window_groups import NO_GROUPS
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, reference

WINDOW = KvCompression("window", window=13, sinks=5)
SINKS = 2  # pages
MOST = SINKS + 4  # pages that a long output holds


def prompt_of(length: int, seed: int = 7) -> list[int]:
    return [at * seed % 50 for at in range(length)]


def order(
    name: str, prompt: list[int], count: int, *, compression: KvCompression | None = WINDOW, priority: int = 0,
    attempt: int = 1, known: int = 0, fetch: int = 0,
) -> Decode:  # fmt: skip
    tokens = [*prompt, *reference(prompt, known)]
    return Decode(
        name, attempt, ROOT, pack_tokens(tokens), len(prompt), count, SamplingParams(temperature=0), (), fetch,
        priority=priority, kv_compression=compression,
    )  # fmt: skip


def sequence(worker: RigWorker, name: str = "r") -> Sequence:
    return worker.state._sequences[name]


def tokens_of(worker: RigWorker, name: str = "r") -> list[int]:
    deltas = [delta for message in worker.messages if isinstance(message, Tokens) for delta in message.deltas]
    return [token for delta in deltas if delta.request == name for token in delta.tokens]


def worker_of(pages: int, slots: int = 400) -> RigWorker:
    return Rig(slots).worker("decode", pages, DecodeConfig())


@given(
    prompt=st.integers(1, 40), sinks=st.integers(0, 12), tokens=st.integers(1, 30), page=st.integers(1, 9),
    position=st.integers(0, 120), size=st.integers(1, 60),
)  # fmt: skip
def test_a_token_attends_to_whole_pages_of_sinks_and_window(
    prompt: int, sinks: int, tokens: int, page: int, position: int, size: int
) -> None:
    window = KvWindow.of(KvCompression("window", tokens, sinks), prompt, page)
    assert window is not None
    seen = [at for at in range(position + 1) if at < sinks or at > position - tokens or position < prompt]
    pages = {at // page for at in seen}
    first = window.first_page(position)
    assert pages == {at for at in range(position // page + 1) if at < window.sinks or at >= first}
    assert (window.gap(position) == 0) == (position < window.exact), "what has no gap comes first"
    spans = list(window.spans(position, position + size))
    assert [at for begin, end, _ in spans for at in range(begin, end)] == list(range(position, position + size))
    assert all(window.gap(at) == gap for begin, end, gap in spans for at in range(begin, end))
    assert len(spans) == len({window.gap(at) for at in range(position, position + size)})


@pytest.mark.parametrize(("pages", "prompt"), [(40, 3), (40, 40), (10, 3)])
@pytest.mark.technique("Attention sinks with a window, of a request")
def test_an_output_of_any_length_holds_a_bounded_number_of_pages(pages: int, prompt: int) -> None:
    worker = worker_of(pages)
    worker.handle(order("r", prompt_of(prompt), 900))
    while len(tokens_of(worker)) < 899:
        worker.turn()
        held = sequence(worker)
        assert len(set(held.pages.held)) == held.pages.num_held
        if held.computed > held.exact + 20:  # the window has left all exact pages behind
            assert held.pages.num_held <= MOST
            assert worker.num_pages - worker.state.blocks.available <= MOST, "nothing else is kept"
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt_of(prompt), 900)
    assert worker.state.stats().preemptions == 0
    worker.rig.end(["r"])


def test_a_hundred_thousand_positions_hold_a_bounded_number_of_pages() -> None:
    """Of the arithmetic alone: each token's pages are among those that were kept after the token before it."""
    window = KvWindow(prompt=1_000, sinks=1, tokens=1_024, page_size=16)
    first = 0
    for position in range(101_000):
        now = window.first_page(position)
        assert now >= first
        assert position // 16 + 1 - (now - window.sinks if now else 0) <= window.held(now) <= window.most
        assert window.reach(position) > position // 16, "there is a page to go on with"
        first = now
    assert window.held(first) == 1 + 65


def test_pages_behind_the_first_gap_are_neither_cached_nor_stored() -> None:
    worker = worker_of(60)
    prompt = prompt_of(30)
    worker.handle(order("r", prompt, 100))
    worker.rig.settle()
    exact = KvWindow.of(WINDOW, len(prompt), PAGE).exact
    assert exact == 30, "the output has a gap from its beginning on"
    assert worker.state.stats().pages_stored == worker.rig.store.stats(0.0).sealed == exact // PAGE
    known = reference(prompt, 100)
    for name, compression in (("plain", None), ("same", WINDOW)):
        worker.handle(order(name, [*prompt, *known[:60]], 5, compression=compression))
        assert sequence(worker, name).device_pages == exact // PAGE
    worker.rig.settle()
    assert tokens_of(worker, "plain") == tokens_of(worker, "same") == reference([*prompt, *known[:60]], 5)
    worker.rig.end(["r", "plain", "same"])


def test_exact_pages_of_others_are_used_and_no_more() -> None:
    """The whole text is cached as a plain request computed it. Its pages behind the first gap are other ones."""
    worker = worker_of(80)
    prompt = prompt_of(11)
    worker.handle(order("plain", prompt, 100, compression=None))
    worker.rig.settle()
    worker.handle(order("r", prompt, 110, attempt=2, known=90))
    assert sequence(worker).exact == 24, "three pages of sinks and the next, and a window less one"
    assert sequence(worker).device_pages == 6
    assert sequence(worker).computed == 24, "and nothing is copied of the page after these"
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt, 110)[90:]
    worker.rig.end(["plain", "r"])


def test_a_preempted_output_is_computed_again_within_the_pages_that_it_had() -> None:
    worker = worker_of(24)
    worker.handle(order("r", prompt_of(10), 300))
    for _ in range(250):
        worker.turn()
    worker.handle(order("urgent", prompt_of(80, seed=3), 8, compression=None, priority=-1))
    assert not sequence(worker).pages, "it was preempted"
    most = sequence(worker).kv_window.most
    while len(tokens_of(worker)) < 299:
        worker.turn()
        assert sequence(worker).pages.num_held <= most < sequence(worker).pages_needed
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt_of(10), 300)
    assert worker.state.stats().preemptions == 1
    worker.rig.end(["r", "urgent"])


def test_another_worker_goes_on_with_exact_pages_of_the_store() -> None:
    rig = Rig(400)
    first, second = (rig.worker("decode", 30, DecodeConfig()) for _ in range(2))
    prompt = prompt_of(42)
    first.handle(order("r", prompt, 200))
    while len(tokens_of(first)) < 150:
        first.turn()
    rig.kill(first)
    second.handle(order("r", prompt, 200, attempt=2, known=150, fetch=40))
    rig.settle()
    assert sequence(second).fetched_pages == 10
    assert tokens_of(second) == reference(prompt, 200)[150:]
    rig.end(["r"])


def test_what_can_not_fit_is_refused_and_what_a_model_can_not_do_is_an_error() -> None:
    worker = worker_of(10)
    worker.handle(order("fits", prompt_of(3), 10_000))
    worker.handle(order("large", prompt_of(39), 10_000))
    answers = [type(message) for message in worker.messages if isinstance(message, Accepted | Refused)]
    assert answers == [Accepted, Refused]
    worker.messages.clear()
    worker.state._reader = RequestReader(PAGE, None, NO_GROUPS, None, (), None, 0, "this model is a test")
    worker.handle(order("r", prompt_of(3), 3))
    (failed,) = worker.messages
    assert isinstance(failed, AttemptFailed)
    assert failed.reason == "unsupported_field"
    assert failed.message == "kv_compression is not served: this model is a test; leave it out"


@pytest.mark.parametrize("seed", range(12))
def test_many_of_both_kinds_share_a_small_pool(seed: int) -> None:
    rng = random.Random(seed)
    worker = worker_of(rng.choice([40, 60]), slots=rng.choice([30, 400]))
    orders = {}
    for number in range(14):
        prompt = [*prompt_of(rng.choice([2, 13, 33, 60])), *([number] if rng.random() < 0.5 else [])]
        count = rng.choice([1, 9, 40, 150])
        window = rng.choice([None, WINDOW, KvCompression("window", rng.randrange(1, 20), rng.randrange(9))])
        name = f"r{number}"
        worker.messages = [message for message in worker.messages if isinstance(message, Tokens)]
        worker.handle(order(name, prompt, count, compression=window, priority=rng.choice([0, 0, -1])))
        if any(isinstance(message, Accepted) for message in worker.messages):
            orders[name] = (prompt, count)
        for _ in range(rng.randrange(30)):
            worker.turn()
        if rng.random() < 0.1 and orders:
            gone = rng.choice(list(orders))
            worker.handle(Cancel(gone, 1))
            del orders[gone]
    worker.rig.settle(20_000)
    assert orders
    for name, (prompt, count) in orders.items():
        assert tokens_of(worker, name) == reference(prompt, count), name
    worker.rig.end(orders)
