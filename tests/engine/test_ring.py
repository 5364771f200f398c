"""Chunks of one prompt on several engines at a time, layer behind layer: the same bits in the end as on one."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from baton.messages import RingPart
from engine.cpu import build
from engine.engine import Engine
from engine.step.batch import Chunk
from engine.step.ring import LeaveRing, RingBroken, RingChunk, RingPlan
from kvstore.arena.memory import Arena
from tests.support.checkpoints import VOCAB

pytestmark = pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch has no rings")

PAGE, PAGES, SLOTS, NAME = 16, 64, 40, -(2**40)
FIRST = 3  # pages that are cached
Engines = Callable[..., Sequence[Engine]]


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[[str], Path]) -> Engines:
    """`engines(name, count)`: the last one is of no ring."""

    @cache
    def loaded(name: str, count: int, kv: str = "auto", threads: int = 1) -> Sequence[Engine]:
        def load() -> Engine:
            path = checkpoint(name)
            return Engine.load(path, "float32", "cpu", PAGES, PAGE, False, threads=threads, kv_cache_dtype=kv)

        return [load() for _ in range(count + 1)]

    return loaded


@pytest.fixture
def arena() -> Iterator[Callable[[Sequence[Engine]], None]]:
    """`arena(engines)`: gives them one, with slots full of what others have left there."""
    arenas: list[Arena] = []

    def give(engines: Sequence[Engine]) -> None:
        size = engines[0].layout.page_bytes
        arenas.append(Arena.create(SLOTS * size))
        arenas[0].divide(size)
        arenas[0].view[:] = random.Random(3).randbytes(SLOTS * size)
        for engine in engines:
            engine.mover(verify=False).attach(arenas[0])

    yield give
    for each in arenas:
        each.close()


class Prompt:
    """Worker `place` has it in pages of its own order."""

    def __init__(self, tokens: int, workers: int, pages: int, first: int = FIRST, patience: float = 20.0) -> None:
        rng = random.Random(tokens)
        self.tokens = [rng.randrange(VOCAB) for _ in range(tokens)]
        self.total = -(-tokens // PAGE)
        self.workers, self.size, self.first, self.patience = workers, pages, first, patience
        self.slots = rng.sample(range(SLOTS), 1 + workers * pages)

    def pages(self, place: int) -> list[int]:
        return random.Random(place).sample(range(PAGES), self.total)

    def plan(self, place: int) -> RingPlan:
        return RingPlan(RingPart(self.first, self.size, place, self.workers), self.total)

    def begin(self, engine: Engine, place: int) -> None:
        engine.step([Chunk(self.tokens[: self.first * PAGE], 0, self.pages(place))])

    def compute(self, engine: Engine, place: int, most: int = 99) -> None:
        plan, number = self.plan(place), 0
        while (number := plan.next_own(number)) is not None and number < most:
            span = plan.pages(number)
            tokens = self.tokens[span.start * PAGE : span.stop * PAGE]
            ring = RingChunk(plan, number, NAME, self.slots, self.patience)
            engine.step([Chunk(tokens, span.start * PAGE, self.pages(place), ring=ring)])
            number += 1

    def contents(self, engine: Engine, place: int) -> list[bytes]:
        return [bytes(engine.pages.view(page).numpy()) for page in self.pages(place)]

    def together(self, engines: Sequence[Engine]) -> None:
        for place, engine in enumerate(engines):
            self.begin(engine, place)
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda pair: self.compute(pair[1], pair[0]), enumerate(engines)))


@pytest.mark.parametrize(("name", "kv", "threads"), [("llama", "auto", 1), ("gemma3", "auto", 2), ("llama", "int8", 2)])
@pytest.mark.parametrize(
    ("tokens", "workers", "size"), [(16 * 21, 2, 3), (16 * 21 + 5, 3, 2), (16 * 10 + 1, 2, 4), (16 * 21 + 5, 8, 2)]
)
def test_the_last_worker_has_the_bits_that_one_alone_makes(
    engines: Engines,
    arena: Callable[[Sequence[Engine]], None],
    name: str,
    kv: str,
    threads: int,
    tokens: int,
    workers: int,
    size: int,
) -> None:
    *ring, alone = engines(name, workers, kv, threads)
    arena(ring)
    prompt = Prompt(tokens, workers, size)
    prompt.together(ring)
    alone.step([Chunk(prompt.tokens, 0, prompt.pages(0))])
    assert prompt.contents(ring[0], 0) == prompt.contents(alone, 0)


def test_a_worker_that_does_not_come_ends_the_wait(engines: Engines, arena: Callable[[Sequence[Engine]], None]) -> None:
    *ring, _ = engines("llama", 2)
    arena(ring)
    prompt = Prompt(16 * 12, 2, 4, patience=0.05)
    prompt.begin(ring[0], 0)
    began = time.monotonic()
    with pytest.raises(RingBroken, match=r"within 0\.05 s"):
        prompt.compute(ring[0], 0)
    assert 0.05 <= time.monotonic() - began < 5


def test_a_worker_that_leaves_is_not_waited_for(engines: Engines, arena: Callable[[Sequence[Engine]], None]) -> None:
    *ring, _ = engines("llama", 2)
    arena(ring)
    prompt = Prompt(16 * 23, 2, 5)
    for place in (0, 1):
        prompt.begin(ring[place], place)
    prompt.compute(ring[1], 1, most=2)
    ended: list[Exception] = []

    def main() -> None:
        try:
            prompt.compute(ring[0], 0)
        except RingBroken as error:
            ended.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    ring[1].leave_ring(LeaveRing(prompt.slots[0], 1, NAME))
    thread.join(10)
    assert ended
