"""A request's life, message by message."""

from itertools import pairwise

import msgspec
import pytest

from baton import errors
from baton import messages as msg
from baton.clock import Tick
from kvstore.keys import pack_tokens, unpack_tokens
from router.events import Cancelled, ClientGone, Emit, Finished, Shutdown, StopMatched
from router.frontend.grpc_api.grpc_calls import _timing as timing_of
from router.requests.lifecycle import MAX_FRUITLESS, pause_before
from tests.router.lab import Lab, held, lab_with
from tests.router.model import CONFIG, CONTEXT, EOS, PAGE, VOCAB, card, submit

# --- the plain cases ---


def test_a_local_request_from_decode_to_end(lab: Lab, decode: str) -> None:
    order = lab.submit(prompt=10, max_tokens=3)
    assert lab.decode.tokens == order.tokens
    assert (lab.decode.prompt, lab.decode.max_tokens) == (10, 3)
    assert (lab.decode.fetch, lab.decode.prefilled_remotely) == (0, False)
    lab.say(decode, msg.Accepted("r", 1))
    lab.say(decode, msg.Started("r", 1))
    lab.tokens(decode, "r", 1, 10, 50, computed=10)
    lab.tokens(decode, "r", 1, 11, 51)
    lab.now += 1.0
    lab.tokens(decode, "r", 1, 12, 52, finish="length")
    assert lab.emitted() == [50, 51, 52]
    end = lab.end()
    assert end.outcome == Finished("length")
    assert end.summary.usage.prompt == 10
    assert end.summary.usage.cached == 0
    assert end.summary.usage.completion == 3
    assert end.summary.served.decode_workers == ("decode-0",)
    assert end.summary.timeline.ttft == 0
    assert end.summary.timeline.tpot(3) == 0.5
    assert lab.cancelled(decode) == [1]
    counts = lab.state.stats().counts
    assert (counts.finished, counts.local, counts.split, lab.state.stats().running) == ({"length": 1}, 1, 0, 0)


def test_a_split_request_prefills_only_once_decode_has_accepted(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    order = lab.submit(prompt=14)  # 3 full pages of 4, a partial one, and the last token
    assert (lab.decode.fetch, lab.decode.prefilled_remotely) == (4, True)
    assert not lab.sent(msg.Prefill)
    lab.say(decode, msg.Accepted("r", 1))
    assert lab.to(lab.prefill) == prefill
    assert lab.prefill.tokens == order.tokens[: 13 * 4]
    lab.say(prefill, msg.Prefilled("r", 1, computed=13, hit=0, stored=4, queue_ms=4, compute_ms=5))
    assert not lab.sent(msg.Cancel)  # its holds are still needed
    lab.say(decode, msg.Started("r", 1, device_pages=0, fetched_pages=4))
    assert lab.cancelled(prefill) == [1]
    lab.tokens(decode, "r", 1, 14, EOS, finish="stop", computed=1)
    end = lab.end()
    assert end.summary.usage.cached == 0
    served = end.summary.served
    assert (served.prefill_worker, served.pages_fetched, served.pages_shipped) == ("prefill-0", 4, 4)
    assert (served.prefill_queue_ms, served.prefill_compute_ms) == (4, 5)
    assert lab.state.stats().counts.split == 1


def test_a_prefill_account_that_comes_after_its_pages_is_counted(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    """The decode worker has the last page before the prefill worker has heard that it is sealed."""
    lab.accepted(prompt=14)
    lab.say(decode, msg.Started("r", 1, device_pages=0, fetched_pages=3))
    assert not lab.sent(msg.Cancel)
    lab.say(prefill, msg.Prefilled("r", 1, computed=8, hit=1, stored=2))
    assert lab.cancelled(prefill) == [1]
    lab.tokens(decode, "r", 1, 14, EOS, finish="stop", computed=2)
    assert lab.end().summary.served.pages_shipped == 2
    assert lab.end().summary.usage.cached == 4


@pytest.mark.parametrize("ending", ["failed", "refused", "silent", "forgotten"])
def test_a_late_prefill_failure_costs_no_attempt(lab: Lab, decode: str, prefill: str, store: str, ending: str) -> None:
    lab.accepted(prompt=14)
    lab.say(decode, msg.Started("r", 1, device_pages=0, fetched_pages=3))
    match ending:
        case "failed":
            lab.say(prefill, msg.AttemptFailed("r", 1, "store_gone", "the store is gone"))
        case "refused":
            lab.say(prefill, msg.Refused("r", 1, "busy"))
        case "silent":
            for _ in range(40):
                lab.advance(0.1)
                lab.beat(decode, held("r", 1, 14))
                lab.beat(store)
        case _:
            for _ in range(3):
                lab.beat(prefill)
    lab.tokens(decode, "r", 1, 14, EOS, finish="stop", computed=2)
    assert lab.end().summary.served.attempts == 1


def test_a_prompt_whose_pages_are_in_the_store_is_fetched_without_a_prefill(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.holds(store, lab.submit("first", prompt=14), 3)
    lab.submit(prompt=14)
    assert (lab.decode.request, lab.decode.fetch, lab.decode.prefilled_remotely) == ("r", 3, False)
    lab.say(decode, msg.Accepted("r", 1))
    assert not lab.sent(msg.Prefill)


def test_a_decode_worker_that_had_the_pages_all_along_spares_the_prefill(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.submit(prompt=14)
    lab.say(decode, msg.Accepted("r", 1, device=3))
    assert not lab.sent(msg.Prefill)
    lab.submit("next", prompt=14)
    lab.submit("third", prompt=14)
    assert [d.request for d in lab.sent(msg.Decode)] == ["r", "next", "third"]  # the slot was given back


# --- pages of other nodes and lower tiers ---


def test_a_pair_of_two_nodes_passes_pages_from_store_to_store(lab: Lab) -> None:
    decode, prefill, store_a, store_b = lab.split_over_nodes()
    lab.submit(prompt=14)
    source = msg.PageSource(store_a, "tcp://a:1", 4)
    assert (lab.decode.fetch, lab.decode.prefilled_remotely, lab.decode.sources) == (4, True, (source,))
    lab.say(decode, msg.Accepted("r", 1))
    assert lab.to(lab.prefill) == prefill
    assert lab.prefill.sources == ()
    lab.say(prefill, msg.Prefilled("r", 1, computed=12, hit=0, stored=3))
    lab.say(decode, msg.Started("r", 1, fetched_pages=3))
    lab.leaves(store_a)
    lab.leaves(store_b)
    lab.tokens(decode, "r", 1, 14, EOS, finish="stop", computed=2)
    assert lab.end().summary.served.attempts == 1


def test_a_prefill_worker_hears_of_better_sources(lab: Lab) -> None:
    _decode, _, _, store_b = lab.split_over_nodes()
    lab.holds(store_b, lab.submit("first", prompt=100), 20)
    lab.accepted(prompt=100)
    assert lab.prefill.request == "r"
    assert lab.prefill.sources == (msg.PageSource(store_b, "tcp://b:1", 20),)


@pytest.mark.parametrize(("medium", "others"), [("CPU", True), ("DISK", True), ("CPU", False)])
def test_a_whole_cached_prompt_comes_from_another_node_that_serves_it(lab: Lab, medium: str, others: bool) -> None:
    lab.join("decode", "decode-0", "b")
    lab.join("store", "store-b", "b")
    store = lab.join("store", "store-a", "a", data="tcp://a:1" if others else "")
    lab.holds(store, lab.submit("first", prompt=41), 10, medium)
    lab.submit(prompt=41)
    expected = (10, False, (msg.PageSource(store, "tcp://a:1", 10),)) if others else (0, False, ())
    assert (lab.decode.fetch, lab.decode.prefilled_remotely, lab.decode.sources) == expected


@pytest.mark.parametrize(
    ("seconds", "rate", "fetch"),
    [
        pytest.param(0.001, 0.0, 10, id="quick disk"),
        pytest.param(1.0, 0.0, 0, id="slow disk"),
        pytest.param(1.0, 1.0, 10, id="slow disk, slower worker"),
        pytest.param(0.001, 1e6, 0, id="quick disk, quicker worker"),
    ],
)
def test_reported_figures_decide_what_is_loaded(lab: Lab, seconds: float, rate: float, fetch: int) -> None:
    decode, store = lab.join("decode", "decode-0"), lab.join("store", "store-0")
    lab.report(store, msg.LoadReport(tiers=(msg.TierSpeed("disk", seconds, 1e9, measured=True),)))
    lab.report(decode, msg.LoadReport(prefill_rate=rate))
    lab.holds(store, lab.submit("first", prompt=41), 10, "DISK")
    lab.submit(prompt=41)
    assert (lab.decode.fetch, lab.decode.sources) == (fetch, ())
    assert any("10 from disk" in note for note in lab.notes()) == (fetch > 0)


def test_loads_are_told_beside_what_was_predicted_of_them(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    lab.say(prefill, msg.Prefilled("r", 1, 4, 2, 3, predicted_ms=5, load_ms=7))
    lab.say(decode, msg.Started("r", 1, fetched_pages=3, predicted_ms=10, load_ms=20))
    assert any("loads took 27 ms, predicted 15 ms" in note for note in lab.notes())
    lab.tokens(decode, "r", 1, 14, EOS, finish="stop", computed=2)
    served = lab.end().summary.served
    assert (served.predicted_ms, served.load_ms) == (15, 27)
    timing = timing_of(lab.end().summary)
    assert (timing.load_predicted, timing.load) == (15, 27)


def test_without_loads_there_are_no_figures(lab: Lab, decode: str) -> None:
    lab.submit()
    lab.tokens(decode, "r", 1, 10, EOS, finish="stop")
    timing = timing_of(lab.end().summary)
    assert not timing.HasField("load")
    assert not timing.HasField("load_predicted")


@pytest.mark.parametrize("moment", ["placed", "accepted", "prefilled", "started"])
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_store_that_goes_takes_those_along_whose_pages_pass_through_it(lab: Lab, moment: str, node: str) -> None:
    decode, prefill, store_a, store_b = lab.split_over_nodes()
    lab.submit(prompt=14)
    if moment != "placed":
        lab.say(decode, msg.Accepted("r", 1))
    if moment in ("prefilled", "started"):
        lab.say(prefill, msg.Prefilled("r", 1, 12, 0, 3))
    if moment == "started":
        lab.say(decode, msg.Started("r", 1))
    lab.leaves(store_a if node == "a" else store_b)
    attempts = 1 if moment == "started" else 2
    assert (lab.decode.attempt, lab.decode.prefilled_remotely) == (attempts, moment == "started")


@pytest.mark.parametrize(("moment", "attempts"), [("placed", 2), ("accepted", 2), ("prefilled", 1)])
def test_a_source_of_the_prefill_worker_is_needed_until_that_is_done(lab: Lab, moment: str, attempts: int) -> None:
    decode, prefill, _, _ = lab.split_over_nodes()
    third = lab.join("store", "store-c", "c", data="tcp://c:1")
    lab.holds(third, lab.submit("first", prompt=100), 20)
    lab.submit(prompt=100)
    if moment != "placed":
        lab.say(decode, msg.Accepted("r", 1))
        assert [source.store for source in lab.prefill.sources] == [third]
    if moment == "prefilled":
        lab.say(prefill, msg.Prefilled("r", 1, 16, 20, 4))
    lab.leaves(third)
    assert (lab.decode.request, lab.decode.attempt) == ("r", attempts)


def test_a_source_from_which_nothing_came_is_not_named_again(lab: Lab) -> None:
    """Both stores live, but not the way between them."""
    decode, _, store_a, _ = lab.split_over_nodes()
    lab.join("prefill", "prefill-1", "a")
    lab.accepted(prompt=14)
    assert [source.store for source in lab.decode.sources] == [store_a]
    lab.say(decode, msg.FetchIncomplete("r", 1, 0, "no page came"))
    assert (lab.decode.attempt, lab.decode.prefilled_remotely, lab.decode.sources) == (2, False, ())


def test_a_busy_prefill_worker_makes_room_for_one_of_another_node(lab: Lab) -> None:
    decode, prefill, _, _ = lab.split_over_nodes()
    lab.join("store", "store-c", "c", data="tcp://c:1")
    other = lab.join("prefill", "prefill-1", "c")
    lab.accepted(prompt=14)
    assert lab.to(lab.prefill) == prefill
    lab.say(prefill, msg.Refused("r", 1, "busy"))
    assert [source.endpoint for source in lab.decode.sources] == ["tcp://c:1"]
    lab.say(decode, msg.Accepted("r", 2))
    assert lab.to(lab.prefill) == other
    assert lab.cancelled(decode) == [1]


# --- limits ---


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind", "says"),
    [
        (0, 5, errors.InvalidRequest, "no tokens"),
        (5, 0, errors.InvalidRequest, "max_tokens is 0"),
        (CONTEXT, 1, errors.ContextTooLong, str(CONTEXT)),
        (5, CONTEXT, errors.ContextTooLong, str(CONTEXT)),
        (200, 100, errors.ContextTooLong, "pages"),
    ],
)
def test_limits(lab: Lab, decode: str, prompt: int, max_tokens: int, kind: type[errors.BatonError], says: str) -> None:
    lab.submit(prompt=prompt, max_tokens=max_tokens)
    assert type(lab.error()) is kind
    assert says in str(lab.error())
    assert not lab.sent(msg.Decode)


def test_a_token_outside_the_vocabulary(lab: Lab) -> None:
    lab.tell(msgspec.structs.replace(submit("r"), tokens=pack_tokens([5, VOCAB])))
    assert str(VOCAB) in str(lab.error())


def test_open_length_is_what_the_largest_pool_has_left(lab: Lab) -> None:
    lab.submit(prompt=10, max_tokens=None)  # no pool size is known yet
    lab.join("decode", "decode-0", model=card(pool_pages=8))
    assert lab.decode.max_tokens == 8 * PAGE - 10


@pytest.mark.parametrize(("window_pages", "fits"), [(0, False), (3, True), (8, False)])
def test_a_context_larger_than_the_pool_fits_where_all_layers_have_a_window(
    lab: Lab, window_pages: int, fits: bool
) -> None:
    """A pool of 8 pages has no room for a window of 8 and one page more."""
    lab.join("decode", "decode-0", model=msgspec.structs.replace(card(pool_pages=8), window_pages=window_pages))
    lab.submit(prompt=10, max_tokens=20 * PAGE)
    if fits:
        assert lab.decode.max_tokens == 20 * PAGE
    else:
        assert isinstance(lab.error(), errors.ContextTooLong)


@pytest.mark.parametrize(("prompt", "window", "fits"), [(10, 9, True), (10, 20, False), (100, 9, False)])
def test_an_output_with_a_window_may_be_longer_than_the_pool(lab: Lab, prompt: int, window: int, fits: bool) -> None:
    """A pool of 8 pages has room for its exact pages and a window's beside them, or not."""
    lab.join("decode", "decode-0", model=card(pool_pages=8))
    lab.submit(prompt=prompt, max_tokens=20 * PAGE, kv_compression=msg.KvCompression("window", window, 0))
    if fits:
        assert lab.decode.kv_compression == msg.KvCompression("window", window, 0)
    else:
        assert isinstance(lab.error(), errors.ContextTooLong)


def test_a_window_that_a_worker_can_not_serve_ends_the_request(lab: Lab, decode: str) -> None:
    lab.submit(kv_compression=msg.KvCompression("window", 20))
    lab.say(decode, msg.AttemptFailed("r", 1, "unsupported_field", "kv_compression is not served: no"))
    assert type(lab.error()) is errors.UnsupportedField


def test_a_next_attempt_with_a_window_looks_for_exact_pages_alone(lab: Lab) -> None:
    """A token of the output attends to less than the whole text from the third page on."""
    one, two = lab.colocated(2)
    lab.submit(prompt=10, max_tokens=200, kv_compression=msg.KvCompression("window", 17, 0))
    lab.tokens(one, "r", 1, 10, *range(50, 150), computed=10)
    lab.say(one, msg.AttemptFailed("r", 1, "internal", "a step failed"))
    assert lab.to(lab.decode) == two
    assert len(unpack_tokens(lab.decode.tokens)) == 110
    assert lab.decode.prompt == 10
    assert len(lab.state._manager._requests["r"].keys) == (PAGE + 16) // PAGE


def test_a_request_too_large_for_a_worker_goes_to_a_larger_one(lab: Lab) -> None:
    lab.join("decode", "decode-0", model=card(pool_pages=8))
    large = lab.join("decode", "decode-1", model=card(pool_pages=80))
    lab.submit(prompt=40, max_tokens=10)
    assert lab.to(lab.decode) == large


def test_a_worker_that_finds_it_too_large_ends_it(lab: Lab, decode: str) -> None:
    lab.submit()
    lab.say(decode, msg.Refused("r", 1, "too_large", "no way"))
    assert type(lab.error()) is errors.ContextTooLong


def test_a_name_in_use_is_refused(lab: Lab) -> None:
    lab.submit()
    with pytest.raises(errors.InvalidRequest, match="'r'"):
        lab.submit()


# --- waiting ---


def test_a_busy_worker_is_asked_again_after_a_heartbeat_that_knows_of_it(lab: Lab) -> None:
    one, two = lab.colocated(2)
    lab.submit()
    first = lab.to(lab.decode)
    other = two if first == one else one
    lab.say(first, msg.Refused("r", 1, "busy"))
    assert lab.to(lab.decode) == other
    lab.say(other, msg.Refused("r", 2, "busy"))
    assert len(lab.sent(msg.Decode)) == 2
    lab.beat(first, heard=0)  # it does not reflect the refusal yet
    assert len(lab.sent(msg.Decode)) == 2
    lab.beat(first)
    assert lab.decode.attempt == 3
    assert lab.to(lab.decode) == first
    assert not lab.sent(msg.Cancel)  # a worker that refused holds nothing


def test_refusals_are_no_failures_and_waiting_ends(lab: Lab, decode: str) -> None:
    lab.submit()
    for _ in range(40):
        lab.say(decode, msg.Refused("r", lab.decode.attempt, "busy"))
        lab.advance(0.25)
        if not lab.alive():
            break
        lab.beat(decode)
    assert type(lab.error()) is errors.Overloaded
    assert "5000 ms" in str(lab.error())


def test_without_any_worker_a_request_waits_and_then_is_unavailable(lab: Lab) -> None:
    lab.submit()
    lab.advance(4.9)
    assert lab.alive()
    lab.advance(0.2)
    assert type(lab.error()) is errors.Unavailable


def test_prompts_wait_in_the_router_while_the_prefill_workers_are_full(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    cached = lab.submit("warm", prompt=14, seed=50)
    lab.holds(store, cached, 3)
    for name in ("a", "b", "c"):
        lab.submit(name, prompt=14, seed=ord(name))
    assert [d.request for d in lab.sent(msg.Decode)] == ["warm", "a"]  # two slots: warm had no page cached when it came
    lab.submit("d", prompt=14, seed=50)
    assert lab.decode.request == "d"  # it needs no prefill, so it does not wait for those that do
    lab.say(decode, msg.Accepted("warm", 1))
    lab.say(prefill, msg.Prefilled("warm", 1, 12, 0, 3))
    assert lab.decode.request == "b"
    assert lab.state.stats().queued == 1


# --- tokens ---


def test_a_duplicate_prefix_is_skipped_and_a_gap_is_asked_for_once(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10, max_tokens=20)
    lab.tokens(decode, "r", 1, 10, 50, 51)
    lab.tokens(decode, "r", 1, 10, 50, 51, 52)
    lab.tokens(decode, "r", 1, 10, 50)
    assert lab.emitted() == [50, 51, 52]
    lab.tokens(decode, "r", 1, 15, 55)
    lab.tokens(decode, "r", 1, 16, 56, finish="stop")
    assert lab.sent(msg.Resend) == [msg.Resend("r", 1, 13)]
    assert lab.alive()
    lab.tokens(decode, "r", 1, 13, 53, 54, 55, 56, finish="stop")
    assert lab.emitted() == [50, 51, 52, 53, 54, 55, 56]
    assert lab.end().outcome == Finished("stop")


def test_log_probabilities_are_cut_with_their_tokens(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10, sampling=msg.SamplingParams(logprobs=0))
    both = (msg.TokenLogprob(50, -1.0), msg.TokenLogprob(51, -2.0))
    lab.tokens(decode, "r", 1, 10, 50, logprobs=both[:1])
    commands = lab.tokens(decode, "r", 1, 10, 50, 51, logprobs=both)
    assert [c for c in commands if isinstance(c, Emit)] == [Emit("r", decode, (51,), both[1:])]


@pytest.mark.parametrize("tokens", [(VOCAB,), (-1,), (2**40,), tuple(range(8, 15))])
def test_a_worker_out_of_its_mind_loses_the_attempt(lab: Lab, tokens: tuple[int, ...]) -> None:
    one, _ = lab.colocated(2)
    lab.submit(prompt=10, max_tokens=6)
    lab.tokens(one, "r", 1, 10, *tokens)
    assert lab.emitted() == []
    assert lab.cancelled(one) == [1]
    assert lab.to(lab.decode) != one


def test_the_next_attempt_knows_the_tokens_so_far(lab: Lab) -> None:
    one, two = lab.colocated(2)
    order = lab.submit(prompt=10, max_tokens=6)
    lab.tokens(one, "r", 1, 10, 50, 51, computed=10)
    lab.say(one, msg.AttemptFailed("r", 1, "internal", "a step failed"))
    assert unpack_tokens(lab.decode.tokens) == [*unpack_tokens(order.tokens), 50, 51]
    assert (lab.decode.attempt, lab.decode.prompt, lab.decode.max_tokens) == (2, 10, 6)
    assert lab.to(lab.decode) == two
    lab.tokens(one, "r", 1, 12, 99)  # the old attempt speaks up again
    lab.tokens(two, "r", 1, 12, 99)  # the right worker, the wrong attempt
    lab.tokens(one, "r", 2, 12, 99)  # the right attempt, the wrong worker
    lab.tokens(two, "r", 2, 12, 52, finish="stop", computed=0)
    assert lab.emitted() == [50, 51, 52]
    assert lab.end().summary.served.decode_workers == ("decode-0", "decode-1")


# --- failures ---


def test_logits_that_are_not_finite_end_the_request_at_once(lab: Lab) -> None:
    one, _ = lab.colocated(2)
    lab.submit(prompt=10, max_tokens=6)
    lab.tokens(one, "r", 1, 10, 50, computed=10)
    lab.say(one, msg.AttemptFailed("r", 1, "non_finite_logits", "the logits of token 11 are not finite"))
    assert type(lab.error()) is errors.NonFiniteLogits
    assert lab.emitted() == [50]


def test_a_short_fetch_is_a_new_attempt_without_that_prefill_worker(lab: Lab) -> None:
    decode, one, _ = lab.split()
    two = lab.join("prefill", "prefill-1")
    lab.submit(prompt=14)
    for attempt, prefill in ((1, one), (2, two)):
        assert lab.decode.prefilled_remotely
        lab.say(decode, msg.Accepted("r", attempt))
        assert lab.to(lab.prefill) == prefill
        lab.say(decode, msg.FetchIncomplete("r", attempt, 1, "gone"))
        assert lab.cancelled(prefill) == [attempt]
    assert lab.cancelled(decode) == [1, 2]
    assert (lab.decode.attempt, lab.decode.fetch, lab.decode.prefilled_remotely) == (3, 0, False)
    lab.say(decode, msg.Accepted("r", 3))
    lab.say(decode, msg.AttemptFailed("r", 3, "internal", "out of luck"))
    assert type(lab.error()) is errors.AttemptsExhausted
    assert "out of luck" in str(lab.error())


@pytest.mark.parametrize("heard", [False, True], ids=["silent before", "silent since"])
def test_a_worker_silent_before_the_choice_costs_none(heard: bool) -> None:
    """A link that breaks silences many at once. They are noticed one after the other, and each may be chosen before."""
    lab = lab_with(max_attempts=2)
    decode, prefill, store = lab.split()
    lab.advance(0.5)
    lab.accepted(prompt=14)
    assert lab.to(lab.prefill) == prefill
    if heard:
        lab.beat(prefill, held("r", 1, 0))
    for _ in range(15):
        lab.advance(0.1)
        lab.beat(decode, held("r", lab.decode.attempt, 14))
        lab.beat(store)
    assert lab.decode.attempt == 2
    lab.say(decode, msg.Accepted("r", 2))
    lab.say(decode, msg.AttemptFailed("r", 2, "internal", "out of luck"))
    assert lab.alive() is not heard


def test_the_last_attempt_needs_neither_prefill_worker_nor_store(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.holds(store, lab.submit("first", prompt=14), 2)
    lab.submit(prompt=14)
    for attempt in (1, 2):
        assert lab.decode.fetch == 4
        lab.say(decode, msg.Accepted("r", attempt))
        lab.say(decode, msg.AttemptFailed("r", attempt, "internal", "a step failed"))
    assert (lab.decode.attempt, lab.decode.fetch, lab.decode.prefilled_remotely) == (3, 0, False)


def test_an_attempt_that_its_worker_gives_up_before_it_accepts_counts(lab: Lab, decode: str) -> None:
    """An order that a worker can't read comes back at once. It must not be sent again for ever."""
    lab.submit()
    for attempt in range(1, CONFIG.router.max_attempts + 1):
        assert lab.decode.attempt == attempt
        lab.say(decode, msg.AttemptFailed("r", attempt, "malformed_message", "the rules name token 999"))
    assert type(lab.error()) is errors.AttemptsExhausted
    assert len(lab.sent(msg.Decode)) == CONFIG.router.max_attempts


def test_attempts_without_a_token_are_paused_and_bounded_whatever_ends_them() -> None:
    lab = lab_with(queue_timeout_ms=3_600_000)
    (decode,) = lab.colocated()
    lab.submit()
    starts = [lab.now]
    while lab.alive():
        sent = len(lab.sent(msg.Decode))
        while lab.alive() and len(lab.sent(msg.Decode)) == sent:
            lab.advance(0.005)
            lab.beat(decode)  # it lists nothing: the order was lost
        starts.append(lab.now)
    assert type(lab.error()) is errors.AttemptsExhausted
    assert len(lab.sent(msg.Decode)) == MAX_FRUITLESS
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps[1] < 0.01  # the second attempt is immediate
    assert all(gap >= pause_before(number) for number, gap in enumerate(gaps[:-1], start=1))
    assert gaps[-2] >= 1.0


def test_a_token_ends_the_pauses() -> None:
    lab = lab_with(queue_timeout_ms=3_600_000)
    (decode,) = lab.colocated()
    lab.submit(prompt=10, max_tokens=20)
    for _ in range(6):
        sent = len(lab.sent(msg.Decode))
        while len(lab.sent(msg.Decode)) == sent:
            lab.advance(0.05)
            lab.beat(decode)  # it lists nothing: the order was lost
    sent, attempt = len(lab.sent(msg.Decode)), lab.decode.attempt
    lab.say(decode, msg.Accepted("r", attempt))
    lab.tokens(decode, "r", attempt, 10, 50)
    lab.say(decode, msg.AttemptFailed("r", attempt, "internal", "again"))
    assert len(lab.sent(msg.Decode)) == sent + 1


def test_attempts_that_brought_tokens_do_not_count_against_the_budget(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10, max_tokens=20)
    for attempt in range(1, 10):
        lab.say(decode, msg.Accepted("r", attempt))
        lab.tokens(decode, "r", attempt, 9 + attempt, 50)
        lab.say(decode, msg.AttemptFailed("r", attempt, "internal", "again"))
    assert lab.alive()
    assert lab.decode.attempt == 10


def test_a_prefill_worker_that_is_busy_is_replaced_by_another_or_waited_for(lab: Lab) -> None:
    decode, one, _ = lab.split()
    two = lab.join("prefill", "prefill-1")
    lab.accepted(prompt=14)
    assert lab.to(lab.prefill) == one
    lab.say(one, msg.Refused("r", 1, "busy"))
    assert lab.to(lab.prefill) == two
    assert lab.prefill.attempt == 1
    lab.say(two, msg.Refused("r", 1, "busy"))
    assert lab.cancelled(decode) == [1]
    assert lab.state.stats().queued == 1  # both may have room again by their next heartbeats
    lab.beat(one)
    assert (lab.decode.attempt, lab.decode.prefilled_remotely) == (2, True)


def test_a_prompt_that_prefill_workers_never_have_room_for_is_computed_where_it_is_decoded(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.submit(prompt=14)
    refusals = 0
    while lab.decode.prefilled_remotely:
        refusals += 1
        lab.say(decode, msg.Accepted("r", refusals))
        lab.say(prefill, msg.Refused("r", refusals, "busy"))
        lab.beat(prefill)
        while lab.decode.attempt == refusals:  # the router pauses between them
            lab.advance(0.1)
            for peer in (decode, prefill, store):
                lab.beat(peer)
    assert refusals == 32
    assert lab.alive()  # and none of them was an attempt's failure


def test_a_prefill_worker_that_can_not_is_not_asked_again(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    lab.say(prefill, msg.AttemptFailed("r", 1, "store", "no slots"))
    assert lab.cancelled(decode) == [1]
    assert (lab.decode.attempt, lab.decode.prefilled_remotely) == (2, False)


def test_what_a_worker_says_about_the_request_is_final(lab: Lab, decode: str) -> None:
    lab.submit()
    lab.say(decode, msg.AttemptFailed("r", 1, "invalid_request", "nonsense"))
    assert type(lab.error()) is errors.InvalidRequest
    lab.submit("s", deadline=lab.now + 5)
    lab.say(decode, msg.AttemptFailed("s", 1, "deadline", "too late"))
    assert type(lab.error("s")) is errors.DeadlineExpired


@pytest.mark.parametrize("who", ["decode", "prefill", "store"])
def test_a_death_while_the_prompt_is_made_is_a_new_attempt(lab: Lab, who: str) -> None:
    peers = dict(zip(("decode", "prefill", "store"), lab.split(), strict=True))
    spare = lab.join("decode", "decode-1", "b")
    lab.submit(prompt=14)
    lab.say(peers["decode"], msg.Accepted("r", 1))
    lab.now += 0.9
    for name, peer in [*peers.items(), ("spare", spare)]:
        if name != who:
            lab.beat(
                peer, *([held("r", 1, 14)] if name == "decode" else [held("r", 1, 4)] if name == "prefill" else [])
            )
    lab.advance(0.2)
    assert lab.decode.attempt == 2
    for name in ("decode", "prefill"):
        assert lab.cancelled(peers[name]) == ([] if name == who else [1])


def test_a_prefill_worker_may_die_once_its_pages_are_sealed(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    lab.say(prefill, msg.Prefilled("r", 1, 12, 0, 3))
    lab.now += 0.9
    lab.beat(decode, held("r", 1, 14))
    lab.beat(store)
    lab.advance(0.2)
    assert lab.state.stats().live["prefill"] == 0
    assert len(lab.sent(msg.Decode)) == 1
    lab.say(decode, msg.Started("r", 1))
    assert not lab.cancelled(prefill)


def test_an_attempt_without_progress_is_given_up(lab: Lab, decode: str) -> None:
    lab.accepted()
    for _ in range(40):
        lab.advance(0.12)
        lab.beat(decode, held("r", lab.decode.attempt, 10))
    assert lab.decode.attempt == 2
    assert lab.cancelled(decode) == [1]


def test_a_prefill_that_gets_on_is_progress(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    for turn in range(100):
        lab.advance(0.1)
        lab.beat(decode, held("r", 1, 14))
        lab.beat(prefill, held("r", 1, turn))
        lab.beat(store)
    assert lab.decode.attempt == 1


# --- ends ---


def test_a_client_that_leaves_cancels_everywhere(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.accepted(prompt=14)
    lab.tell(ClientGone("r"))
    assert isinstance(lab.end().outcome, Cancelled)
    assert lab.cancelled(decode) == lab.cancelled(prefill) == [1]
    lab.tell(ClientGone("r"))  # means nothing any more
    lab.tell(StopMatched("r", 1))


def test_a_stop_string_finishes_the_request(lab: Lab, decode: str) -> None:
    lab.submit(prompt=10, max_tokens=20)
    lab.tokens(decode, "r", 1, 10, 50, 51, 52)
    lab.tell(StopMatched("r", 2))
    assert lab.end().outcome == Finished("stop")
    assert lab.end().summary.usage.completion == 2
    assert lab.cancelled(decode) == [1]


def test_deadlines_travel_as_what_is_left_and_expire(lab: Lab, decode: str) -> None:
    lab.submit(deadline=lab.now + 2.5)
    assert lab.decode.deadline_ms == 2_500
    lab.now += 0.9
    lab.beat(decode, held("r", 1, 10))
    lab.advance(0.9)
    lab.beat(decode, held("r", 1, 10))
    lab.advance(0.9)
    assert type(lab.error()) is errors.DeadlineExpired
    assert lab.cancelled(decode) == [1]


def test_shutdown_ends_and_refuses_requests(lab: Lab, decode: str) -> None:
    lab.submit()
    lab.tell(Shutdown())
    assert type(lab.error()) is errors.Unavailable
    assert lab.cancelled(decode) == [1]
    lab.submit("late")
    assert type(lab.error("late")) is errors.Unavailable


def test_a_replaced_model_never_continues_anothers_output(lab: Lab, decode: str) -> None:
    lab.submit("begun", prompt=10, max_tokens=20)
    lab.tokens(decode, "begun", 1, 10, 50)
    lab.submit("fresh", prompt=10)
    lab.advance(1.5)  # the worker falls silent
    namespace = msgspec.structs.replace(card().namespace, model=b"n" * 16)
    lab.join("decode", "other", model=card(namespace=namespace))
    assert type(lab.error("begun")) is errors.Unavailable
    assert lab.decode.request == "fresh"


def test_a_long_prompt_that_a_decode_worker_computes_goes_on_as_long_as_it_progresses(lab: Lab, decode: str) -> None:
    lab.accepted(prompt=200)
    lab.say(decode, msg.Started("r", 1, 0, 0))
    for computed in range(0, 200, 10):  # 20 s; without progress an attempt has 4
        lab.advance(1.0)
        lab.beat(decode, msg.AttemptHeld("r", 1, 200, computed=computed))
    assert lab.decode.attempt == 1
    for _ in range(6):
        lab.advance(1.0)
        lab.beat(decode, msg.AttemptHeld("r", 1, 200, computed=190))
    assert lab.cancelled(decode)[0] == 1


def test_those_behind_the_first_have_their_turn_though_nothing_changes(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    """Long prompts wait for slots of the prefill worker, short ones behind them only for the decode worker."""
    for number in range(12):
        lab.submit(f"long{number}", prompt=200, seed=number)
        if number < 2:
            lab.say(decode, msg.Accepted(f"long{number}", 1))
    lab.submit("first", prompt=3, seed=50)
    lab.say(decode, msg.Refused("first", 1, "busy"))
    for number in range(3):
        lab.submit(f"short{number}", prompt=3, seed=60 + number)
    for _ in range(8):
        lab.now += 0.25
        lab.beat(decode, held("long0", 1, 200), held("long1", 1, 200))
        lab.beat(prefill, held("long0", 1, 0), held("long1", 1, 0))
        lab.beat(store)
        lab.tell(Tick())
    assert {"first", "short0", "short1", "short2"} <= {order.request for order in lab.sent(msg.Decode)}


def test_requests_of_another_tenant_or_salt_have_other_pages(lab: Lab, decode: str) -> None:
    roots = set[bytes]()
    for number, whose in enumerate([{}, {"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "salt": "b"}, {"salt": "a"}]):
        lab.submit(f"r{number}", prompt=10, max_tokens=3, **whose)
        roots.add(lab.decode.root)
    assert len(roots) == 5
    lab.submit("again", prompt=10, max_tokens=3, tenant="a", salt="b")
    assert lab.decode.root in roots
