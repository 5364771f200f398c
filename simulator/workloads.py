"""Loads: production traces, Poisson arrivals, bursts. Generated request by request, the same for the same seed.

A prompt is a chain of blocks of 512 tokens, as in Mooncake's traces: equal block numbers make equal tokens. The block's
number is encoded in its tokens, so tokens need no random draw and no storage.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

import numpy as np

from baton.errors import ConfigError
from simulator.lengths import Lengths
from simulator.mooncake import BLOCK, TraceLine

T = TypeVar("T")

VOCAB = 65_536
_FILL = bytes(4 * (BLOCK - 2))
FIRST_OWN = 2**30  # block numbers from here on occur in no trace
_CHUNK = 1_000  # number of requests whose lengths are drawn together


class Conversation(Protocol):
    """A session whose next turn depends on the answer to the last one (`simulator.sessions`)."""

    @property
    def name(self) -> str: ...

    def next(self, arrival: Arrival, answer: bytes, now: float) -> Arrival | None: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """One future request. Its output has `output` tokens, but the router is told only `max_tokens`."""

    at: float  # seconds after the start of the load; for a later turn of a session, after the answer to the last
    blocks: Sequence[int]
    prompt: int  # tokens
    output: int
    max_tokens: int
    tenant: str = ""
    priority: int = 0
    ttft: float | None = None  # objectives, seconds
    tpot: float | None = None
    text: bytes = b""  # the packed prompt, if it is not made of blocks
    gap: float = 0.0  # seconds since the answer before, in a session
    possible: int = 0  # tokens of the prompt that a cache without limits has; only known of sessions
    play: Conversation | None = None  # the session of which this is a turn

    def tokens(self) -> bytes:
        """Return the packed prompt."""
        return self.text or packed(self.blocks, self.prompt)


def scripted_answer(tokens: int, token: int, end: int) -> bytes:
    """Return a packed answer of so many tokens: `token` again and again, then `end`."""
    return struct.pack("<I", token) * (tokens - 1) + struct.pack("<I", end)


def packed(blocks: Iterable[int], tokens: int) -> bytes:
    """Return so many packed tokens of these blocks; zeros follow if they don't suffice."""
    whole = b"".join(struct.pack("<II", block & 0xFFFF, block >> 16 & 0x7FFF) + _FILL for block in blocks)
    size = 4 * tokens
    return whole[:size] if len(whole) >= size else whole + bytes(size - len(whole))


@dataclass(frozen=True)
class Wishes:
    """The other parameters of requests: `max_tokens` (or the whole output if that is longer) and objectives.

    Tenant and priority are drawn at random from `tenants` and `priorities`, with the given weights.
    """

    max_tokens: int = 4_096
    ttft: float | None = None
    tpot: float | None = None
    tenants: tuple[tuple[str, float], ...] = (("", 1.0),)
    priorities: tuple[tuple[int, float], ...] = ((0, 1.0),)

    def request(self, rng: random.Random, at: float, blocks: Sequence[int], prompt: int, output: int) -> Arrival:
        tenant = _pick(self.tenants, rng)
        return Arrival(
            at, blocks, prompt, output, max(self.max_tokens, output), tenant, _pick(self.priorities, rng), self.ttft,
            self.tpot,
        )  # fmt: skip


def trace(lines: Sequence[TraceLine], speed: float, wishes: Wishes, seed: int) -> Iterator[Arrival]:
    """Yield a trace's requests, `speed` times as fast as recorded.

    Raises ConfigError for a prompt that its blocks don't cover, since equal filler tokens would count as shared.
    """
    for line in lines:
        if len(line.hash_ids) * BLOCK < line.input_length:
            raise ConfigError(
                f"a prompt of {line.input_length} tokens, {line.timestamp} ms after the trace's beginning, has "
                f"{len(line.hash_ids)} hash_ids of {BLOCK} tokens; so many do not cover it"
            )
    return _arrivals(lines, speed, wishes, seed)


def _arrivals(lines: Sequence[TraceLine], speed: float, wishes: Wishes, seed: int) -> Iterator[Arrival]:
    rng = random.Random(seed)
    start: float | None = None
    for line in lines:
        start = line.timestamp if start is None else start
        at = (line.timestamp - start) / 1_000 / speed
        yield wishes.request(rng, at, line.hash_ids, line.input_length, max(1, line.output_length))


@dataclass(frozen=True)
class Bursts:
    """A Markov-modulated Poisson process.

    During bursts of `spell` seconds on average, arrivals are `factor` times as frequent as otherwise. Bursts take a
    `share` of the time.
    """

    factor: float = 1.0
    share: float = 0.2
    spell: float = 30.0


@dataclass(frozen=True)
class Random:
    """Requests drawn at random. With `groups`, a prompt begins with the `prefix` tokens that its group shares."""

    rate: float  # a second, on average
    prompt: Lengths
    output: Lengths
    groups: int = 0
    prefix: int = 0  # tokens, in whole blocks
    bursts: Bursts = Bursts()

    def arrivals(self, count: int | None, wishes: Wishes, seed: int) -> Iterator[Arrival]:
        """Yield `count` requests, or endless ones if that is None."""
        rng = random.Random(seed)
        fresh = itertools.count(FIRST_OWN)
        shared = self.prefix // BLOCK
        lengths = self._lengths(seed)
        for at in itertools.islice(self._instants(random.Random(seed + 1)), count):
            prompt, output = next(lengths)
            group = rng.randrange(self.groups) if self.groups else 0
            common = (
                range(FIRST_OWN // 2 + group * shared, FIRST_OWN // 2 + (group + 1) * shared) if self.groups else ()
            )
            own = itertools.islice(fresh, -(-prompt // BLOCK))
            yield wishes.request(rng, at, [*common, *own], len(common) * BLOCK + prompt, output)

    def _lengths(self, seed: int) -> Iterator[tuple[int, int]]:
        rng = np.random.default_rng([seed, 7])
        while True:
            yield from zip(self.prompt.draw(_CHUNK, rng), self.output.draw(_CHUNK, rng), strict=True)

    def _instants(self, rng: random.Random) -> Iterator[float]:
        """Yield arrival times. In a burst the rate is `factor` times the normal one, and the mean is `rate`."""
        bursts = self.bursts
        calm = self.rate / (1 + bursts.share * (bursts.factor - 1))
        now, bursting = 0.0, False
        turns = _until_change(bursts, rng, bursting)
        while True:
            gap = rng.expovariate(calm * (bursts.factor if bursting else 1))
            if now + gap < turns:
                now += gap
                yield now
            else:  # exponential gaps have no memory: the rest is drawn again at the new rate
                now, bursting = turns, not bursting
                turns = now + _until_change(bursts, rng, bursting)


def _until_change(bursts: Bursts, rng: random.Random, bursting: bool) -> float:
    """Return the seconds until the rate changes."""
    if bursts.factor == 1:
        return inf
    mean = bursts.spell if bursting else bursts.spell * (1 - bursts.share) / bursts.share
    return rng.expovariate(1 / mean)


def _pick(weighted: Sequence[tuple[T, float]], rng: random.Random) -> T:
    if len(weighted) == 1:
        return weighted[0][0]
    values, weights = zip(*weighted, strict=True)
    return rng.choices(values, weights)[0]
