"""DeviceBlockManager against a naive model: references, contents, room, eviction order, events."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.events.changes import PagesCleared, PagesRemoved, PagesStored
from kvstore.keys import pack_tokens
from tests.kvstore.chains import CHAINS, key, keys, parent
from tests.support.thorough import automaton, run_machine

PAGES = 8


@dataclass(eq=False)  # two users that are alike are still two
class Sequence:
    """A user of the cache: its word, its pages, and how many of them it has written and published."""

    chain: str
    pages: list[int]
    done: int


class DeviceCacheMachine(RuleBasedStateMachine):
    """`contents` is what a device would hold: the word that was last written to each page."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache = DeviceBlockManager(PAGES)
        self.live: list[Sequence] = []
        self.contents: dict[int, str] = {}
        self.mirror: dict[bytes, bytes] = {}  # key → parent, as events tell
        self.launched: dict[int, set[int]] = {}  # epoch → pages that the device may still touch
        self.waits: dict[int, set[int]] = {}  # page that was freed → epochs that were under way then, and are still

    def handed_out(self, pages: list[int]) -> None:
        """These pages are for new contents, as soon as they are not in limbo."""
        ready = set(pages) - set(self.cache.in_limbo(pages))
        for epoch, touched in self.launched.items():
            assert touched.isdisjoint(ready), f"epoch {epoch} may still touch a page that was handed out"

    def referenced(self) -> set[int]:
        return {page for sequence in self.live for page in sequence.pages}

    def cached(self) -> dict[bytes, int]:
        return {page.key: page.page for page in self.cache.pages()}

    def evictable(self) -> set[bytes]:
        """Keys with neither themselves nor anything below them in use."""
        used = self.referenced()
        cached = self.cached()
        return {
            name
            for name in cached
            if not any(other.lstrip(b".").startswith(name.lstrip(b".")) and cached[other] in used for other in cached)
        }

    @rule(target=sequences, chain=CHAINS, extra=st.integers(0, 3))
    def start(self, chain: str, extra: int) -> Sequence:
        count = len(chain) + extra
        prefix = self.cache.match(keys(chain))
        cached, events = self.cached(), self.cache.stats()
        assert all(key(chain[: page + 1]) in cached for page in range(prefix))
        assert prefix == len(chain) or key(chain[: prefix + 1]) not in cached
        prefix_keys = set(keys(chain)[:prefix])
        room = PAGES - len(self.referenced() | set(cached.values())) + len(self.evictable() - prefix_keys)
        used = self.referenced()
        pages = self.cache.allocate_with_prefix(keys(chain), count)
        if pages is None:
            assert count - prefix > room
            assert self.cached() == cached
            assert self.cache.stats() == events
            return Sequence(chain, [], 0)
        assert count - prefix <= room
        assert len(pages) == len(set(pages)) == count
        assert [self.contents[page] for page in pages[:prefix]] == [chain[: page + 1] for page in range(prefix)]
        assert not used & set(pages[prefix:]), "a page in use was handed out"
        self.handed_out(pages[prefix:])
        for page in pages[:prefix]:
            self.waits.pop(page, None)
        sequence = Sequence(chain, pages, prefix)
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences)
    def write_next(self, sequence: Sequence) -> None:
        if sequence not in self.live or sequence.done == len(sequence.chain):
            return
        word = sequence.chain[: sequence.done + 1]
        page = sequence.pages[sequence.done]
        if page in self.waits:
            return  # no step that writes to it is launched yet
        assert sum(page in other.pages for other in self.live) == 1, "a shared page is written"
        self.contents[page] = word
        before = self.cached()
        above = parent(sequence.chain, sequence.done)
        self.cache.cache_block(key(word), above, page)
        if key(word) in before or (above and above not in before):
            assert self.cached() == before
        else:
            assert self.cached() == before | {key(word): page}
        sequence.done += 1

    @rule(sequence=sequences, letter=st.sampled_from("abc"))
    def grow(self, sequence: Sequence, letter: str) -> None:
        if sequence not in self.live:
            return
        used, available = self.referenced(), self.cache.available
        pages = self.cache.allocate(1)
        assert (pages is None) == (available == 0)
        if pages is not None:
            assert not used & set(pages)
            self.handed_out(pages)
            sequence.pages += pages
            if len(sequence.pages) == len(sequence.chain) + 1:
                sequence.chain += letter

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        if sequence in self.live:
            self.live.remove(sequence)
            self.cache.free(sequence.pages)
            if self.launched:
                self.waits |= {page: set(self.launched) for page in set(sequence.pages) - self.referenced()}

    @rule()
    def launch(self) -> None:
        """A step or a copy over pages of all users."""
        self.launched[self.cache.begin()] = self.referenced()

    @precondition(lambda self: self.launched)
    @rule(which=st.integers(0, 3))
    def land(self, which: int) -> None:
        epoch = list(self.launched)[which % len(self.launched)]
        del self.launched[epoch]
        self.cache.end(epoch)
        for waits in self.waits.values():
            waits.discard(epoch)
        self.waits = {page: waits for page, waits in self.waits.items() if waits}

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert not self.evictable()

    @invariant()
    def is_valid(self) -> None:
        self.cache.validate()
        cached = self.cached()
        assert self.cache.available == PAGES - len(self.referenced() | set(cached.values())) + len(self.evictable())
        assert set(self.cache.in_limbo(range(PAGES))) == self.waits.keys()
        for name, page in cached.items():
            assert key(self.contents[page]) == name, "a key finds a page with other contents"
        for change in self.cache.drain_events():
            match change:
                case PagesStored(parent=above, keys=stored):
                    for name in stored:
                        assert name not in self.mirror
                        assert above == b"" or above in self.mirror, "a child is told of before its parent"
                        self.mirror[name] = above
                        above = name
                case PagesRemoved(keys=removed):
                    for name in removed:
                        del self.mirror[name]
                        assert name not in self.mirror.values(), "a parent is told gone before its child"
                case PagesCleared():
                    raise AssertionError
        assert self.mirror == {page.key: page.parent for page in self.cache.pages()}


DeviceCacheMachine.TestCase.settings = automaton(count=150, steps=40)
TestDeviceCache = DeviceCacheMachine.TestCase


# --- mistakes in the epochs, planted: the machine notices each -------------------------------------------------------


def what_is_freed_is_not_in_limbo(patch: pytest.MonkeyPatch) -> None:
    free = DeviceBlockManager.free

    def hasty(self: DeviceBlockManager, pages: list[int]) -> None:
        under_way, self._under_way = self._under_way, {}
        free(self, pages)
        self._under_way = under_way

    patch.setattr(DeviceBlockManager, "free", hasty)


def any_end_empties_limbo(patch: pytest.MonkeyPatch) -> None:
    end = DeviceBlockManager.end

    def hasty(self: DeviceBlockManager, epoch: int) -> None:
        end(self, epoch)
        under_way, self._under_way = self._under_way, {self._epochs + 1: None}
        end(self, self._epochs + 1)
        self._under_way = under_way

    patch.setattr(DeviceBlockManager, "end", hasty)


def a_page_waits_for_the_oldest_epoch_only(patch: pytest.MonkeyPatch) -> None:
    free = DeviceBlockManager.free

    def hasty(self: DeviceBlockManager, pages: list[int]) -> None:
        epochs, self._epochs = self._epochs, next(iter(self._under_way), self._epochs)
        free(self, pages)
        self._epochs = epochs

    patch.setattr(DeviceBlockManager, "free", hasty)


def a_page_leaves_limbo_when_it_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    incref = DeviceBlockManager._incref

    def hasty(self: DeviceBlockManager, page: int) -> None:
        incref(self, page)
        self._limbo.pop(page, None)

    patch.setattr(DeviceBlockManager, "_incref", hasty)


@pytest.mark.parametrize(
    "mutation",
    [
        what_is_freed_is_not_in_limbo,
        any_end_empties_limbo,
        a_page_waits_for_the_oldest_epoch_only,
        a_page_leaves_limbo_when_it_is_handed_out,
    ],
)
def test_a_mistake_in_the_epochs_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_machine(DeviceCacheMachine, 300, 40)


def filled(chain: str, num_pages: int) -> tuple[DeviceBlockManager, list[int]]:
    cache = DeviceBlockManager(num_pages)
    pages = cache.allocate_with_prefix(keys(chain), len(chain))
    assert pages is not None
    for index, page in enumerate(pages):
        cache.cache_block(key(chain[: index + 1]), parent(chain, index), page)
    return cache, pages


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    cache, pages = filled("abc", 4)
    cache.free(pages)
    other = cache.allocate_with_prefix(keys("x"), 1)
    cache.cache_block(key("x"), b"", other[0])
    cache.free(other)
    assert cache.allocate(1) is not None
    assert cache.match(keys("abc")) == 2
    assert cache.match(keys("x")) == 1
    assert cache.allocate(2) is not None
    assert cache.match(keys("abc")) == 0
    assert cache.match(keys("x")) == 1


def test_a_cached_page_in_limbo_is_found_and_leaves_it() -> None:
    cache, pages = filled("ab", 2)
    epoch = cache.begin()
    cache.free(pages)
    assert cache.in_limbo(pages) == pages
    assert cache.allocate_with_prefix(keys("ab"), 2) == pages
    assert cache.in_limbo(pages) == []
    cache.end(epoch)


def test_a_second_copy_of_a_page_stays_private_and_is_free_at_once() -> None:
    cache, _ = filled("a", 3)
    copy = cache.allocate(1)
    cache.cache_block(key("a"), b"", copy[0])
    assert [page.page for page in cache.pages()] != copy
    free = cache.stats().free
    cache.free(copy)
    assert cache.stats().free == free + 1


def test_a_child_in_use_protects_its_parent() -> None:
    cache, mine = filled("a", 3)
    theirs = cache.allocate_with_prefix([], 2)  # a copy of "a" of their own, and its child
    cache.cache_block(key("a"), b"", theirs[0])
    cache.cache_block(key("ab"), key("a"), theirs[1])
    cache.free(mine)
    assert cache.available == 0
    assert cache.allocate(1) is None
    cache.free(theirs)
    assert cache.available == 3


def test_an_unknown_parent_keeps_a_page_private() -> None:
    cache = DeviceBlockManager(2)
    pages = cache.allocate(1)
    cache.cache_block(key("ab"), key("a"), pages[0])
    assert cache.pages() == []
    cache.free(pages)
    assert cache.stats().free == 2


def test_misuse_is_our_own_bug_and_said_so() -> None:
    cache = DeviceBlockManager(1)
    with pytest.raises(AssertionError):
        cache.free([0])
    with pytest.raises(AssertionError):
        cache.cache_block(key("a"), b"", 0)


def test_allocation_costs_and_unshared_pages() -> None:
    cache = DeviceBlockManager(8)
    first = cache.allocate_with_prefix(keys("abc"), 4)
    for index, name in enumerate(keys("abc")):
        cache.cache_block(name, parent("abc", index), first[index])
    assert cache.count_unshared(first) == 4
    assert cache.new_blocks_needed(keys("ab"), 3) == 1  # two are in use anyway
    second = cache.allocate_with_prefix(keys("ab"), 3)
    assert second is not None
    assert (cache.count_unshared(first), cache.count_unshared(second)) == (2, 1)
    cache.free(first)
    assert cache.new_blocks_needed(keys("abc"), 4) == 2  # the third is cached, but it could have been evicted
    assert cache.available == 5


def in_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.technique("Prefixes shared within a page")
@given(data=st.data())
def test_the_page_with_the_most_tokens_in_common_is_found(data: st.DataObject) -> None:
    """As by comparing with every page that was shared and not handed out since."""
    cache, shared = DeviceBlockManager(PAGES), dict[int, tuple[bytes, list[int]]]()
    words = st.lists(st.sampled_from([1, 2, 256, 65_536]), min_size=1, max_size=5)  # they differ in one byte
    parents = st.sampled_from([b"a" * 16, b"b" * 16])
    for _ in range(data.draw(st.integers(1, 12))):
        pages = cache.allocate(data.draw(st.integers(1, 3))) or []
        for page in pages:
            shared.pop(page, None)
        for page in pages[: data.draw(st.integers(0, 3))]:
            shared[page] = above, tokens = data.draw(parents), data.draw(words)
            for length in sorted({data.draw(st.integers(1, len(tokens))), len(tokens)}):
                cache.share_beginning(above, pack_tokens(tokens[:length]), page)
        cache.free(pages)
        cache.validate()
        above, tokens = data.draw(parents), data.draw(words)
        alike = {page: in_common(tokens, other) for page, (under, other) in shared.items() if under == above}
        page, count = cache.find_beginning(above, pack_tokens(tokens))
        assert count == max(alike.values(), default=0)
        assert not count or alike[page] == count


def test_what_begins_after_a_wrong_page_is_forgotten_with_it() -> None:
    cache = DeviceBlockManager(PAGES)
    pages = cache.allocate(2) or []
    cache.cache_block(key("a"), parent("a"), pages[0])
    cache.share_beginning(key("a"), pack_tokens([1, 2]), pages[1])
    assert cache.find_beginning(key("a"), pack_tokens([1, 3])) == (pages[1], 1)
    cache.forget(key("a"))
    assert cache.find_beginning(key("a"), pack_tokens([1, 3]))[1] == 0
    cache.validate()
