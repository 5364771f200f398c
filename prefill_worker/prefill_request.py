"""One attempt at one prompt, as the prefill worker has it.

    Prefill ─▶ LOOKUP ─▶ (WAITING) ─▶ (LOADING) ─▶ COMPUTING ─▶ COMMITTING ─▶ DONE ─▶ Cancel ─▶ (forgotten)
               what the   another      store pages   chunk by     every page    Prefilled sent;
               store has, prompt is    of the        chunk        is sealed     pages stay held
               or loads   making the   prefix
                          next page

`Prefill` asks for a result: every page of the prompt sealed in the node's store. What is there already is held; what
the device has cached is copied; the rest is computed. Slots are reserved as soon as it is known what is missing.
Tokens at the end that fill no page are a partial one, which is in no cache.

Prompts at hand that begin alike share the device pages of what they have in common, complete or not. One of them,
reading or computing, makes the next page, and the others wait for it; should it end before, one of them goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.messages import MAX_KEYS_PER_CALL, AttemptHeld, AttemptName, PageSource
from engine.step.block_table import BlockTable
from kvstore.client.transfer import PageFetch, PrefixLookup, StorePages
from kvstore.load_or_recompute import LoadInProgress
from kvstore.window_groups import NO_GROUPS, WindowGroups
from prefill_worker.ring import Ring


class PrefillPhase(Enum):
    LOOKUP = "lookup"
    WAITING = "waiting"
    LOADING = "loading"
    COMPUTING = "computing"
    COMMITTING = "committing"
    DONE = "done"


@dataclass(eq=False)
class PrefillRequest:
    """Tokens, device pages and progress of one prompt."""

    name: AttemptName
    tokens: list[int]
    keys: list[bytes]
    page_size: int
    priority: int
    arrival: float  # seconds
    deadline: float | None
    pages: BlockTable
    root: bytes = b""  # the parent of its first page
    groups: WindowGroups = NO_GROUPS
    window_pages: BlockTable = field(default_factory=BlockTable)  # of the groups with a window
    adapter: str = ""  # digest of the LoRA adapter that it is computed with
    owner: str = ""  # incarnation of the router that ordered it
    phase: PrefillPhase = PrefillPhase.LOOKUP
    stored: int = 0  # pages from the start that the store had when we looked
    computed: int = 0  # tokens from the start whose K and V lie in `pages`
    sources: tuple[PageSource, ...] = ()  # other stores that have some of its pages cached
    waits_for: PrefillRequest | None = None  # while WAITING: the request that computes the next page
    skipped_steps: int = 0  # steps in a row in which it got less than its part
    loading: LoadInProgress | None = None  # what the store was asked to bring from lower tiers
    loaded_from: int = 0  # page from which on that was
    lookup: PrefixLookup | None = None
    fetch: PageFetch | None = None
    store: StorePages | None = None
    committed: int = 0  # pages from the start that are in the store, then window pages; where the write begins
    lost_at: int = 0  # the most it had there when the store gave them to others; as far it has to come to go on
    offered: int = 0  # pages from the start that were handed to a write
    branch: int = 0  # pages from the start that another prompt has made, of which the store lacks window pages
    window: int = MAX_KEYS_PER_CALL  # pages per write
    # the number under which it waits in the store's line for slots, once it has asked for any
    line_number: int | None = None
    holding: list[int] = field(default_factory=list[int])  # leases of writes that are in the store
    retry_at: float | None = None  # when to ask again for slots, seconds
    refused: str | None = None  # why it was refused slots the last time
    progressed_at: float = 0.0  # when it last went on, seconds
    computed_here: int = 0  # tokens
    pages_stored: int = 0  # pages written to the store
    first_step: float | None = None  # when its first chunk was planned, seconds
    last_chunk_cut: bool = False  # it was decided how its last pages are divided
    steps: int = 0  # under way that it is part of
    launched: int = 0  # tokens from the start that are computed once these have ended
    looks_again: bool = False  # when these have ended it asks the store what there is, as at the start
    ring: Ring | None = None  # others compute a part of it
    in_limbo: list[int] = field(default_factory=list[int])  # device pages that no step may write to yet

    @property
    def total(self) -> int:
        return len(self.keys)

    @property
    def full(self) -> int:
        """Pages, but for a partial one at the end."""
        return len(self.tokens) // self.page_size

    @property
    def ready(self) -> int:
        """Pages from the start whose contents lie complete on the device."""
        return self.computed // self.page_size if self.pending else self.total

    @property
    def begun(self) -> int:
        """Tokens from the start that are computed or that steps under way compute."""
        return max(self.computed, self.launched) if self.steps else self.computed

    @property
    def unbegun(self) -> int:
        return len(self.tokens) - self.begun

    @property
    def begun_pages(self) -> int:
        return self.begun // self.page_size if self.unbegun else self.total

    @property
    def steppable(self) -> int:
        """Pages that one step may compute: with states one, so that each page has its own."""
        return min(self.total - self.begun_pages, 1 if self.groups.states else self.total)

    @property
    def to_keep(self) -> list[int]:
        """The pages whose window pages the store gets: those that a prompt needs which goes on behind the last full
        page, or behind `branch`."""
        first, lowest = self.groups.first_page, -(-self.window_pages.first // max(1, self.groups.count))
        behind = range(first(self.full * self.page_size), self.total)
        branch = range(max(lowest, first(self.branch * self.page_size)), min(self.branch, behind.start))
        return [*branch, *behind] if self.groups.count else []

    @property
    def to_commit(self) -> int:
        """What the store must have in the end: all pages, then window pages."""
        return self.total + len(self.to_keep) * self.groups.count

    @property
    def to_offer(self) -> int:
        """How many of these lie complete on the device."""
        return self.ready if self.pending else self.to_commit

    def to_write(self, first: int, last: int) -> tuple[Sequence[bytes], Sequence[int]]:
        """Keys and device pages of these, by their places in that order. They are all pages, or all window pages."""
        if first < self.total:
            return self.keys[first:last], self.pages[first:last]
        part, count, to_keep = slice(first - self.total, last - self.total), self.groups.count, self.to_keep
        pages = [self.window_pages[page * count + group] for page in to_keep for group in range(count)]
        return self.groups.keys([self.keys[page] for page in to_keep])[part], pages[part]

    def mark_complete(self, pages: int) -> None:
        """So many pages from the start lie complete on the device. The last one may be partial."""
        self.computed = min(pages * self.page_size, len(self.tokens))

    @property
    def pending(self) -> int:
        """Tokens still to compute."""
        return len(self.tokens) - self.computed

    @property
    def active(self) -> bool:
        """Not done yet: it has device pages."""
        return self.phase is not PrefillPhase.DONE

    @property
    def computing(self) -> bool:
        """Its next page is on its way to the device."""
        return self.phase in (PrefillPhase.LOADING, PrefillPhase.COMPUTING) and self.pending > 0

    @property
    def ready_to_step(self) -> bool:
        """It may be part of the next step."""
        joined = self.ring is None or (bool(self.ring.slots) and not self.steps)
        waits = self.in_limbo or self.looks_again
        return self.phase is PrefillPhase.COMPUTING and self.unbegun > 0 and not waits and joined

    @property
    def helps(self) -> bool:
        """Another worker makes its result, and this one a part of that."""
        return self.ring is not None and self.ring.helps

    @property
    def awaits_store(self) -> bool:
        """It can go on only when the store says something."""
        return self.phase in (PrefillPhase.LOOKUP, PrefillPhase.LOADING, PrefillPhase.COMMITTING)

    @property
    def waits_in_line(self) -> str | None:
        """Why it waits for slots of others; none while it does not."""
        return self.refused if self.retry_at is not None and self.refused != "quota" else None

    @property
    def loading_now(self) -> bool:
        """Pages of its prefix are on their way to the arena."""
        return self.phase is PrefillPhase.LOOKUP and self.loading is not None and not self.loading.seconds

    def chain_before(self, page: int) -> bytes:
        """Key of the page before `page`, the root at the start of the chain."""
        return self.keys[page - 1] if page else self.root

    def in_common(self, keys: Sequence[bytes]) -> int:
        """How many pages at the start of `keys` are this prompt's, too. A key stands for everything before it."""
        return bisect_left(range(min(self.total, len(keys))), True, key=lambda page: self.keys[page] != keys[page])

    def held(self) -> AttemptHeld:
        return AttemptHeld(self.name.request, self.name.attempt, self.computed, self.phase is PrefillPhase.DONE)
