"""The native kernels beside the torch path."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu import build, numerics
from engine.cpu.forward import Memory, Product
from engine.cpu.packed_linear import PackedLinear, tiled
from engine.cpu.thread_pool import ThreadPool
from engine.engine import Engine
from engine.step.batch import Chunk, Sampled, TokenDraw
from tests.engine.driver import GREEDY, Running, assert_same_tokens, generate, prompt_of
from tests.support import checkpoints
from tests.support.checkpoints import RECIPES, VOCAB, Reference
from tests.support.thorough import examples

Pair = tuple[Engine, Engine]
Pairs = Callable[..., Pair]

PAGES = 64
MOST_ROWS = 64  # that threads norm by themselves
EVERYTHING = TokenDraw(temperature=0, logprobs=VOCAB)

native = pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch does the work here")
few = examples(60)
ROUGH = 10  # times the error of others: Gemma 3 and LongRoPE have larger numbers. transformers is as far from float64
NATIVE = list(RECIPES)
names = pytest.mark.parametrize("name", NATIVE)
SHAPES = {  # of "llama-bias"; the kernels know two sizes of heads beforehand
    "odd": {"hidden_size": 78, "head_dim": 18, "intermediate_size": 131, "num_attention_heads": 6},
    "heads of 64": {"head_dim": 64},
    "heads of 128": {"head_dim": 128},
}


@pytest.fixture(scope="session")
def pair(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """`pair(name, …)`: the same checkpoint on native kernels and on torch alone. The sizes of "odd" are multiples of
    nothing."""

    @cache
    def path(name: str) -> Path:
        if name not in SHAPES:
            return checkpoint(name)
        return checkpoints.make("llama-bias", tmp_path_factory.mktemp("shape"), **SHAPES[name])

    @cache
    def loaded(name: str, page_size: int = 16, dtype: str = "float32", threads: int = 1) -> Pair:
        def load(native: bool) -> Engine:
            pages = PAGES * 16 // page_size
            return Engine.load(path(name), dtype, "cpu", pages, page_size, True, threads=threads, native=native)

        ours, plain = load(True), load(False)
        assert ours._native is not None
        assert plain._native is None
        return ours, plain

    return loaded


def dense(sampled: Sampled | None) -> torch.Tensor:
    """The log-probabilities of `EVERYTHING`, [vocab]."""
    tokens, logprobs = zip(*sampled.top, strict=True)
    return torch.empty(VOCAB).scatter_(0, torch.tensor(tokens), torch.tensor(logprobs))


def roughness(engine: Engine) -> int:
    return ROUGH if engine.config.output_norms or engine.config.layers[0].rope.rotated else 1


def assert_same_pages(ours: Engine, plain: Engine) -> None:
    torch.testing.assert_close(ours.pool, plain.pool, atol=5e-4 * roughness(ours), rtol=1e-4)


def assert_same_step(ours: Engine, plain: Engine, chunks: Sequence[Chunk]) -> None:
    """The same results of both, up to rounding, and the same pages."""
    for mine, theirs in zip(ours.step(chunks), plain.step(chunks), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(dense(mine), dense(theirs), atol=5e-4 * roughness(ours), rtol=1e-4)
    assert_same_pages(ours, plain)


@native
@names
def test_greedy_tokens_are_those_of_transformers(
    name: str, pair: Pairs, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
):
    ours, plain = pair(name)
    prompt = prompt_of(75, seed=4)
    expected, gaps = reference(name).generate(prompt, 60)
    tokens = generate(ours, prompt, 60, sizes=[MOST_ROWS, 17, MOST_ROWS])
    assert_same_tokens(tokens, expected, gaps)
    assert_same_tokens(tokens, generate(plain, prompt, 60), gaps)


@native
@pytest.mark.parametrize("name", [*NATIVE, *SHAPES])
@few
@given(data=st.data())
def test_any_batch_gives_the_logits_and_pages_of_torch(name: str, data: st.DataObject, pair: Pairs):
    page_size = data.draw(st.sampled_from([1, 7, 16, 64]), "page_size")
    ours, plain = pair(name, page_size, threads=data.draw(st.sampled_from([1, 2]), "threads"))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda x: sum(x) <= MOST_ROWS))
    rng = data.draw(st.randoms(use_true_random=False))
    free = list(range(len(ours.pool)))
    rng.shuffle(free)
    chunks: list[Chunk] = []
    for length in lengths:
        start = rng.choice([0, 1, page_size - 1, page_size, rng.randrange(64)])
        pages = [free.pop() for _ in range(-(-(start + length) // page_size))] if free else []
        if len(pages) * page_size < start + length:
            continue
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        chunks.append(Chunk(tokens, start, pages, EVERYTHING if rng.random() < 0.8 else None))
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    ours.pool.normal_(generator=generator)
    plain.pool.copy_(ours.pool)
    assert_same_step(ours, plain, chunks)


@native
@pytest.mark.parametrize("name", ["llama", "mistral-window", "heads of 128"])
@pytest.mark.parametrize("threads", [2, 5])
def test_long_contexts_are_shared_between_threads(name: str, threads: int, pair: Pairs):
    """One sequence has fewer heads than there are threads, so each takes a stretch of the context."""
    ours, plain = pair(name, 16, "float32", threads)
    generator = torch.Generator().manual_seed(1)
    ours.pool.normal_(generator=generator)
    plain.pool.copy_(ours.pool)
    for start in (511, 512, 700, 1_000):
        chunks = [Chunk([5], start, range(PAGES), EVERYTHING)]
        assert_same_step(ours, plain, chunks)


@native
@pytest.mark.parametrize("name", ["llama", "mistral-window", "heads of 64"])
@pytest.mark.parametrize("page_size", [7, 16])
def test_contexts_of_all_lengths_side_by_side(name: str, page_size: int, pair: Pairs):
    """While a thread computes with one it asks for the next one's pages, which may be fewer than it looks ahead."""
    ours, plain = pair(name, page_size, "float32", 2)
    generator = torch.Generator().manual_seed(2)
    ours.pool.normal_(generator=generator)
    plain.pool.copy_(ours.pool)
    starts, free = [0, 299, 1, 255, 256, 0, 100, 15], list(range(len(ours.pool)))
    chunks: list[Chunk] = []
    for start in starts:
        count = start // page_size + 1
        chunks.append(Chunk([5], start, free[-count:], EVERYTHING))
        del free[-count:]
    assert_same_step(ours, plain, chunks)


@native
@pytest.mark.parametrize("name", ["llama", "mistral", "mistral-window", "odd"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_of_one_sequence_attend_together_each_to_what_comes_before_it(name: str, threads: int, pair: Pairs):
    """Also where a block of the context, a stretch of it or a window ends among them. What the rows before the last one
    attended to shows in their keys and values of the layers after the first."""
    ours, plain = pair(name, 16, "float32", threads)
    generator = torch.Generator().manual_seed(3)
    ours.pool.normal_(generator=generator)
    plain.pool.copy_(ours.pool)
    for start, rows in ((0, 40), (250, 7), (255, 2), (511, 5), (700, 16), (1_000, 3)):
        chunks = [Chunk(prompt_of(rows, seed=start), start, range(PAGES), EVERYTHING)]
        assert_same_step(ours, plain, chunks)


def ragged(seed: int, pages: int) -> list[Chunk]:
    """Chunks of several sequences, more rows together than a block, with single tokens among them."""
    rng = random.Random(seed)
    chunks: list[Chunk] = []
    order = rng.sample(range(pages), pages)
    for i in range(6):
        start = rng.choice([0, 0, 5, 16, 40])
        length = 1 if rng.random() < 0.4 else rng.randrange(1, 120 - start)
        own = order[i * 8 : i * 8 + 8]
        chunks.append(Chunk([rng.randrange(VOCAB) for _ in range(length)], start, own, rng.choice([None, EVERYTHING])))
    return chunks


@native
@pytest.mark.parametrize("name", [*NATIVE, *SHAPES])
def test_steps_of_many_rows(name: str, pair: Pairs):
    ours, plain = pair(name, 16, "float32", 2)
    for seed in range(8):
        plain.pool.normal_(generator=torch.Generator().manual_seed(seed))
        ours.pool.copy_(plain.pool)
        assert_same_step(ours, plain, ragged(seed, PAGES))


@native
@pytest.mark.parametrize("name", NATIVE)
def test_without_a_head_there_are_pages(name: str, checkpoint: Callable[[str], Path]):
    ours, plain = (Engine.load(checkpoint(name), "float32", "cpu", PAGES, 16, False, 2, own) for own in (True, False))
    assert ours._native is not None
    for seed in range(4):
        chunks = ragged(seed, PAGES)
        assert ours.step(chunks) == plain.step(chunks) == [None] * len(chunks)
        assert_same_pages(ours, plain)


@native
def test_a_step_that_cannot_run_whole_touches_no_page(pair: Pairs):
    ours, _ = pair("llama")
    ours.pool.zero_()
    chunks = [Chunk([5], 0, [page], EVERYTHING) for page in range(4)]
    with pytest.raises(ValueError, match="page 64 is not in"):
        ours.step([*chunks, Chunk(prompt_of(80, seed=1), 0, [4, 5, 6, 7, PAGES], EVERYTHING)])
    assert not ours.pool.any()


@native
def test_the_number_of_threads_changes_no_token(pair: Pairs):
    def tokens(threads: int) -> list[list[int]]:
        ours, _ = pair("qwen3", 16, "float32", threads)
        sequences = [Running(prompt_of(n, seed=n), range(8 * n, 8 * n + 8)) for n in range(1, 8)]
        while len(sequences[0].drawn) < 20:
            chunks = [one.chunk(4) for one in sequences]
            for one, chunk, sampled in zip(sequences, chunks, ours.step(chunks), strict=True):
                one.take(chunk, sampled)
        return [one.tokens for one in sequences]

    assert tokens(1) == tokens(2) == tokens(3)


@native
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-window", "qwen3", *SHAPES])
def test_bfloat16_is_as_near_to_float32_as_torch_is(name: str, pair: Pairs):
    """Of all the outputs of some batches, each computed from the same rounded weights and pages."""
    ours, plain = pair(name, 16, "bfloat16")
    exact, _ = pair(name, 16, "float32")
    errors: list[tuple[float, float]] = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ours.pool.normal_(generator=generator)
        plain.pool.copy_(ours.pool)
        exact.pool.copy_(ours.pool)
        chunks = [Chunk(prompt_of(1 + i, seed=i), 9 * i, range(6 * i, 6 * i + 6), EVERYTHING) for i in range(6)]
        for mine, theirs, right in zip(ours.step(chunks), plain.step(chunks), exact.step(chunks), strict=True):
            errors.append(tuple(float((dense(one) - dense(right)).abs().mean()) for one in (mine, theirs)))
        torch.testing.assert_close(ours.pool[:, :, 0].float(), plain.pool[:, :, 0].float(), atol=0.3, rtol=0.05)
    mine, theirs = (sum(column) for column in zip(*errors, strict=True))
    assert mine < 1.25 * theirs


@native
def test_equal_logits_give_the_lowest_token(pair: Pairs):
    ours, _ = pair("llama")
    head = ours._native._model.head.tiles
    zeros = torch.zeros(1024 * 64)  # as many weights as the head has
    ours._native._model.head.tiles = zeros.data_ptr()
    try:
        (sampled,) = ours.step([Chunk([7], 0, [0], GREEDY)])
    finally:
        ours._native._model.head.tiles = head
    assert sampled.token == 0


@pytest.mark.parametrize(("out_size", "in_size"), [(64, 32), (128, 96), (1000, 64), (7, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_hold_the_weight(out_size: int, in_size: int, dtype: torch.dtype):
    weight = torch.randn(out_size, in_size).to(dtype)
    word = 4 // weight.element_size()
    linear = PackedLinear(weight)
    tiles = linear.tiles()
    assert torch.equal(tiles, tiled(weight))
    tiles = tiles.view(-1, in_size // word, 64, word)
    for out, into in ((0, 0), (out_size - 1, in_size - 1), (out_size // 2, 3)):
        assert tiles[out // 64, into // word, out % 64, into % word] == weight[out, into]


def test_a_large_weight_is_in_memory_once():
    """oneDNN's own order is ours wherever it has been seen; another would cost a copy, and this test would say so."""
    linear = PackedLinear(torch.randn(256, 128))
    if not linear._packed:
        pytest.skip("torch has no oneDNN here")
    assert linear.tiles().data_ptr() == torch.ops.mkldnn.data_ptr(linear._weight)


def test_where_tiles_are_a_copy_the_weight_goes():
    weight = torch.randn(128, 64).half()  # which oneDNN never packs
    linear = PackedLinear(weight)
    linear.keep_tiles()
    linear.keep_tiles()
    assert linear._weight is None
    assert torch.equal(linear.tiles(), tiled(weight))
    assert (linear.out_size, linear.in_size) == weight.shape


wide = pytest.mark.skipif(
    "avx512_bf16" not in build.cpu_description().split(), reason="this CPU has the narrower vectors only"
)


@native
@wide
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.15)])
@pytest.mark.parametrize(("name", "first_level_cache"), [("llama", 0), ("qwen3", 2**20)])
def test_narrower_vectors_come_to_the_same(
    name: str,
    first_level_cache: int,
    dtype: str,
    tolerance: float,
    pair: Pairs,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
):
    """The kernels as they are on a CPU with AVX2 alone, for few rows and many, with a small cache and a large one."""
    _, plain = pair(name, 16, dtype)
    flags = tuple("-march=x86-64-v3" if flag == "-march=native" else flag for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", flags)
    monkeypatch.setattr(build, "first_level_cache", lambda: first_level_cache)
    library = build.load(build.SOURCES, build.cache_root())
    monkeypatch.setattr(build, "library", lambda: library)
    narrow = Engine.load(checkpoint(name), dtype, "cpu", PAGES, 16, True, threads=2)
    assert narrow._native is not None
    plain.pool.zero_()
    for length in (MOST_ROWS // 4, 2 * MOST_ROWS):
        pages = [range(16 * i, 16 * i + 16) for i in range(4)]
        chunks = [Chunk(prompt_of(length - i, seed=i), 0, own, EVERYTHING) for i, own in enumerate(pages)]
        for mine, theirs in zip(narrow.step(chunks), plain.step(chunks), strict=True):
            assert (dense(mine) - dense(theirs)).abs().mean() < tolerance


@native
@pytest.mark.skipif(
    "avx512_fp16" not in build.cpu_description().split(), reason="this CPU multiplies bf16 one way only"
)
def test_dot_products_of_bf16_come_to_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    """The kernels as they are on a CPU whose dot products of bf16 are quick."""
    ours = build.library()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512fp16"))
    dots = build.load(build.SOURCES, build.cache_root())
    assert ours is not None
    assert ours._name != dots._name
    for forms in ((), ("int8",), ("int4",)):
        assert numerics.probe(ours, forms) == numerics.probe(dots, forms)


# --- the library -----------------------------------------------------------------------------------------------------


@native
def test_a_pool_that_is_never_used_ends():
    library = build.library()
    assert library is not None
    for threads in (1, 2, 7):
        ThreadPool(library, threads)._end()


@native
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 96), (33, 2048), (640, 770)])
def test_a_product_by_itself_has_the_bits_of_each_row(outputs: int, inputs: int, dtype: torch.dtype, error: float):
    """Whatever rows are computed with it and by how many threads. They are OpenMP's, as torch's are."""
    library, generator = build.library(), torch.Generator().manual_seed(outputs)
    assert library is not None
    weight, bias, x = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((outputs, inputs), outputs, (900, inputs))
    )
    products = [
        Product(library, ThreadPool(library, threads, openmp=threads > 1), Memory(), PackedLinear(weight))
        for threads in (1, 2)
    ]
    whole = products[0](x, bias)
    right = x.double() @ weight.double().T + bias.double()
    assert (whole.double() - right).abs().max() <= right.abs().max() * error
    for product in products:
        for first, count in ((0, 900), (5, 1), (9, 31), (100, 70), (200, 650)):
            assert torch.equal(product(x[first : first + count], bias), whole[first : first + count])
    assert torch.equal(products[1](x[:40].t().contiguous().t()), products[0](x[:40]))


@native
def test_openmp_may_give_fewer_threads_than_it_is_asked_for():
    code = """import torch; from engine.cpu import build; from engine.cpu.forward import Memory, Product
from engine.cpu.packed_linear import PackedLinear; from engine.cpu.thread_pool import ThreadPool
linear, pool = PackedLinear(torch.ones(640, 768)), ThreadPool(build.library(), 3, openmp=True)
assert Product(build.library(), pool, Memory(), linear)(torch.ones(2, 768)).eq(768).all()"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_THREAD_LIMIT": "1"}, check=True, timeout=60)


def test_float16_is_left_to_torch(checkpoint: Callable[[str], Path]):
    engine = Engine.load(checkpoint("llama"), "float16", "cpu", 20, 16, True, 1)
    assert engine._native is None
    assert engine.step([Chunk(prompt_of(40), 0, range(3), TokenDraw(temperature=0))])[0] is not None


@pytest.mark.parametrize("name", RECIPES)
def test_torch_alone_makes_the_tokens_of_transformers(
    name: str, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
):
    """The path of other CPUs and of float16, which the engine's other tests don't take where there are kernels."""
    engine = Engine.load(checkpoint(name), "float32", "cpu", 20, 16, True, 1, native=False)
    for length, sizes in ((20, []), (77, [30, 1, 17, 16])):
        prompt = prompt_of(length, seed=length)
        expected, gaps = reference(name).generate(prompt, 12)
        assert_same_tokens(generate(engine, prompt, 12, sizes), expected, gaps)
