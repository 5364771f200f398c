"""What became of requests since the start, as the router's metrics tell it. Pure."""

# pyright: strict

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from router.not_cached import Reason

_PAGE_COUNTS = 1_024  # workers, by name; those that reported first are forgotten first


@dataclass(frozen=True)
class PageCounts:
    """Pages that one worker reported since the start. A prefill worker stores and finds them. A decode worker fetches
    them from its node's store, or finds them on its device."""

    stored: int = 0
    hits: int = 0
    fetched: int = 0
    fetched_across: int = 0  # of the fetched ones, at most so many came from the store of another node
    on_device: int = 0


@dataclass
class RequestCounts:
    """What has happened since the start."""

    finished: Counter[str] = field(default_factory=Counter[str])  # by reason
    failed: Counter[str] = field(default_factory=Counter[str])  # by reason
    cancelled: int = 0
    attempts: int = 0
    split: int = 0  # attempts with a prefill worker
    local: int = 0  # attempts whose decode worker computes the prompt itself
    resends: int = 0
    yielded: int = 0  # attempts that gave their place to others
    moved: int = 0  # attempts that were taken from a slow worker
    prompts_moved: int = 0  # prompts of which another prefill worker was given the rest
    prompt_tokens: int = 0  # of requests that finished
    cached_tokens: int = 0  # of requests that finished
    not_cached_tokens: Counter[Reason] = field(default_factory=Counter[Reason])  # the same, by why they are not
    generated_tokens: int = 0
    pages: dict[str, PageCounts] = field(default_factory=dict[str, PageCounts])  # by the worker's name

    def copy(self) -> RequestCounts:
        """Return the counts as they stand now."""
        finished, failed, not_cached = self.finished.copy(), self.failed.copy(), self.not_cached_tokens.copy()
        return replace(self, finished=finished, failed=failed, not_cached_tokens=not_cached, pages=dict(self.pages))

    def count_pages(
        self, worker: str, *, stored: int = 0, hits: int = 0, fetched: int = 0, across: int = 0, on_device: int = 0
    ) -> None:
        """A worker reports what it did for one attempt."""
        old = self.pages.get(worker)
        if old is None:
            old = PageCounts()
            if len(self.pages) >= _PAGE_COUNTS:
                del self.pages[next(iter(self.pages))]
        self.pages[worker] = PageCounts(
            old.stored + stored,
            old.hits + hits,
            old.fetched + fetched,
            old.fetched_across + across,
            old.on_device + on_device,
        )
