"""Requests with sinks, a window and chosen pages: how many pages they hold, what others may have of them, and how they
go on after a preemption and on another worker. The device notices a page that another kind of sequence has made."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import messages as msg
from baton.config import DecodeConfig
from decode_worker.request_reader import RequestReader
from decode_worker.sequence import Sequence
from kvstore.keys import pack_tokens
from kvstore.kv_window import KvWindow
from kvstore.window_groups import NO_GROUPS
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, reference

WINDOW = msg.KvCompression("window", window=13, sinks=5)
CHOSEN = msg.KvCompression("snapkv", window=13, sinks=5, keep=9)
AGAIN = msg.KvCompression("h2o", window=13, sinks=5, keep=9)
SINKS = 2  # pages
MOST = SINKS + 4  # pages that a long output holds
EXTRA = 3  # and with chosen ones so many more


def prompt_of(length: int, seed: int = 7) -> list[int]:
    return [at * seed % 50 for at in range(length)]


def order(
    name: str, prompt: list[int], count: int, *, compression: msg.KvCompression | None = WINDOW, priority: int = 0,
    attempt: int = 1, known: int = 0, fetch: int = 0,
) -> msg.Decode:  # fmt: skip
    tokens = [*prompt, *reference(prompt, known)]
    return msg.Decode(
        name, attempt, ROOT, pack_tokens(tokens), len(prompt), count, msg.SamplingParams(temperature=0), (), fetch,
        priority=priority, kv_compression=compression,
    )  # fmt: skip


def sequence(worker: RigWorker, name: str = "r") -> Sequence:
    return worker.state._sequences[name]


def tokens_of(worker: RigWorker, name: str = "r") -> list[int]:
    return [token for delta in deltas_of(worker, name) for token in delta.tokens]


def deltas_of(worker: RigWorker, name: str = "r") -> list[msg.Delta]:
    deltas = [delta for message in worker.messages if isinstance(message, msg.Tokens) for delta in message.deltas]
    return [delta for delta in deltas if delta.request == name]


def worker_of(pages: int, slots: int = 400) -> RigWorker:
    return Rig(slots).worker("decode", pages, DecodeConfig())


@given(
    prompt=st.integers(1, 40), sinks=st.integers(0, 12), tokens=st.integers(1, 30), page=st.integers(1, 9),
    keep=st.integers(0, 20), position=st.integers(0, 120), size=st.integers(1, 60), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_token_attends_to_whole_pages_of_sinks_and_window_and_chosen_ones(
    prompt: int, sinks: int, tokens: int, page: int, keep: int, position: int, size: int, seed: int
) -> None:
    window = KvWindow.of(msg.KvCompression("snapkv" if keep else "window", tokens, sinks, keep), prompt, page)
    assert window is not None
    before, rng = window, random.Random(seed)
    rows = [[rng.random() for _ in range(at // page + 1)] for at in range(window.observed_from, prompt)]
    best = sorted(range(window.sinks, (prompt + 1 - tokens) // page), key=lambda at: -sum(row[at] for row in rows))
    if window.keep:
        assert 0 < len(rows) <= min(16, tokens)
        window = window.choose(rows)
    assert window.observed_from == prompt, "and nothing more is chosen"
    assert window.chosen == tuple(sorted(best[: -(-keep // page)]))
    assert (window.exact, window.most) == (before.exact, before.most), "a router knows them, too"
    seen = [at for at in range(position + 1) if at < sinks or at > position - tokens or position < prompt]
    pages = {at // page for at in seen} | {at for at in window.chosen if at <= position // page}
    first = window.first_page(position)
    assert pages == {at for at in range(position // page + 1) if at in window.anchors(first) or at >= first}
    assert window.gap(position) == position // page + 1 - len(pages)
    assert position >= window.exact or window.gap(position) == 0, "what has no gap comes first"
    assert len(pages) <= window.held(first) <= window.most
    assert position // page < window.reach(position)
    spans = list(window.spans(position, position + size))
    assert [at for begin, end, _ in spans for at in range(begin, end)] == list(range(position, position + size))
    assert all(window.first_page(at) == first for begin, end, first in spans for at in range(begin, end))
    assert len(spans) == len({window.first_page(at) for at in range(position, position + size)})


@given(
    prompt=st.integers(1, 40), sinks=st.integers(0, 12), tokens=st.integers(1, 30), page=st.integers(1, 9),
    keep=st.integers(1, 20), seed=st.integers(0, 99),
)  # fmt: skip
@pytest.mark.technique("Pages chosen again by attention as an output grows, of a request")
def test_pages_are_chosen_again_each_time_the_output_has_grown_by_a_window(
    prompt: int, sinks: int, tokens: int, page: int, keep: int, seed: int
) -> None:
    begun = window = KvWindow.of(msg.KvCompression("h2o", tokens, sinks, keep), prompt, page)
    rng, held, choices = random.Random(seed), set(range(-(-prompt // page))), 0
    for position in range(prompt, prompt + 120):
        if position == window.observed_until:
            choices += 1
            begin = max(0, (position + 1 - tokens) // page)
            rows = [[rng.random() for _ in held] for _ in range(window.observed_from, position)]
            assert 0 < len(rows) <= min(16, tokens)
            weight = {at: sum(row[n] for row in rows) for n, at in enumerate(sorted(held))}
            best = sorted((at for at in held if -(-sinks // page) <= at < begin), key=lambda at: -weight[at])
            window = window.choose(rows)
            assert window.chosen == tuple(sorted(best[: -(-keep // page)]))
        first = window.first_page(position)
        pages = {at for at in range(position // page + 1) if at in window.anchors(first) or at >= first}
        assert pages <= held | {position // page}, "nothing that was given back is attended to"
        held = pages
        assert {at // page for at in range(position + 1) if at < sinks or at > position - tokens} <= pages
        assert window.gap(position) == position // page + 1 - len(pages)
        assert len(pages) <= window.held(first) <= window.most == begun.most
        assert position // page < min(window.reach(position), window.reach(position, apart=True))
        last = window.observed_until
        assert [*window.spans(position, last)] == ([(position, last, first)] if position < last else [])
    assert choices >= 119 // tokens
    assert window.anew() == begun


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


@pytest.mark.technique("Pages chosen again by attention as an output grows, of a request")
def test_an_output_that_chooses_again_holds_pages_of_its_own_and_no_more() -> None:
    worker = worker_of(70)
    prompt = prompt_of(60)
    worker.handle(order("r", prompt, 400, compression=AGAIN))
    while not tokens_of(worker):
        worker.turn()
    chosen = {sequence(worker).kv_window.chosen}
    assert [delta.chosen for delta in deltas_of(worker)] == [*chosen]
    while len(tokens_of(worker)) < 399:
        worker.turn()
        held = sequence(worker)
        chosen.add(held.kv_window.chosen)
        if not worker.state.leases:
            assert worker.num_pages - worker.state.blocks.available <= SINKS + EXTRA + 7, "and nothing else is kept"
    assert len(chosen) > 399 // 13 / 2
    assert min(min(each) for each in chosen) < 15 < max(min(each) for each in chosen)
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt, 400)
    worker.rig.end(["r"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.technique("Attention sinks, a window and pages chosen by attention, of a request")
def test_chosen_pages_of_a_long_prompt_are_held_and_no_others(shared: bool) -> None:
    """From the first token of the output on. Pages before the chosen ones do not stay in the cache for their sake."""
    worker = worker_of(70)
    prompt = prompt_of(200)
    if shared:
        worker.handle(order("plain", prompt, 8, compression=None))
        worker.rig.settle()
    worker.handle(order("r", prompt, 300, compression=CHOSEN))
    while not tokens_of(worker):
        worker.turn()
    assert sequence(worker).prompt_computed == (16 if shared else 200)
    chosen = sequence(worker).kv_window.chosen
    assert len(chosen) == EXTRA
    assert [delta.chosen for delta in deltas_of(worker)] == [chosen]
    while len(tokens_of(worker)) < 299:
        worker.turn()
        held = sequence(worker).pages
        assert set(chosen) < set(held.anchors)
        assert held.num_held <= MOST + EXTRA
        if not worker.state.leases:
            assert worker.num_pages - worker.state.blocks.available <= MOST + EXTRA, "nothing else is kept"
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt, 300)
    worker.rig.end(["r", "plain"])


@pytest.mark.parametrize(("pages", "copied"), [(31, True), (30, False)])
def test_where_there_is_no_room_for_copies_the_pages_stay_where_they_are(pages: int, copied: bool) -> None:
    """The prompt has 25 pages. Three are chosen, and three of the window are cached."""
    worker = worker_of(pages)
    prompt = prompt_of(100)
    worker.handle(order("r", prompt, 60, compression=CHOSEN))
    while not tokens_of(worker):
        worker.turn()
    assert sequence(worker).apart == copied
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt, 60)
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


@pytest.mark.parametrize(
    ("compression", "prompt", "pages"),
    [(WINDOW, 10, 24), (CHOSEN, 60, 24), (CHOSEN, 70, 24), (AGAIN, 3, 24), (AGAIN, 60, 26)],
)
def test_a_preempted_output_is_computed_again_within_the_pages_that_it_had(
    compression: msg.KvCompression, prompt: int, pages: int
) -> None:
    worker = worker_of(pages)
    worker.handle(order("r", prompt_of(prompt), 300, compression=compression))
    for _ in range(250):
        worker.turn()
    worker.handle(order("urgent", prompt_of(80, seed=3), 8, compression=None, priority=-1))
    assert not sequence(worker).pages, "it was preempted"
    most = sequence(worker).kv_window.most
    while len(tokens_of(worker)) < 299:
        worker.turn()
        assert sequence(worker).pages.num_held <= most < sequence(worker).pages_needed
    worker.rig.settle()
    assert tokens_of(worker) == reference(prompt_of(prompt), 300)
    assert worker.state.stats().preemptions == 1
    worker.rig.end(["r", "urgent"])


@pytest.mark.parametrize(("compression", "fetched"), [(WINDOW, 10), (CHOSEN, 7), (AGAIN, 7)])
def test_another_worker_goes_on_with_exact_pages_of_the_store(compression: msg.KvCompression, fetched: int) -> None:
    rig = Rig(400)
    first, second = (rig.worker("decode", 30, DecodeConfig()) for _ in range(2))
    prompt = prompt_of(42)
    first.handle(order("r", prompt, 200, compression=compression))
    while len(tokens_of(first)) < 150:
        first.turn()
    chosen = sequence(first).kv_window
    rig.kill(first)
    second.handle(order("r", prompt, 200, attempt=2, known=150, fetch=40, compression=compression))
    while sequence(second).kv_window != chosen:
        assert not tokens_of(second), "no page is chosen as it was"
        second.turn()
    rig.settle()
    assert sequence(second).fetched_pages == fetched, "tokens that are observed are computed"
    assert tokens_of(second) == reference(prompt, 200)[150:]
    rig.end(["r"])


def test_what_can_not_fit_is_refused_and_what_a_model_can_not_do_is_an_error() -> None:
    worker = worker_of(10)
    worker.handle(order("fits", prompt_of(3), 10_000))
    worker.handle(order("large", prompt_of(39), 10_000))
    answers = [type(message) for message in worker.messages if isinstance(message, msg.Accepted | msg.Refused)]
    assert answers == [msg.Accepted, msg.Refused]
    worker.messages.clear()
    worker.state._reader = RequestReader(PAGE, None, NO_GROUPS, None, (), None, 0, "this model is a test", "")
    worker.handle(order("r", prompt_of(3), 3))
    (failed,) = worker.messages
    assert isinstance(failed, msg.AttemptFailed)
    assert failed.reason == "unsupported_field"
    assert failed.message == "kv_compression is not served: this model is a test; leave it out"
    worker.state._reader = RequestReader(PAGE, None, NO_GROUPS, None, (), None, 0, "", "this device is a test")
    worker.handle(order("r", prompt_of(3), 3, compression=CHOSEN))
    assert worker.messages[-1].message == "kv_compression of the kind snapkv is not served: this device is a test"


@pytest.mark.parametrize("seed", range(12))
def test_many_of_both_kinds_share_a_small_pool(seed: int) -> None:
    rng = random.Random(seed)
    worker = worker_of(rng.choice([40, 60]), slots=rng.choice([30, 400]))
    orders = {}
    for number in range(14):
        prompt = [*prompt_of(rng.choice([2, 13, 33, 60])), *([number] if rng.random() < 0.5 else [])]
        count = rng.choice([1, 9, 40, 150])
        window = rng.choice(
            [
                None,
                WINDOW,
                msg.KvCompression("window", rng.randrange(1, 20), rng.randrange(9)),
                msg.KvCompression(
                    rng.choice(["snapkv", "h2o"]), rng.randrange(1, 20), rng.randrange(9), rng.randrange(1, 30)
                ),
            ]
        )
        name = f"r{number}"
        worker.messages = [message for message in worker.messages if isinstance(message, msg.Tokens)]
        worker.handle(order(name, prompt, count, compression=window, priority=rng.choice([0, 0, -1])))
        if any(isinstance(message, msg.Accepted) for message in worker.messages):
            orders[name] = (prompt, count)
        for _ in range(rng.randrange(30)):
            worker.turn()
        if rng.random() < 0.1 and orders:
            gone = rng.choice(list(orders))
            worker.handle(msg.Cancel(gone, 1))
            del orders[gone]
    worker.rig.settle(20_000)
    assert orders
    for name, (prompt, count) in orders.items():
        assert tokens_of(worker, name) == reference(prompt, count), name
    worker.rig.end(orders)
