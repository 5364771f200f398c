"""Prompts at hand that begin alike: they share the device pages of what they have in common, and it is made once.

A key stands for a page and everything before it, so prompts with one key in common have all before it in common, too.
Between any two prompts at hand, therefore:

- what they have in common lies on the same device pages, and as much of it is complete for the one as for the other;
- at most one of them makes the page that both lack next. The other waits, and no prompt waits for a waiting one, so
  there is no circle. When the one that makes it goes, the waiters have everything that it had made, and one of them
  makes the rest.
"""

from collections.abc import Collection, Sequence
from itertools import combinations, takewhile

from kvstore.client.device_block_manager import DeviceBlockManager
from prefill_worker.prefill_request import PrefillRequest


def allocate_shared(
    cache: DeviceBlockManager, keys: Sequence[bytes], at_hand: Collection[PrefillRequest]
) -> tuple[list[int], int] | None:
    """Device pages for a new prompt, all or nothing, and how many of them, from the start, are complete. Pages of a
    prompt at hand are taken once more, complete or not; else those that are cached. None, and no change, when there is
    no room."""
    alike = max(at_hand, key=lambda job: job.in_common(keys), default=None)
    common = alike.in_common(keys) if alike is not None else 0
    cached = cache.match(keys)
    if alike is None or common <= cached:
        pages = cache.allocate_with_prefix(keys, len(keys))
        return None if pages is None else (pages, cached)
    shared = alike.pages[:common]
    cache.incref(shared)
    fresh = cache.allocate(len(keys) - common)
    if fresh is None:
        cache.free(shared)
        return None
    return shared + fresh, min(alike.ready, common)


def computing_request(job: PrefillRequest, at_hand: Collection[PrefillRequest]) -> PrefillRequest | None:
    """Return the other request that makes the page which `job` lacks next, or at least has it loaded."""
    alike = [other for other in at_hand if other is not job and _lack_same_page(job, other)]
    making = (other for other in alike if other.computing)
    return next(making, None) or next((other for other in alike if other.loading_now), None)


def pages_not_to_compute(job: PrefillRequest, at_hand: Collection[PrefillRequest]) -> int:
    """Return how many pages from the start `job` need not make: complete ones, those that another prompt is making,
    and those that earlier prompts will make (`at_hand` is in the order of arrival)."""
    earlier = takewhile(lambda other: other is not job, at_hand)
    others = [*earlier, computing_request(job, at_hand)]
    return max([job.ready, *(other.in_common(job.keys) for other in others if other is not None)])


def mark_complete(job: PrefillRequest, at_hand: Collection[PrefillRequest]) -> None:
    """More pages of `job` are complete, and so they are for all prompts that share them."""
    for other in at_hand:
        if other.ready < job.ready and _lack_same_page(other, job):
            other.mark_complete(min(job.ready, job.in_common(other.keys)))


def validate(at_hand: Collection[PrefillRequest]) -> None:
    """Raise AssertionError unless what stands above holds. For tests."""
    for job in at_hand:
        assert job.waits_for is None or job.waits_for is computing_request(job, at_hand), job.name
    for job, other in combinations(at_hand, 2):
        common = job.in_common(other.keys)
        assert job.pages[:common] == other.pages[:common], (job.name, other.name)
        assert min(job.ready, common) == min(other.ready, common), (job.name, other.name)
        assert not (job.computing and other.computing and _lack_same_page(job, other)), (job.name, other.name)


def _lack_same_page(job: PrefillRequest, other: PrefillRequest) -> bool:
    """The page that `job` lacks next is a page of `other`."""
    page = job.ready
    return page < min(job.total, other.total) and job.pages[page] == other.pages[page]
