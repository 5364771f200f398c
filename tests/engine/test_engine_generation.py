"""Tokens and pages against transformers, whatever the chunks, the batch and the pages."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw
from tests.engine.driver import GREEDY, Running, assert_same_tokens, generate, generate_together, prompt_of
from tests.support.checkpoints import RECIPES, VOCAB, Reference
from tests.support.thorough import examples

Engines = Callable[..., Engine]
References = Callable[[str], Reference]

few = examples(50)
names = pytest.mark.parametrize("name", RECIPES)


@names
def test_greedy_tokens_are_those_of_transformers(name: str, engine: Engines, reference: References):
    seen: set[int] = set()
    for length in (3, 20, 40, 77):
        prompt = prompt_of(length, seed=length)
        expected, gaps = reference(name).generate(prompt, 40)
        assert_same_tokens(generate(engine(name), prompt, 40), expected, gaps)
        assert_same_tokens(generate(engine(name), prompt, 40, sizes=[30, 1, 17, 16]), expected, gaps)
        seen.update(expected)
    assert len(seen) > 40, "a model that repeats itself tests nothing"


@names
def test_logits_are_those_of_transformers(name: str, engine: Engines, reference: References):
    prompt = prompt_of(70, seed=1)
    expected = reference(name).logits(prompt).log_softmax(-1)
    ours = engine(name)
    everything = TokenDraw(temperature=0, logprobs=VOCAB)
    for start in range(0, 70, 10):
        chunks = [Chunk(prompt[start : start + 10], start, range(8), everything)]
        (sampled,) = ours.step(chunks)
        tokens, logprobs = zip(*sampled.top, strict=True)
        assert sorted(tokens) == list(range(VOCAB))
        torch.testing.assert_close(
            torch.tensor(logprobs), expected[start + 9, list(tokens)], atol=1e-2, rtol=1e-5
        )  # over logits of several tens; of Gemma 3 transformers' float32 is up to 5e-3 from its float64


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
@few
@given(data=st.data())
def test_chunks_and_pages_change_nothing(name: str, data: st.DataObject, engine: Engines, reference: References):
    page_size = data.draw(st.sampled_from([1, 7, 16]), "page_size")
    length = data.draw(st.integers(1, 70), "length")
    sizes = data.draw(st.lists(st.integers(1, 40), max_size=8), "sizes")
    ours = engine(name, page_size)
    pages = random.Random(data.draw(st.integers(0, 9), "pages")).sample(range(len(ours.pool)), 80 // page_size + 1)
    expected, gaps = reference(name).generate(prompt_of(length, seed=length), 6)
    assert_same_tokens(generate(ours, prompt_of(length, seed=length), 6, sizes, pages), expected, gaps)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
@pytest.mark.parametrize("gather_pages", [None, 1], ids=["batched", "one-by-one"])
def test_sequences_in_one_batch_do_not_touch(
    name: str, gather_pages: int | None, engine: Engines, reference: References, monkeypatch: pytest.MonkeyPatch
):
    ours = engine(name)
    if gather_pages is not None:
        monkeypatch.setattr(ours._model._attention, "gather_pages", gather_pages)
    lengths = [1, 15, 16, 17, 33, 90, 150, 40]
    pages = random.Random(3).sample(range(len(ours.pool)), 90)
    sequences = [Running(prompt_of(n, seed=n), pages[11 * i : 11 * i + 11]) for i, n in enumerate(lengths)]
    generate_together(ours, sequences, 8, seed=5)
    for length, running in zip(lengths, sequences, strict=True):
        expected, gaps = reference(name).generate(prompt_of(length, seed=length), 8)
        assert_same_tokens([sampled.token for sampled in running.drawn], expected, gaps)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("size", [1, 15, 16, 17])
def test_page_and_chunk_boundaries(length: int, size: int, engine: Engines, reference: References):
    expected, gaps = reference("mistral-window").generate(prompt_of(length), 4)
    assert_same_tokens(generate(engine("mistral-window"), prompt_of(length), 4, [size] * 40), expected, gaps)


def test_a_window_forgets_what_is_behind_it(engine: Engines):
    """With 4 layers of a window of 23, a token reaches no further than 4 · 22 positions ahead."""
    ours, prompt = engine("mistral-window"), prompt_of(120)
    draw = TokenDraw(temperature=0, logprobs=5)
    changed = [prompt[0] + 1 if prompt[0] < VOCAB - 1 else 3, *prompt[1:]]

    def logprobs(tokens: list[int], length: int) -> tuple[tuple[int, float], ...]:
        (sampled,) = ours.step([Chunk(tokens[:length], 0, range(8), draw)])
        return sampled.top

    assert logprobs(prompt, 4 * 22 + 2) == logprobs(changed, 4 * 22 + 2)
    assert logprobs(prompt, 4 * 22) != logprobs(changed, 4 * 22)


@names
def test_a_prefill_worker_makes_the_same_pages(name: str, engine: Engines):
    prompt = prompt_of(64)
    whole, headless = engine(name), engine(name, head=False)
    for ours in (whole, headless):
        ours.pool.zero_()
        assert ours.step([Chunk(prompt[:40], 0, [5, 9, 2])]) == [None]
        assert ours.step([Chunk(prompt[40:], 40, [5, 9, 2, 7], GREEDY)])[0] is None or ours is whole
    torch.testing.assert_close(headless.pool, whole.pool, atol=1e-4, rtol=1e-5)
    assert whole.pool[[5, 9, 2, 7]].abs().amin(dim=(1, 2, 3, 4, 5)).min() >= 0
    assert (whole.pool[[5, 9, 2, 7]] != 0).all(), "every layer, head and position is written"


@names
def test_pages_move_to_another_engine(name: str, engine: Engines, reference: References):
    """The hand-off: full pages of the first L − 1 tokens are copied, the rest is computed where tokens are made."""
    prompt = prompt_of(77)
    source, target = engine(name, head=False), engine(name, copy=1)
    source.step([Chunk(prompt[:64], 0, [9, 3, 4, 1])])
    target.pool.fill_(float("nan"))
    running = Running(list(prompt), [20, 30, 25, 40, 41, 42, 43], computed=64)
    blob = memoryview(bytearray(source.layout.page_bytes))
    for there, here in zip([9, 3, 4, 1], running.pages, strict=False):
        source.pages.copy_out(there, blob)
        target.pages.copy_in(blob, here)
        assert torch.equal(target.pages.view(here), source.pages.view(there))
    generate_together(target, [running], 20, seed=0)
    expected, gaps = reference(name).generate(prompt, 20)
    assert_same_tokens([sampled.token for sampled in running.drawn], expected, gaps)


def test_what_lay_in_a_page_before_is_never_read(engine: Engines, reference: References):
    ours = engine("llama", copy=1)
    ours.pool.fill_(float("nan"))
    sequences = [Running(prompt_of(n, seed=n), range(10 * i, 10 * i + 10)) for i, n in enumerate([3, 16, 30, 100])]
    generate_together(ours, sequences, 20, seed=1)
    for length, running in zip([3, 16, 30, 100], sequences, strict=True):
        expected, gaps = reference("llama").generate(prompt_of(length, seed=length), 20)
        assert_same_tokens([sampled.token for sampled in running.drawn], expected, gaps)


def test_pages_of_other_sequences_are_left_alone(engine: Engines):
    ours = engine("llama")
    ours.pool.normal_()
    before = ours.pool.clone()
    ours.step([Chunk(prompt_of(20), 0, [4, 8]), Chunk(prompt_of(5), 16, [1, 6])])
    untouched = [page for page in range(len(ours.pool)) if page not in (4, 8, 6)]
    assert torch.equal(ours.pool[untouched], before[untouched])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(dtype: str, checkpoint: Callable, reference: References):
    ours = Engine.load(checkpoint("mistral"), dtype, "cpu", 16, 16, head=True, threads=1)
    assert ours.layout.dtype == dtype
    assert ours.pages.view(0).shape == (ours.layout.page_bytes,)
    prompt = prompt_of(6)  # so short that rounding has no room to grow in a random model
    (sampled,) = ours.step([Chunk(prompt, 0, [0], TokenDraw(temperature=0, logprobs=3))])
    assert sampled is not None
    expected = reference("mistral").logits(prompt).log_softmax(-1)[-1]
    assert sampled.logprob == pytest.approx(float(expected[sampled.token]), abs=0.5)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk([], 0, [0]), "needs tokens"),
        (Chunk([5], -1, [0]), "needs tokens"),
        (Chunk([5] * 17, 0, [0]), "need 2 pages, not 1"),
        (Chunk([VOCAB], 0, [0]), f"token id {VOCAB}"),
        (Chunk([-1], 0, [0]), "token id -1"),
        (Chunk([5], 0, [10_000]), "page 10000"),
        (Chunk([5], 0, [-1]), "page -1"),
    ],
)
def test_a_chunk_that_can_not_run_is_refused_before_anything_happens(chunk: Chunk, message: str, engine: Engines):
    ours = engine("llama")
    before = ours.pool.clone()
    with pytest.raises(ValueError, match=message):
        ours.step([Chunk([7], 0, [1]), chunk])
    assert torch.equal(ours.pool, before)


def test_no_chunks_no_results(engine: Engines):
    assert engine("llama").step([]) == []


def test_pages_of_another_dtype(checkpoint: Callable[[str], Path], engine: Engines):
    """K and V are rounded where they are written, and everything else is computed as before."""
    exact = engine("qwen3", copy=2)
    rounded = Engine.load(checkpoint("qwen3"), "float32", "cpu", 8, 16, True, 1, kv_cache_dtype="bfloat16")
    prompt, draw = prompt_of(60), TokenDraw(temperature=0, logprobs=VOCAB)
    (right,) = exact.step([Chunk(prompt, 0, range(8), draw)])
    (ours,) = rounded.step([Chunk(prompt, 0, range(8), draw)])
    assert right is not None
    assert ours is not None
    assert rounded.pool.dtype == torch.bfloat16
    first = slice(0, 3), slice(None), 0  # three full pages of the layer whose input no page has touched
    assert torch.equal(rounded.pool[first], exact.pool[first].bfloat16())
    assert rounded.layout.page_bytes * 2 == exact.layout.page_bytes
    assert rounded.fingerprint != exact.fingerprint
    assert right.logprob is not None
    assert ours.logprob == pytest.approx(right.logprob, abs=0.5)
    assert ours.top != right.top
