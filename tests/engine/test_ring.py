"""Chunks of one prompt on several engines at a time, layer behind layer: the same bits in the end as on one."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from baton.messages import RingPart
from engine.cpu import build
from engine.engine import Engine
from engine.step.batch import Chunk
from engine.step.ring import RingBroken, RingChunk, RingPlan
from kvstore.arena.memory import Arena
from kvstore.arena.shared_slots import LEFT, MARK_BYTES, LeaveRing
from tests.engine.driver import plant
from tests.support.checkpoints import VOCAB
from tests.support.thorough import cases

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
def arena() -> Iterator[Callable[[Sequence[Engine]], Arena]]:
    """`arena(engines)`: gives them one, with slots full of what others have left there."""
    arenas: list[Arena] = []

    def give(engines: Sequence[Engine]) -> Arena:
        size = engines[0].layout.page_bytes
        arenas.append(Arena.create(SLOTS * size))
        arenas[0].divide(size)
        arenas[0].view[:] = random.Random(3).randbytes(SLOTS * size)
        for engine in engines:
            engine.mover(verify=False).attach(arenas[0])
        return arenas[0]

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
    arena: Callable[[Sequence[Engine]], Arena],
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


def test_a_worker_that_does_not_come_ends_the_wait(
    engines: Engines, arena: Callable[[Sequence[Engine]], Arena]
) -> None:
    *ring, _ = engines("llama", 2)
    arena(ring)
    prompt = Prompt(16 * 12, 2, 4, patience=0.05)
    prompt.begin(ring[0], 0)
    began = time.monotonic()
    with pytest.raises(RingBroken, match=r"within 0\.05 s"):
        prompt.compute(ring[0], 0)
    assert 0.05 <= time.monotonic() - began < 5


def test_a_worker_that_leaves_is_not_waited_for(engines: Engines, arena: Callable[[Sequence[Engine]], Arena]) -> None:
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


# --- layer by layer --------------------------------------------------------------------------------------------------

LAYERS, HEADS = 4, 2  # of the checkpoint "llama"
CHUNK = 6  # of ten, in a ring of three: it takes two chunks of others, and others take its own


def assert_it_reads(engine: Engine, alone: Engine, arena: Arena, name: int, progress: int, layers: int) -> None:
    """The worker before that of `CHUNK` is played: its mark has this name and progress. Slots have nothing but rubbish
    in layers from `layers` on. The chunk must be computed in just as many, and this be told."""
    prompt = Prompt(16 * 21 + 5, workers=3, pages=2, patience=0.05)
    plan = prompt.plan(0)
    arena.view[:] = random.Random(progress).randbytes(len(arena.view))
    marks = np.frombuffer(arena.slot(prompt.slots[0]), np.int64).reshape(-1, MARK_BYTES // 8)[:, :2]
    slots = np.frombuffer(arena.view, np.uint8).reshape(SLOTS, -1, LAYERS, arena.page_bytes // LAYERS // HEADS)

    alone.step([Chunk(prompt.tokens, 0, prompt.pages(0))])
    right = [alone.pages.view(page).numpy().view(np.uint8).reshape(slots[0].shape) for page in prompt.pages(0)]
    for page in range(plan.pages(CHUNK - 2).start):
        engine.pages.view(prompt.pages(0)[page]).copy_(alone.pages.view(prompt.pages(0)[page]))
    for place, number in ((2, CHUNK - 2), (1, CHUNK - 1)):
        for page, slot in zip(plan.pages(number), prompt.slots[1 + place * 2 :], strict=False):
            slots[slot, :, :layers] = right[page][:, :layers]
    marks[0], marks[1] = (NAME - 1, 2**40), (name, progress)
    expected = slots.copy()
    for page, slot in zip(plan.pages(CHUNK), prompt.slots[1:3], strict=True):
        expected[slot, :, :layers] = right[page][:, :layers]

    broken = True
    with suppress(RingBroken):
        span = plan.pages(CHUNK)
        tokens, ring = (
            prompt.tokens[span.start * PAGE : span.stop * PAGE],
            RingChunk(plan, CHUNK, NAME, prompt.slots, 0.05),
        )
        engine.step([Chunk(tokens, span.start * PAGE, prompt.pages(0), ring=ring)])
        broken = False
    assert broken == (layers < LAYERS)
    assert [*marks[0]] == [NAME, (CHUNK << 32) + layers if layers else 0]
    others = [slot for slot in range(SLOTS) if slot != prompt.slots[0]]
    assert np.array_equal(slots[others], expected[others])
    if not broken:
        end = plan.pages(CHUNK).stop
        assert prompt.contents(engine, 0)[:end] == prompt.contents(alone, 0)[:end]


def assert_it_reads_what_is_told(engine: Engine, alone: Engine, arena: Arena) -> None:
    before = CHUNK - 1
    for layers in range(LAYERS + 1):
        assert_it_reads(engine, alone, arena, NAME, (before << 32) + layers, layers)
    assert_it_reads(engine, alone, arena, NAME, (CHUNK << 32) + 1, LAYERS)  # further by a ring of chunks
    assert_it_reads(engine, alone, arena, NAME, LEFT, 0)
    assert_it_reads(engine, alone, arena, NAME + 1, (before << 32) + LAYERS, 0)  # of another prompt


@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_is_read_once_it_is_told_and_told_once_it_is_there(
    engines: Engines, arena: Callable[[Sequence[Engine]], Arena], threads: int
) -> None:
    engine, alone = engines("llama", 1, threads=threads)
    assert_it_reads_what_is_told(engine, alone, arena([engine]))


MISTAKES = {  # what in forward.cpp, and what instead
    "a layer is read one too early": ("((ring.number - 1) << 32) + l + 1)", "((ring.number - 1) << 32) + l)"),
    "a layer is told of one too early": ("(ring.number << 32) + l + 1, std", "(ring.number << 32) + l + 2, std"),
    "a chunk is told of one too early": ("(ring.number << 32) + l + 1, std", "((ring.number + 1) << 32) + l + 1, std"),
    "a mark is not reset for the next ring": ("own.progress.store(0, std::memory_order_relaxed);", ""),
    "a mark of another ring counts": ("mark.ring.load(std::memory_order_acquire) == ring.name", "true"),
    "a worker that has left counts as far enough": ("if (now == kClosed) return false;", ""),
    "a page of others is left out": ("ring.take_count, l", "ring.take_count - 1, l"),
    "pages of others come from its own slots": ("(first + i / m.kv_heads)", "(i / m.kv_heads)"),
    "a layer is given as another one": (
        "ring.slots + shape_.part(pair[1], i % m.kv_heads, l)",
        "ring.slots + shape_.part(pair[1], i % m.kv_heads, 0)",
    ),
}


@pytest.mark.parametrize("mistake", cases(list(MISTAKES), ["a layer is read one too early"]))
def test_a_mistake_in_the_kernels_is_found(
    mistake: str,
    checkpoint: Callable[[str], Path],
    arena: Callable[[Sequence[Engine]], Arena],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant([("forward.cpp", *MISTAKES[mistake])], tmp_path, monkeypatch)
    engine, alone = (
        Engine.load(checkpoint("llama"), "float32", "cpu", PAGES, PAGE, False, threads=1) for _ in range(2)
    )
    slots = arena([engine])
    with pytest.raises(AssertionError):
        assert_it_reads_what_is_told(engine, alone, slots)


def test_a_wrong_slot_is_found(
    engines: Engines, arena: Callable[[Sequence[Engine]], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slots_of(self: RingChunk, number: int) -> Iterator[tuple[int, int]]:
        begin = self.plan.owner(number) * self.plan.part.pages  # the marks' own is not left out
        return zip(self.plan.pages(number), self.slots[begin:], strict=False)

    monkeypatch.setattr(RingChunk, "_slots_of", slots_of)
    engine, alone = engines("llama", 1)
    slots = arena([engine])
    with pytest.raises(AssertionError):
        assert_it_reads_what_is_told(engine, alone, slots)
