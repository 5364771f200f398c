"""The kernels of steps with many rows against plain formulas, and whole steps against torch's path."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from engine.cpu import build, prefill
from engine.cpu.packed_linear import PackedLinear
from engine.cpu.prefill import Kernels, NativePrefill, OneDnnProducts, OwnProducts, cut
from engine.engine import Engine
from engine.models import rotary
from engine.models.config import parse_spec
from engine.models.weights import TORCH_DTYPES
from engine.spec import RopeSpec
from engine.step.batch import Chunk, TokenDraw, flatten
from engine.step.block_table import BlockTable
from kvstore.layout import PageLayout
from tests.checkpoints import RECIPES, TORCH_ONLY, VOCAB, Reference
from tests.engine.driver import GREEDY, assert_same_tokens, generate, prompt_of
from tests.support.thorough import examples

library = build.library()
native = pytest.mark.skipif(
    not build.can_compile() or prefill.parallel_function() is None,
    reason="no compiler, no AVX2, or a torch without at::parallel_for: torch does the work here",
)
few = examples(60)
both = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
CONFIG = parse_spec(
    {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 999,
    }
)


def kernels(heads: int, kv_heads: int, head_dim: int, page_size: int, pool: torch.Tensor, threads: int = 2) -> Kernels:
    assert library is not None
    config = replace(CONFIG, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    dtype = str(pool.dtype).removeprefix("torch.")
    return Kernels(library, threads, config, PageLayout(3, kv_heads, head_dim, page_size, dtype), pool)


def normal(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """[rows, heads, head_dim] over [context, kv_heads, head_dim], in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * queries.shape[-1] ** -0.5
    query, key = torch.arange(start, start + len(queries))[:, None], torch.arange(len(keys))
    hidden = (key > query) | (key <= query - window if window is not None else torch.tensor(False))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@native
@both
@few
@given(
    data=st.data(),
    group=st.sampled_from([1, 2, 3, 7, 8]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 24, 64, 128, 256]),
    page_size=st.sampled_from([1, 4, 7, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 200)),
)
def test_attention_is_that_of_the_formula(
    dtype: str, data: st.DataObject, group: int, kv_heads: int, head_dim: int, page_size: int, window: int | None
):
    """Several sequences in one call, their pages anywhere, and NaN in all memory that no sequence may read."""
    span = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 100)))
    spans = data.draw(st.lists(span, min_size=1, max_size=4), "(start, rows)")
    layer, seed = data.draw(st.integers(0, 2), "layer"), data.draw(st.integers(0, 99), "seed")
    heads, rng = group * kv_heads, random.Random(seed)
    counts = [-(-(start + rows) // page_size) for start, rows in spans]
    order = rng.sample(range(sum(counts) + 3), sum(counts))
    pool = torch.full((sum(counts) + 3, kv_heads, 3, 2, page_size, head_dim), float("nan"), dtype=TORCH_DTYPES[dtype])
    ours = kernels(heads, kv_heads, head_dim, page_size, pool)
    width = (heads + 2 * kv_heads) * head_dim
    queries = normal(sum(rows for _, rows in spans), width, dtype=dtype, seed=seed)

    expected: list[torch.Tensor] = []
    tables: list[BlockTable] = []
    pieces: list[tuple[int, int, int, int]] = []
    row = page = 0
    for (start, rows), count in zip(spans, counts, strict=True):
        keys, values = normal(2, start + rows, kv_heads, head_dim, dtype=dtype, seed=seed + row + 1)
        for position in range(start + rows):
            into = pool[order[page + position // page_size], :, layer, :, position % page_size]
            into[:, 0], into[:, 1] = keys[position], values[position]
        own = queries[row : row + rows, : heads * head_dim].view(rows, heads, head_dim)
        expected.append(plain_attention(own, keys, values, start, window))
        tables.append(BlockTable(order[page : page + count]))
        pieces.append((row, rows, start, tables[-1].address))
        row, page = row + rows, page + count
    got = ours.attend(layer, queries, ours.pieces(np.array(pieces)), window)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), torch.cat(expected).flatten(1), atol=tolerance, rtol=tolerance)


@native
def test_large_scores_do_not_overflow():
    """Scores of ±10⁴, falling and rising along the context: the maximum is met at either end."""
    for sign in (1, -1):
        pool = torch.ones(20, 1, 3, 2, 16, 16)
        pool[:, 0, 0, 0] = torch.linspace(-sign * 2500, sign * 2500, 320).view(20, 16, 1)
        pool[:, 0, 0, 1] = torch.arange(320.0).view(20, 16, 1)
        ours = kernels(1, 1, 16, 16, pool)
        table = BlockTable(range(20))
        got = ours.attend(0, torch.ones(1, 48), ours.pieces(np.array([(0, 1, 319, table.address)])), None)
        torch.testing.assert_close(got, torch.full((1, 16), 319.0 if sign == 1 else 0.0))


@native
@both
@pytest.mark.parametrize("rows", [1, 15, 33])
@pytest.mark.parametrize("width", [16, 40, 768])
def test_norm_and_gate(dtype: str, rows: int, width: int):
    ours, tolerance = kernels(1, 1, 8, 1, torch.zeros(1, 1, 3, 2, 1, 8, dtype=TORCH_DTYPES[dtype])), TOLERANCE[dtype]
    x, delta, weight = (normal(n, width, dtype=dtype, seed=n) for n in (rows, rows, 1))
    out, added = torch.empty_like(x), (x.float() + delta.float()).to(x.dtype)
    expected = functional.rms_norm(x.float(), (width,), weight[0].float(), CONFIG.norm_eps)
    ours.norm(x, None, weight[0], out)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    ours.norm(x, delta, weight[0], out)
    torch.testing.assert_close(x, added)
    expected = functional.rms_norm(added.float(), (width,), weight[0].float(), CONFIG.norm_eps)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)

    gate_up = normal(rows, 2 * width, dtype=dtype, seed=9) * 10
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(ours.gate(gate_up).float(), functional.silu(gate) * up, atol=tolerance, rtol=tolerance)


@native
@both
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [0, 4])  # none: what a prefill worker does of the last layer
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_keys_and_values_are_written(dtype: str, normed: bool, heads: int, head_dim: int):
    pool = torch.zeros(6, 2, 3, 2, 4, head_dim, dtype=TORCH_DTYPES[dtype])
    ours, rows, layer, tolerance = kernels(4, 2, head_dim, 4, pool), 19, 1, TOLERANCE[dtype]
    qkv = normal(rows, (heads + 4) * head_dim, dtype=dtype)
    weight = normal(heads + 2, head_dim, dtype=dtype, seed=1) if normed else None
    frequencies = rotary.inverse_frequencies(RopeSpec(10_000.0), head_dim)
    turn = rotary.rotation(torch.arange(100, 100 + rows), frequencies)
    qk, values = qkv.view(rows, -1, head_dim).float().split((heads + 2, 2), dim=1)
    if weight is not None:
        qk = functional.rms_norm(qk, (head_dim,), None, CONFIG.norm_eps) * weight.float()
    queries, keys = rotary.rotate(qk, turn).split((heads, 2), dim=1)

    places = random.Random(0).sample([(page, offset) for page in range(6) for offset in range(4)], rows)
    tables = [BlockTable([5, page]) for page, _ in places]
    positions = np.array([4 + offset for _, offset in places])
    ours.write(layer, qkv, heads, *turn, weight, positions, np.array([table.address for table in tables]))
    for row, (page, offset) in enumerate(places):
        there = pool[page, :, layer, :, offset].float()
        torch.testing.assert_close(there[:, 0], keys[row], atol=tolerance, rtol=tolerance)
        assert torch.equal(there[:, 1], values[row])
    rotated = qkv[:, : heads * head_dim].view(rows, heads, head_dim).float()
    torch.testing.assert_close(rotated, queries, atol=tolerance, rtol=tolerance)
    assert not pool[:, :, [0, 2]].any(), "another layer was written to"


def test_blocks_cover_all_rows_and_none_is_small():
    for rows in range(1, 2000):
        blocks = list(cut(rows))
        assert [first for first, _ in blocks] == [0, *(last for _, last in blocks[:-1])]
        assert blocks[-1][1] == rows
        assert all(4 * (last - first) >= prefill.BLOCK_ROWS for first, last in blocks) or len(blocks) == 1
        assert all(last - first < prefill.BLOCK_ROWS * 5 // 4 for first, last in blocks)


@native
def test_units_are_finer_where_there_are_few():
    pool = torch.zeros(1, 4, 3, 2, 16, 64)
    ours = kernels(12, 4, 64, 16, pool)
    long = ours.pieces(np.array([(0, 512, 0, 0), (512, 1, 900, 0)]))
    assert long.lanes == prefill.MOST_LANES
    assert long.units == 4 * (512 * 3 // 192) + 4
    assert long.table.tolist() == [[512, 1, 900, 0, 0], [0, 512, 0, 0, 4]]
    short = ours.pieces(np.array([(0, 40, 0, 0)]))
    assert (short.lanes, short.units) == (96, 8)


def ragged(seed: int, pages: int) -> list[Chunk]:
    """Chunks of several sequences, more rows together than a block, with single tokens among them."""
    rng = random.Random(seed)
    chunks: list[Chunk] = []
    order = rng.sample(range(pages), pages)
    for i in range(6):
        start = rng.choice([0, 0, 5, 16, 40])
        length = 1 if rng.random() < 0.4 else rng.randrange(1, 120 - start)
        own = order[i * 8 : i * 8 + 8]
        chunks.append(Chunk([rng.randrange(VOCAB) for _ in range(length)], start, own, rng.choice([None, GREEDY])))
    return chunks


@native
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in TORCH_ONLY])
def test_a_step_is_that_of_torch(name: str, checkpoint: Callable[[str], Path]):
    ours, theirs = (
        Engine.load(checkpoint(name), "float32", "cpu", 64, 16, True, 1, native) for native in (True, False)
    )
    assert ours._prefill_model is not ours._model
    assert theirs._prefill_model is theirs._model
    for seed in range(8):
        theirs.pool.normal_(generator=torch.Generator().manual_seed(seed))
        ours.pool.copy_(theirs.pool)
        chunks = ragged(seed, 64)
        batch = flatten(chunks, 16, 64, VOCAB)
        with torch.inference_mode():
            got, expected = ours._prefill_model.forward(batch), theirs._prefill_model.forward(batch)
        torch.testing.assert_close(ours.pool, theirs.pool, atol=1e-4, rtol=1e-4)
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@native
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_bfloat16_it_is_as_near_to_float32_as_torch(name: str, checkpoint: Callable[[str], Path]):
    def pages(dtype: str, native: bool) -> torch.Tensor:
        engine = Engine.load(checkpoint(name), dtype, "cpu", 64, 16, True, 1, native)
        with torch.inference_mode():
            engine._prefill_model.forward(flatten(ragged(1, 64), 16, 64, VOCAB))
        return engine.pool.float()

    exact, torchs, ours = pages("float32", False), pages("bfloat16", False), pages("bfloat16", True)
    error, allowed = (ours - exact).abs().mean(), (torchs - exact).abs().mean()
    assert 0 < error <= 1.1 * allowed


@native
def test_threads_change_nothing(checkpoint: Callable[[str], Path]):
    before = torch.get_num_threads()
    pools: list[torch.Tensor] = []
    try:
        for threads in (1, 2, 3):
            engine = Engine.load(checkpoint("llama"), "bfloat16", "cpu", 64, 16, False, threads)
            for seed in range(3):
                engine.step(ragged(seed, 64))
            pools.append(engine.pool)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


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


def test_float16_is_left_to_torch(checkpoint: Callable[[str], Path]):
    engine = Engine.load(checkpoint("llama"), "float16", "cpu", 20, 16, True, 1)
    assert engine._prefill_model is engine._model
    assert engine.step([Chunk(prompt_of(40), 0, range(3), TokenDraw(temperature=0))])[0] is not None


@native
@both
@few
@given(
    rows=st.integers(1, 40),
    inputs=st.sampled_from([2, 40, 64, 130]),
    halves=st.integers(1, 5),
    odd=st.sampled_from([0, 8, 50]),
    biased=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_products(dtype: str, rows: int, inputs: int, halves: int, odd: int, biased: bool, threads: int):
    outputs, tolerance = 64 * halves + odd, TOLERANCE[dtype]
    pool = torch.zeros(1, 1, 3, 2, 1, 8, dtype=TORCH_DTYPES[dtype])
    ours = kernels(1, 1, 8, 1, pool, threads)
    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, seed=1)
    bias = normal(outputs, dtype=dtype, seed=2) if biased else None
    linear = PackedLinear(weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    products = OwnProducts(ours, [linear])

    def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), expected, atol=tolerance * inputs**0.5, rtol=tolerance)

    agree(products.plain(linear, x), exact)
    gate, up = exact.chunk(2, dim=-1)
    agree(products.gated(linear, x), functional.silu(gate) * up)
    before, norm = normal(rows, outputs, dtype=dtype, seed=3), normal(outputs, dtype=dtype, seed=4)
    to, normed = before.clone(), torch.empty_like(before)
    products.add(linear, x, to, norm, normed)
    agree(to, before.double() + exact)
    agree(normed, functional.rms_norm(to.double(), (outputs,), norm.double(), CONFIG.norm_eps))


@native
def test_a_matrix_unit_is_left_to_onednn(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    """And with its products, steps are what they are with ours."""
    ours = Engine.load(checkpoint("llama-bias"), "bfloat16", "cpu", 64, 16, True, 1)
    monkeypatch.setattr(build, "cpu_description", lambda: "flags amx_bf16 amx_tile")
    theirs = Engine.load(checkpoint("llama-bias"), "bfloat16", "cpu", 64, 16, True, 1)
    for engine, products in ((ours, OwnProducts), (theirs, OneDnnProducts)):
        assert isinstance(engine._prefill_model, NativePrefill)
        assert type(engine._prefill_model._products) is products
        engine.step(ragged(3, 64))
    torch.testing.assert_close(ours.pool, theirs.pool, atol=0.5, rtol=0.1)
    assert (ours.pool - theirs.pool).abs().float().mean() < 0.02 * ours.pool.abs().float().mean()
