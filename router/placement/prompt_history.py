"""Prompts that came lately, to tell why pages of the next one are not cached. Pure.

Three tables of a fixed size remember them (`router.placement.recent_tables`).

    pages       a page's key                    → the last prompt that had it, and its last removal by a process
    own texts   a text's hash, tenant and salt  → the last prompt of these that had it, and where
    any texts   a text's hash                   → the last prompt of all that had it, and where

The first two tables alone tell what a client may know. So another tenant's prompts, or those of another salt, change
nothing of that (`NotCached.for_client`).

A text is any 8 tokens in a row. About one in a page is remembered: those whose hash says so, wherever they stand. So a
prompt is recognised behind an edit, although its page borders have moved. Of the tokens behind the first page that was
never seen, these samples estimate the share that was.

With 2^19 entries each the tables take 34 MB at most, and know 8 million tokens of different prompts in pages of 16.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from msgspec.structs import replace

from baton.messages import Medium, Namespace
from baton.timeline import Timeline
from kvstore.events.wire_format import BlockRemoved, KvEvent
from router.generation_request import GenerationRequest
from router.not_cached import NotCached, Reason
from router.placement.recent_tables import Hashes, Numbers, PageTable, TextTable, tags_of

_SLOTS = 1 << 19  # of each table
_PROMPTS = 8_192  # of which it is known whose they were
_REMOVALS = 4_096  # keys that wait until it is worth it to note them all at once
_NEAR = 1_024  # tokens by which what stands before a text may have grown or shrunk
_SHARE = 0.1  # of a prompt's rest: fewer texts that were seen are chance
_STEPS = (1, 2, 4)  # tokens by which two hashes are apart that become one, of 2, 4 and 8 tokens in a row
_ODD = np.uint64(0x9E3779B97F4A7C15)
_ODDER = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt that is placed for the first time."""

    name: str  # of its request
    spec: GenerationRequest
    root: bytes  # of its namespace
    keys: Sequence[bytes]  # of its pages that may be cached
    namespace: Namespace  # of the model without adapters
    timeline: Timeline  # the request's own, which goes on


@dataclass(frozen=True, slots=True)
class _Origin:
    """What is kept of a prompt: whose it was."""

    request: str  # name
    namespace: Namespace
    tenant: str
    salt: str
    adapter: str
    template: str
    placed: float  # seconds
    timeline: Timeline

    @property
    def being_computed(self) -> bool:
        return self.timeline.first_token is None and self.timeline.ended is None

    def difference(self, other: _Origin) -> Reason:
        """Why a text of that other prompt is not cached for this one."""
        if other.namespace != self.namespace:
            return "model"
        if other.tenant != self.tenant:
            return "tenant"
        if other.salt != self.salt:
            return "salt"
        if other.adapter != self.adapter:
            return "adapter"
        return "changed" if other.template == self.template else "template"


class PromptHistory:
    """Owns what is remembered of recent prompts and of pages that processes dropped."""

    def __init__(self, page_size: int, seed: int, slots: int = _SLOTS) -> None:
        """`page_size` is in tokens. `slots`, a power of two, bounds each table. Hashes depend on `seed`."""
        self._page_size = page_size
        self._unsampled = np.uint64((1 << (page_size - 1).bit_length()) - 1)
        self._seed = np.uint64(seed)
        self._pages, self._own, self._any = PageTable(slots), TextTable(slots), TextTable(slots)
        self._origins: list[tuple[int, _Origin] | None] = [None] * _PROMPTS  # by number, round and round
        self._number = 0  # of the last prompt
        self._removals: dict[tuple[Medium, float], list[bytes]] = {}
        self._num_removals = 0

    def note_removals(self, events: Sequence[KvEvent], now: float) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                self._removals.setdefault((event.medium, now), []).extend(event.block_hashes)
                self._num_removals += len(event.block_hashes)
        if self._num_removals >= _REMOVALS:
            self._flush()

    def add_prompt(self, prompt: PlacedPrompt, cached: int, now: float) -> NotCached:
        """Remember a prompt, and say why its pages after the first `cached` must be computed."""
        spec, pages, size = prompt.spec, len(prompt.keys), self._page_size
        if spec.sampling.prompt_logprobs is not None:
            return NotCached("prompt_logprobs", 0, {"prompt_logprobs": spec.prompt}, size)
        tail = spec.prompt - pages * size
        if spec.cached_on:  # another sample of a prompt that was added
            return NotCached("tail", cached * size, {"tail": tail}, size)
        self._flush()
        origin = _Origin(
            prompt.name, prompt.namespace, spec.tenant, spec.salt, spec.adapter, spec.template, now, prompt.timeline
        )
        tags = tags_of(prompt.keys)
        texts, places = self._texts(spec.tokens)
        client = blake2b(f"{spec.tenant}\0{spec.salt}".encode(), digest_size=8).digest()
        own = texts ^ np.uint64(int.from_bytes(client, "little"))
        known = self._known(tags[cached:], cached)
        seen = cached + sum(known.tokens.values()) // size
        behind = places >= (seen + 1) * size  # the page that differs tells nothing
        rest, other, tokens = (pages - seen) * size, known.other, dict(known.tokens)
        for reason, share, request in self._likely(origin, own[behind], texts[behind], places[behind]):
            tokens[reason] = int(share * (pages - seen) * size)
            rest, other = rest - tokens[reason], other or request
        if rest:
            tokens["new"] = rest
        tokens["tail"] = tail
        tokens = {reason: count for reason, count in tokens.items() if count}
        self._number += 1
        self._origins[self._number % _PROMPTS] = (self._number, origin)
        self._pages.put(tags, self._number)
        self._own.put(own, places, self._number)
        self._any.put(texts, places, self._number)
        return replace(known, reason=next(iter(tokens)), tokens=tokens, other=other)

    def _known(self, tags: Hashes, cached: int) -> NotCached:
        """Return why those of these pages are not cached that were seen in their namespace with all before them."""
        place = cached * self._page_size
        if (seen := self._pages.find(tags)) is None:
            return NotCached("new", place, {}, self._page_size)
        last, count = self._origin(seen.prompt), seen.count * self._page_size
        other = last.request if last else ""
        if last is None or last.placed <= seen.removed:
            removed = seen.removed or None
            return NotCached("evicted", place, {"evicted": count}, self._page_size, seen.tier, removed, other)
        reason = "concurrent" if last.being_computed else "evicted"
        return NotCached(reason, place, {reason: count}, self._page_size, other=other)

    def _likely(self, me: _Origin, own: Hashes, texts: Hashes, places: Numbers) -> list[tuple[Reason, float, str]]:
        """Return the reasons why texts that were seen near their places are not cached, each with the share of these
        texts and the request that had most of them. Those of the client's own prompts come first, the most frequent at
        the beginning."""
        mine = self._own.find(own, places, _NEAR)
        others = np.where(mine > 0, 0, self._any.find(texts, places, _NEAR))
        likely: list[tuple[Reason, float, str]] = []
        for numbers in (mine, others):
            shares: Counter[Reason] = Counter()
            requests: dict[Reason, str] = {}
            seen: list[int] = numbers[numbers > 0].tolist()
            for number, count in Counter(seen).most_common():
                origin = self._origin(number)
                if origin is None and numbers is others:
                    continue
                reason: Reason = "changed" if origin is None else me.difference(origin)
                shares[reason] += count
                requests.setdefault(reason, origin.request if origin else "")
            for reason, count in shares.most_common():
                if (share := count / len(texts)) >= _SHARE:
                    likely.append((reason, share, requests[reason]))
        return likely

    def _origin(self, number: int) -> _Origin | None:
        entry = self._origins[number % _PROMPTS]
        return entry[1] if entry is not None and entry[0] == number else None

    def _flush(self) -> None:
        for (tier, now), keys in self._removals.items():
            self._pages.remove(tags_of(keys), tier, now)
        self._removals.clear()
        self._num_removals = 0

    def _texts(self, tokens: bytes) -> tuple[Hashes, Numbers]:
        """Return the hashes of the texts that are remembered of a prompt, and where each begins."""
        hashes = _mixed(np.frombuffer(tokens, "<u4").astype(np.uint64) ^ self._seed)
        for step in _STEPS:
            hashes = hashes[:-step] * _ODD + hashes[step:]
        hashes = _mixed(hashes)
        places = np.flatnonzero((hashes >> np.uint64(40)) & self._unsampled == 0)
        return hashes[places], places


def _mixed(hashes: Hashes) -> Hashes:
    """Spread the bits of each number over all of it."""
    hashes = (hashes ^ (hashes >> np.uint64(31))) * _ODD
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _ODDER
    return hashes ^ (hashes >> np.uint64(32))
