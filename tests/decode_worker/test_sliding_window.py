"""Pages before every layer's window are given back: what stays held, cached and stored. All tokens are right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Accepted, Cancel, Decode, Prefill, Refused, SamplingParams, Started, Tokens
from decode_worker.growth_reserve import GrowthOutlook, LearnedGrowthReserve
from decode_worker.sequence import Sequence
from decode_worker.sliding_window import SlidingWindow
from kvstore.keys import pack_tokens
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, reference

WINDOW = 23
SEEN = 7  # pages that a token attends to at most


def prompt_of(length: int, seed: int = 7) -> list[int]:
    return [at * seed % 50 for at in range(length)]


class Rows:
    """A decode worker of a model with a window, and the tokens that its requests have got."""

    def __init__(self, pages: int, slots: int = 200) -> None:
        self.rig = Rig(slots)
        self.worker: RigWorker = self.rig.worker("decode", pages, DecodeConfig(), window=WINDOW)
        self.orders: dict[str, tuple[list[int], int]] = {}
        self.got: dict[str, list[int]] = {}
        self.other: list[object] = []

    def order(self, name: str, prompt: list[int], count: int, priority: int = 0, fetch: int = 0) -> None:
        self.orders[name], self.got[name] = (prompt, count), []
        self.worker.handle(
            Decode(
                name, 1, ROOT, pack_tokens(prompt), len(prompt), count, SamplingParams(temperature=0), (), fetch,
                priority=priority,
            )
        )  # fmt: skip

    def sequence(self, name: str = "r") -> Sequence:
        return self.worker.state._sequences[name]

    def take(self) -> None:
        for message in self.worker.messages:
            if isinstance(message, Tokens):
                for delta in message.deltas:
                    self.got[delta.request] += delta.tokens
            else:
                self.other.append(message)
        self.worker.messages.clear()

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.worker.turn()
            self.take()

    def finish(self) -> None:
        """Run all to their ends; every token is the reference's, and every page is free again."""
        for _ in range(3_000):
            self.run(1)
            if all(len(self.got[name]) == count for name, (_, count) in self.orders.items()):
                break
        for name, (prompt, count) in self.orders.items():
            assert self.got[name] == reference(prompt, count), name
            self.worker.handle(Cancel(name, 1))
        self.rig.settle()
        assert self.worker.state.blocks.available == self.worker.num_pages


@given(
    tokens=st.integers(1, 40), page=st.integers(1, 9), computed=st.integers(0, 120),
)  # fmt: skip
def test_the_first_page_is_the_first_that_a_token_attends_to(tokens: int, page: int, computed: int) -> None:
    window = SlidingWindow(tokens, page, 100)
    attended = [at // page for at in range(computed + 1) if at > computed - tokens]
    assert window.first_page(computed) == attended[0]
    assert attended[-1] - attended[0] + 1 <= window.pages
    assert window.pages in {at // page - window.first_page(at) + 1 for at in range(tokens + page, tokens + 2 * page)}, (
        "the bound is met"
    )


@pytest.mark.parametrize(
    ("pages", "prompt", "count"),
    [
        (20, 10, 200),  # of a short prompt
        (20, 60, 200),  # which leaves no room for what its window needs besides
        (20, 66, 30),
        (20, 300, 50),  # which has more pages than there are
        (SEEN + 1, 10, 150),  # the least that can be
    ],
)
@pytest.mark.technique("Sliding windows")
def test_a_context_may_be_larger_than_the_pool(pages: int, prompt: int, count: int) -> None:
    rows = Rows(pages)
    rows.order("r", prompt_of(prompt), count)
    while len(rows.got["r"]) < count - 1:
        rows.run(1)
        if rows.got["r"]:
            assert rows.sequence().pages.num_held <= SEEN
    assert rows.worker.state.stats().preemptions == 0
    rows.finish()
    if prompt < pages * PAGE - WINDOW:  # else writes had to make room
        assert rows.worker.state.stats().pages_stored == (prompt + count - 1) // PAGE, "the store has them all"


def test_a_pool_without_room_for_a_window_refuses() -> None:
    rows = Rows(SEEN)
    rows.order("small", prompt_of(8), 12)
    rows.order("large", prompt_of(8), 40)
    assert [type(message) for message in rows.worker.messages] == [Accepted, Started, Refused]
    del rows.orders["large"]
    rows.finish()


def test_a_preempted_context_that_is_larger_than_the_pool_is_computed_again_in_parts() -> None:
    rows = Rows(24)
    rows.order("r", prompt_of(10), 200)
    rows.run(150)
    assert rows.sequence().pages_needed > 24
    rows.order("urgent", prompt_of(80, seed=3), 8, priority=-1)
    assert not rows.sequence().pages, "it was preempted"
    rows.run(1)
    rows.finish()
    assert rows.worker.state.stats().preemptions == 1


def test_many_at_once_share_a_pool_that_is_smaller_than_their_contexts() -> None:
    rows = Rows(50)
    for number in range(4):
        rows.order(f"r{number}", [*prompt_of(16), number], 120)
    assert len(rows.worker.state._sequences) == 4, "each holds a window's pages at most"
    rows.finish()
    assert rows.worker.state.stats().preemptions == 0


def test_writes_that_do_not_end_make_room() -> None:
    """A store that says nothing has pages of a sequence wait that it has long given back."""
    rows = Rows(12)
    rows.order("r", prompt_of(10), 100)
    for _ in range(120):
        rows.worker.step()  # neither copies nor replies
        rows.take()
    assert rows.worker.state.stats().preemptions == 0
    assert len(rows.got["r"]) == 100
    rows.finish()


def test_pages_that_were_given_back_without_a_store_end_the_write_through() -> None:
    rows = Rows(20)
    rows.order("r", prompt_of(10), 150)
    rows.run(20)
    rows.rig.restart_store()
    rows.run(40)
    rows.worker.attach()
    stored = rows.worker.state.stats().pages_stored
    rows.run(40)
    assert not rows.sequence().writes_through
    assert rows.worker.state.stats().pages_stored == stored
    rows.finish()


def test_a_prompt_that_fits_stays_cached_for_others() -> None:
    rows = Rows(100)
    rows.order("first", prompt_of(60), 30)
    rows.run(25)
    assert rows.sequence("first").pages.first > 5
    rows.order("second", [*prompt_of(60), 1], 30)
    assert rows.sequence("second").device_pages == 15
    rows.finish()


def test_a_prefix_that_others_have_given_back_is_kept_by_what_follows() -> None:
    """One more sequence of the same prefix goes, and its pages stay: an urgent newcomer is refused, or fits."""
    rows = Rows(30)
    rows.order("slid", prompt_of(40), 60)
    rows.run(12)
    rows.order("fresh", [*prompt_of(40), 1], 4)
    rows.run(1)
    for number in range(4):
        rows.order(f"u{number}", prompt_of(30 + number, seed=11), 4, priority=-1)
        rows.run(1)
    rows.take()
    for refused in [message for message in rows.other if isinstance(message, Refused)]:
        del rows.orders[refused.request]
    rows.finish()


@pytest.mark.parametrize("pages", [60, 20])
def test_pages_of_a_hand_off_before_the_window_are_given_back(pages: int) -> None:
    """Where they fit: 15 of 16 leave no room in a pool of 20, and are computed."""
    rows = Rows(pages)
    prefill = rows.rig.worker("prefill", 24, PrefillConfig())
    prompt = prompt_of(62)
    prefill.handle(Prefill("r", 1, ROOT, pack_tokens(prompt[:-1])))
    rows.rig.settle()
    rows.order("r", prompt, 100, fetch=15)
    rows.run(8)
    assert rows.sequence().fetched_pages == (15 if pages == 60 else 0)
    assert rows.sequence().pages.first == (len(prompt) + len(rows.got["r"]) - WINDOW) // PAGE
    prefill.handle(Cancel("r", 1))
    rows.finish()


def test_a_window_bounds_what_sequences_are_going_to_take() -> None:
    reserve = LearnedGrowthReserve()
    without = reserve.pages_to_keep([GrowthOutlook(0, 10_000, 10, 3, 3)] * 4, PAGE)
    assert without > 100
    assert reserve.pages_to_keep([GrowthOutlook(0, 10_000, 10, 3, 3, 7)] * 4, PAGE) <= 4 * 4
