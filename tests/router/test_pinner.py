"""A prefix on its way to being pinned, message by message."""

from typing import Any

import msgspec
import pytest

from baton import errors
from baton import messages as msg
from baton.config import ClusterConfig, PrefillConfig, StoreConfig
from baton.operator_api import NewPin
from kvstore.keys import namespace_root, pack_tokens, page_keys
from router.events import Cancelled, ClientGone, PinAnswered, PinPrefix, Shutdown, UnpinPrefix
from router.events import Failed as Ended
from tests.router.lab import Lab, held, named
from tests.router.model import CONFIG, CONTEXT, NAMESPACE, PAGE, VOCAB

W = "pin 1"
DECODE, PREFILL, STORE = "decode-0.1", "prefill-0.1", "store-0.1"


class PinLab(Lab):
    def pin_prefix(
        self, name: str = W, pin: str = "p", tokens: int = 3 * PAGE + 1, ttl: float = 60.0, **more: Any
    ) -> PinPrefix:
        order = PinPrefix(name, pin, pack_tokens([1 + i % 100 for i in range(tokens)]), ttl, **more)
        self.tell(order)
        return order

    @property
    def pin(self) -> msg.PinPages:
        return self.sent(msg.PinPages)[-1]

    def outcome(self, name: str = W) -> NewPin | Ended | Cancelled:
        answers = [command for command in self.log if isinstance(command, PinAnswered) and command.name == name]
        assert len(answers) == 1, f"{len(answers)} answers"
        return answers[0].outcome

    def waits(self, name: str = W) -> bool:
        return not any(isinstance(command, PinAnswered) and command.name == name for command in self.log)

    def error(self, name: str = W) -> errors.BatonError:
        outcome = self.outcome(name)
        assert isinstance(outcome, Ended)
        return outcome.error

    def until_pinned(self, name: str = W, attempt: int = 1, prefill: str = PREFILL, store: str = STORE) -> None:
        self.say(prefill, msg.Prefilled(name, attempt, 8, 1, 2))
        self.say(store, msg.PagesPinned(self.pin.pin, len(self.pin.keys) // 16))

    def store_beat(self, store: str, *pins: msg.AttemptHeld) -> None:
        self.say(store, msg.Heartbeat(self.counts[store], msg.LoadReport(), attempts=pins))

    def count(self, phase: str) -> int:
        return self.state.stats().pins[phase]


def lab(**settings: Any) -> PinLab:
    one = PinLab(msgspec.structs.replace(CONFIG, **settings))
    one.split()
    return one


@pytest.fixture
def it() -> PinLab:
    return lab()


@pytest.fixture
def pin(it: PinLab) -> PinPrefix:
    return it.pin_prefix()


# --- the plain case ---


def test_from_wish_to_pin(it: PinLab) -> None:
    order = it.pin_prefix()
    prefill = it.prefill
    assert it.to(prefill) == PREFILL
    assert (prefill.request, prefill.attempt) == (W, 1)
    assert prefill.tokens == order.tokens[: 3 * PAGE * 4]  # full pages only, the last token's among them
    assert prefill.priority == 2**31 - 1
    assert it.waits()
    it.say(PREFILL, msg.Prefilled(W, 1, computed=8, hit=1, stored=2))
    assert it.to(it.pin) == STORE
    assert it.pin.keys == page_keys(namespace_root(NAMESPACE), prefill.tokens, PAGE)
    assert (it.pin.tenant, it.pin.ttl_ms) == ("", 60_000)
    assert not it.cancelled(PREFILL, W)  # it holds the pages until they are pinned
    it.say(STORE, msg.PagesPinned(it.pin.pin, 3))
    assert it.cancelled(PREFILL, W) == [1]
    outcome = it.outcome()
    assert isinstance(outcome, NewPin)
    assert (outcome.tokens_computed, outcome.pin.tokens, outcome.pin.pages, outcome.pin.bytes) == (8, 12, 3, 3 * 1_024)
    assert (outcome.pin.id, outcome.pin.node, outcome.pin.expires_in_ms) == ("p", "a", 60_000)
    assert it.state.pins(it.now) == [outcome.pin]


def test_a_prefix_that_a_hung_worker_does_not_read_goes_to_another_one(it: PinLab) -> None:
    other = it.join("prefill", "prefill-1")
    it.pin_prefix()
    holder = it.to(it.prefill)
    it.beat(holder, heard=it.counts[holder] - 1, loop=1_001)
    assert it.cancelled(holder, W) == [1]
    assert it.prefill.attempt == 2
    assert it.to(it.prefill) == ({PREFILL, other} - {holder}).pop()
    it.say(holder, msg.Prefilled(W, 1, computed=8, hit=1, stored=2))
    assert not it.sent(msg.PinPages)
    it.until_pinned(attempt=2, prefill=it.to(it.prefill))
    assert isinstance(it.outcome(), NewPin)


def test_it_ends_with_its_time(it: PinLab) -> None:
    it.pin_prefix(ttl=2.0)
    it.until_pinned()
    for _ in range(7):
        for peer in (DECODE, PREFILL):
            it.beat(peer)
        it.store_beat(STORE, msg.AttemptHeld(it.pin.pin, 1, 3))
        it.advance(0.3)
    assert not it.state.pins(it.now)
    assert it.sent(msg.UnpinPages, STORE)[-1].pin == it.pin.pin


def test_it_ends_when_asked_to(it: PinLab, pin: PinPrefix) -> None:
    it.until_pinned()
    with pytest.raises(errors.PinNotFound, match="'q'"):
        it.tell(UnpinPrefix("q"))
    with pytest.raises(errors.PinNotFound):
        it.tell(UnpinPrefix("p", tenant="somebody else"))
    it.tell(UnpinPrefix("p"))
    assert [unpin.pin for unpin in it.sent(msg.UnpinPages, STORE)] == [it.pin.pin]
    with pytest.raises(errors.PinNotFound):
        it.tell(UnpinPrefix("p"))


def test_tenants_have_keys_and_names_of_their_own(it: PinLab) -> None:
    it.pin_prefix(tenant="one")
    it.until_pinned()
    it.pin_prefix("pin 2", tenant="two")
    it.until_pinned("pin 2")
    first, second = it.sent(msg.PinPages)
    assert (first.tenant, second.tenant) == ("one", "two")
    assert first.keys != second.keys
    assert [pin.tenant for pin in it.state.pins(it.now)] == ["one", "two"]


def test_another_of_its_name_takes_its_place_once_it_is_pinned(it: PinLab, pin: PinPrefix) -> None:
    it.until_pinned()
    first = it.pin.pin
    it.pin_prefix("pin 2", tokens=5 * PAGE)
    it.say(PREFILL, msg.Prefilled("pin 2", 1, 8, 1, 2))
    assert it.pin.pin != first
    assert not it.sent(msg.UnpinPages)
    it.say(STORE, msg.PagesPinned(it.pin.pin, 5))
    assert [unpin.pin for unpin in it.sent(msg.UnpinPages, STORE)] == [first]
    assert [view.pages for view in it.state.pins(it.now)] == [5]


def test_one_that_fails_leaves_what_had_its_name(it: PinLab, pin: PinPrefix) -> None:
    it.until_pinned()
    it.pin_prefix("pin 2", tokens=5 * PAGE)
    it.say(PREFILL, msg.Prefilled("pin 2", 1, 8, 1, 2))
    it.say(STORE, msg.PagesPinned(it.pin.pin, 0, "quota"))
    assert isinstance(it.error("pin 2"), errors.QuotaExceeded)
    assert [view.pages for view in it.state.pins(it.now)] == [3]


# --- what can't be pinned ---


@pytest.mark.parametrize(
    ("tokens", "kind", "says"),
    [
        ([], errors.InvalidRequest, "no tokens"),
        ([1] * (PAGE - 1), errors.InvalidRequest, "no full page"),
        ([VOCAB] * PAGE, errors.InvalidRequest, "vocabulary"),
        ([1] * (CONTEXT + 1), errors.ContextTooLong, "context"),
        ([1] * (8 * PAGE), errors.QuotaExceeded, "store.pin_bytes"),
    ],
)
def test_bad_prefixes_are_refused_at_the_door(tokens: list[int], kind: type[errors.BatonError], says: str) -> None:
    it = lab(store=msgspec.convert({"pin_bytes": 7 * 1_024}, StoreConfig, dec_hook=lambda kind, value: kind(value)))
    it.tell(PinPrefix(W, "p", pack_tokens(tokens), 60.0))
    assert type(it.error()) is kind
    assert says in str(it.error())
    assert not it.sent(msg.Prefill)


def test_two_at_once_of_one_name(it: PinLab, pin: PinPrefix) -> None:
    it.pin_prefix("pin 2")
    assert isinstance(it.error("pin 2"), errors.InvalidRequest)
    assert it.waits()


def test_colocated_clusters_say_so_at_once() -> None:
    it = PinLab(msgspec.structs.replace(CONFIG, cluster=msgspec.structs.replace(CONFIG.cluster, prefill=0)))
    it.colocated()
    it.pin_prefix()
    assert isinstance(it.error(), errors.Unavailable)
    assert "no prefill worker" in str(it.error())


def keep_alive(it: PinLab, seconds: float, *peers: str) -> None:
    """Time passes; these peers' heartbeats list what they should."""
    for _ in range(int(seconds / 0.25)):
        it.now += 0.25
        for peer in peers:
            member = it.state._members.get(peer)
            it.beat(peer, *(held(name.request, name.attempt, 0) for name in member.assigned))
        it.advance(0)


def test_without_a_live_prefill_worker_it_waits_and_then_says_so() -> None:
    it = PinLab()
    it.join("decode", "decode-0")
    it.join("store", "store-0")
    it.pin_prefix()
    keep_alive(it, 4.5, DECODE, STORE)
    assert it.waits()
    keep_alive(it, 1, DECODE, STORE)
    assert isinstance(it.error(), errors.Unavailable)
    assert "none is live" in str(it.error())


def test_without_a_live_store_it_waits_and_then_says_so() -> None:
    it = PinLab()
    it.join("prefill", "prefill-0")
    it.pin_prefix()
    keep_alive(it, 5.5, PREFILL)
    assert isinstance(it.error(), errors.Unavailable)
    assert "no store" in str(it.error())
    it.join("store", "store-0")
    it.pin_prefix("pin 2")
    assert it.prefill.request == "pin 2"


def test_a_worker_that_stays_busy_makes_an_overload(it: PinLab, pin: PinPrefix) -> None:
    for attempt in range(1, 30):
        it.say(PREFILL, msg.Refused(W, it.prefill.attempt, "busy"))
        keep_alive(it, 0.25, DECODE, PREFILL, STORE)
        if not it.waits():
            break
        assert it.prefill.attempt == attempt + 1
    assert isinstance(it.error(), errors.Overloaded)


def test_too_large_for_the_worker(it: PinLab, pin: PinPrefix) -> None:
    it.say(PREFILL, msg.Refused(W, 1, "too_large", "it takes 3 pages and this worker has 2"))
    assert isinstance(it.error(), errors.ContextTooLong)
    assert it.cancelled(PREFILL, W) == [1]


def test_the_clients_deadline(it: PinLab) -> None:
    it.pin_prefix(deadline=it.now + 1)
    assert it.prefill.deadline_ms == 1_000
    it.advance(1.0)
    assert isinstance(it.error(), errors.DeadlineExpired)
    assert it.cancelled(PREFILL, W) == [1]


# --- requests go first ---


def test_requests_go_first(it: PinLab) -> None:
    """While a request waits for a worker no prefix is begun; and a prefix takes no more than one slot of two."""
    it.submit("r", prompt=9)
    it.say(DECODE, msg.Refused("r", 1, "busy"))
    it.pin_prefix()
    assert not it.sent(msg.Prefill)
    it.beat(DECODE)  # it may have room again
    it.say(DECODE, msg.Accepted("r", 2))
    assert [order.request for order in it.sent(msg.Prefill)] == ["r"]  # the slot that is left is for prompts
    it.say(PREFILL, msg.Prefilled("r", 2, 8, 0, 2))
    assert it.prefill.request == W
    it.pin_prefix("pin 2", "q")
    assert it.prefill.request == W
    it.submit("s", prompt=9)
    it.say(DECODE, msg.Accepted("s", 1))
    assert it.prefill.request == "s"
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    it.say(PREFILL, msg.Prefilled("s", 1, 8, 1, 2))
    assert it.prefill.request == "pin 2"


def test_a_worker_that_takes_one_prompt_takes_a_prefix_when_it_is_idle() -> None:
    it = lab(prefill=PrefillConfig(max_num_seqs=1))
    it.pin_prefix()
    it.submit("r", prompt=9)
    assert not it.sent(msg.Decode)
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    assert it.decode.request == "r"


def test_where_most_of_it_is_already(it: PinLab) -> None:
    it.join("prefill", "prefill-1", "b")
    it.join("store", "store-1", "b")
    order = PinPrefix(W, "p", pack_tokens(list(range(1, 14))), 60.0)
    it.holds("store-1.1", order, 2)  # type: ignore[arg-type]
    it.tell(order)
    assert it.to(it.prefill) == "prefill-1.1"
    it.until_pinned(prefill="prefill-1.1", store="store-1.1")
    (view,) = it.state.pins(it.now)
    assert view.node == "b"


def test_others_that_have_more_of_it_are_named(it: PinLab) -> None:
    order = PinPrefix(W, "p", pack_tokens(list(range(1, 14))), 60.0)
    for name, pages in (("b", 2), ("c", 3), ("d", 0)):  # none has a prefill worker
        it.join("store", f"store-{name}", name, data=f"tcp://{name}")
        it.holds(f"store-{name}.1", order, pages)  # type: ignore[arg-type]
    it.tell(order)
    assert it.prefill.sources == (msg.PageSource("store-c.1", "tcp://c", 3), msg.PageSource("store-b.1", "tcp://b", 2))


# --- things go wrong ---


def test_it_is_listed_like_any_work_and_lost_work_is_begun_anew(it: PinLab, pin: PinPrefix) -> None:
    it.advance(0.3)
    assert it.sent(msg.RouterHeartbeat, PREFILL)[-1].attempts == (named(W, 1),)
    it.beat(PREFILL)
    it.beat(PREFILL)  # twice without it
    assert it.cancelled(PREFILL, W) == [1]
    assert len(it.sent(msg.Prefill)) == 1  # it waits a little
    keep_alive(it, 0.75, DECODE, PREFILL, STORE)
    assert it.prefill.attempt == 2
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))  # of the attempt that is over
    assert not it.sent(msg.PinPages)
    it.until_pinned(attempt=2)
    assert isinstance(it.outcome(), NewPin)


def test_a_lost_prefilled_is_seen_in_heartbeats(it: PinLab, pin: PinPrefix) -> None:
    it.beat(PREFILL, held(W, 1, 12, ended=True))
    assert not it.sent(msg.PinPages)
    it.beat(PREFILL, held(W, 1, 12, ended=True))
    it.say(STORE, msg.PagesPinned(it.pin.pin, 3))
    outcome = it.outcome()
    assert isinstance(outcome, NewPin)
    assert outcome.tokens_computed is None


def test_a_lost_pin_or_answer_is_asked_for_again(it: PinLab, pin: PinPrefix) -> None:
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    for _ in range(5):
        it.beat(PREFILL, held(W, 1, 12, ended=True))
        it.beat(STORE)
        it.advance(0.25)
    first, second = it.sent(msg.PinPages)
    assert first == second
    assert it.waits()
    it.say(STORE, msg.PagesPinned(first.pin, 3))
    it.say(STORE, msg.PagesPinned(first.pin, 3))
    assert isinstance(it.outcome(), NewPin)


def test_a_worker_that_dies_while_it_computes(it: PinLab) -> None:
    it.join("prefill", "prefill-1")
    it.pin_prefix()
    it.say(STORE, msg.WorkerDied(PREFILL, 7))
    assert it.waits()
    keep_alive(it, 0.75, DECODE, "prefill-1.1", STORE)
    assert it.to(it.prefill) == "prefill-1.1"


def test_a_worker_that_dies_while_it_holds(it: PinLab, pin: PinPrefix) -> None:
    """The pages may be pinned in time."""
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    it.say(STORE, msg.WorkerDied(PREFILL, 7))
    it.say(STORE, msg.PagesPinned(it.pin.pin, 3))
    assert isinstance(it.outcome(), NewPin)


def test_failures_count_and_name_the_last(it: PinLab, pin: PinPrefix) -> None:
    for attempt in (1, 2, 3):
        it.say(PREFILL, msg.AttemptFailed(W, attempt, "store", "the store gave no slots"))
        keep_alive(it, 0.75, DECODE, PREFILL, STORE)
    assert isinstance(it.error(), errors.AttemptsExhausted)
    assert "the store gave no slots" in str(it.error())


def test_what_a_worker_says_of_the_prefix_is_final(it: PinLab, pin: PinPrefix) -> None:
    it.say(PREFILL, msg.AttemptFailed(W, 1, "invalid_request", "no whole pages"))
    assert isinstance(it.error(), errors.InvalidRequest)


def test_no_progress(it: PinLab, pin: PinPrefix) -> None:
    for _ in range(15):
        it.beat(PREFILL, held(W, 1, 4))
        it.beat(STORE)
        it.advance(0.3)
    assert set(it.cancelled(PREFILL, W)) == {1}
    assert it.waits()


def test_pages_that_went_before_they_were_pinned(it: PinLab, pin: PinPrefix) -> None:
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    it.say(STORE, msg.PagesPinned(it.pin.pin, 1, "missing"))
    keep_alive(it, 0.75, DECODE, PREFILL, STORE)
    it.say(PREFILL, msg.Prefilled(W, 2, 8, 1, 2))
    it.say(STORE, msg.PagesPinned(it.pin.pin, 2, "missing"))
    assert isinstance(it.error(), errors.Overloaded)
    assert "only 2 of 3" in str(it.error())
    assert it.cancelled(PREFILL, W) == [1, 2]


def test_over_quota_names_the_setting(it: PinLab, pin: PinPrefix) -> None:
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    it.say(STORE, msg.PagesPinned(it.pin.pin, 0, "quota"))
    assert isinstance(it.error(), errors.QuotaExceeded)
    assert "store.pin_bytes" in str(it.error())
    assert it.cancelled(PREFILL, W) == [1]


def test_a_client_that_leaves_wants_no_pin(it: PinLab) -> None:
    it.pin_prefix()
    it.say(PREFILL, msg.Prefilled(W, 1, 8, 1, 2))
    it.tell(ClientGone(W))
    assert it.cancelled(PREFILL, W) == [1]
    pin = it.pin.pin
    assert [unpin.pin for unpin in it.sent(msg.UnpinPages, STORE)] == [pin]
    it.say(STORE, msg.PagesPinned(pin, 3))  # it was on its way
    assert [unpin.pin for unpin in it.sent(msg.UnpinPages, STORE)] == [pin, pin]
    assert not it.state.pins(it.now)


def test_a_client_that_leaves_after_the_answer_leaves_its_pin(it: PinLab, pin: PinPrefix) -> None:
    it.until_pinned()
    it.tell(ClientGone(W))
    assert it.state.pins(it.now)


# --- stores come and go ---


def test_a_pin_is_made_anew_when_its_store_dies(it: PinLab) -> None:
    it.pin_prefix(ttl=60.0)
    it.until_pinned()
    it.now += 10
    it.join("store", "store-0", incarnation="store-0.2")  # and so the old one is gone
    (view,) = it.state.pins(it.now)
    assert view.node == ""
    assert it.prefill.attempt == 2
    it.say(PREFILL, msg.Prefilled(W, 2, 8, 1, 2))
    assert it.to(it.pin) == "store-0.2"
    assert it.pin.ttl_ms == 50_000  # what is left of its time
    it.say("store-0.2", msg.PagesPinned(it.pin.pin, 3))
    (view,) = it.state.pins(it.now)
    assert (view.node, view.expires_in_ms) == ("a", 50_000)
    assert isinstance(it.outcome(), NewPin)  # and no second answer


def test_what_can_not_be_made_anew_ends_with_its_time(it: PinLab) -> None:
    it.pin_prefix(ttl=20.0)
    it.until_pinned()
    for _ in range(8):
        it.beat(DECODE)
        it.beat(PREFILL)
        it.advance(0.25)
    assert it.count("waiting") == 1  # the store has been silent for too long
    keep_alive(it, 15, DECODE, PREFILL)
    assert it.count("waiting") == 1
    keep_alive(it, 4, DECODE, PREFILL)
    assert it.count("waiting") == 0


def test_a_store_that_lists_less_than_it_should(it: PinLab) -> None:
    """A corrupt page was dropped."""
    it.pin_prefix()
    it.until_pinned()
    pin = it.pin.pin
    it.store_beat(STORE, msg.AttemptHeld(pin, 1, 3))
    assert len(it.sent(msg.Prefill)) == 1
    it.store_beat(STORE, msg.AttemptHeld(pin, 1, 2))
    assert it.sent(msg.UnpinPages, STORE)[-1].pin == pin
    assert it.prefill.attempt == 2


def test_an_unwanted_pin_is_removed_again(it: PinLab, pin: PinPrefix) -> None:
    it.until_pinned()
    it.tell(UnpinPrefix("p"))
    it.store_beat(STORE, msg.AttemptHeld(it.pin.pin, 1, 3))
    assert [unpin.pin for unpin in it.sent(msg.UnpinPages, STORE)] == [it.pin.pin] * 2
    assert not it.sent(msg.Cancel, STORE)


def test_a_heartbeat_from_before_the_pin_proves_nothing(it: PinLab, pin: PinPrefix) -> None:
    heard = it.counts[STORE]
    it.until_pinned()
    it.say(STORE, msg.Heartbeat(heard, msg.LoadReport()))
    assert it.count("pinned") == 1


def test_shutdown_answers_waiting_wishes_and_keeps_pins(it: PinLab, pin: PinPrefix) -> None:
    it.until_pinned()
    it.pin_prefix("pin 2", "q", tokens=2 * PAGE)
    it.tell(Shutdown())
    assert isinstance(it.error("pin 2"), errors.Unavailable)
    assert it.cancelled(PREFILL, "pin 2") == [1]
    assert not it.sent(msg.UnpinPages)
    it.pin_prefix("pin 3")
    assert isinstance(it.error("pin 3"), errors.Unavailable)


def test_requests_and_prefixes_never_share_a_name() -> None:
    it = lab(cluster=ClusterConfig(heartbeat_ms=250, heartbeat_timeout_ms=1_000))
    it.pin_prefix()
    it.say(PREFILL, msg.Prefilled("pin 2", 1, 8, 1, 2))
    it.say(PREFILL, msg.AttemptFailed("pin", 1, "internal", ""))
    it.say(DECODE, msg.Prefilled(W, 1, 8, 1, 2))  # it has no say in it
    assert it.waits()
    assert not it.sent(msg.PinPages)
