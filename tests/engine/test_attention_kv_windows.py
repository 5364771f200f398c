"""A request's sinks and window against transformers with the same mask, by our kernels and by torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw, flatten
from engine.step.block_table import BlockTable
from kvstore.kv_window import KvWindow
from tests.engine.driver import prompt_of
from tests.support.checkpoints import VOCAB, Reference

PAGE = 16
EVERYTHING = TokenDraw(temperature=0, logprobs=VOCAB)


def mask_of(window: KvWindow, length: int, sinks: int) -> torch.Tensor:
    """[1, 1, tokens, tokens]: added to the scores. Made of positions alone."""
    mask = torch.full((length, length), float("-inf"))
    for at in range(length):
        for key in range(at + 1):
            in_sinks = key // PAGE <= (sinks - 1) // PAGE
            in_window = key // PAGE >= (at - window.tokens + 1) // PAGE
            if at < window.prompt or in_sinks or in_window:
                mask[at, key] = 0.0
    return mask[None, None]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("prompt", "sinks", "tokens"), [(5, 4, 40), (100, 0, 17), (100, 20, 33)])
def test_logits_are_those_of_transformers_with_the_mask(
    name: str, native: bool, prompt: int, sinks: int, tokens: int, checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
) -> None:  # fmt: skip
    length = 200
    text, window = prompt_of(length, seed=3), KvWindow(prompt, -(-sinks // PAGE), tokens, PAGE)
    model = reference(name).model
    with torch.inference_mode():
        expected = model(torch.tensor([text]), attention_mask=mask_of(window, length, sinks)).logits[0].log_softmax(-1)
        plain = model(torch.tensor([text])).logits[0].log_softmax(-1)
    assert torch.allclose(expected[: window.exact], plain[: window.exact], atol=1e-4)
    assert not torch.allclose(expected[-1], plain[-1], atol=1e-1)
    engine = Engine.load(checkpoint(name), "float32", "cpu", 16, PAGE, True, 2, native)
    table, start = BlockTable(range(13)), 0
    for size in (90, 1, 30, 1, 1, 60, 1, 1, 1, 14):
        chunk = Chunk(text[start : start + size], start, table, EVERYTHING, kv_window=window)
        (sampled,) = engine.step([chunk])
        start += size
        assert sampled is not None
        for page in table.give_back(first := window.first_page(start), window.anchors(first)):
            engine.pool[page] = float("nan")  # another sequence has it now
        ids, logprobs = zip(*sampled.top, strict=True)
        torch.testing.assert_close(torch.tensor(logprobs), expected[start - 1, list(ids)], atol=1e-2, rtol=1e-5)
    assert table.first == window.first_page(length) > 8


@pytest.mark.parametrize(
    ("dtype", "held"), [("float32", "auto"), ("float32", "int8"), ("float32", "fp8"), ("bfloat16", "auto")]
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_weights_of_pages_are_those_of_transformers(
    name: str, dtype: str, held: str, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    """Of all layers but the last. Pages that begin later have no weight."""
    length, observed = 150, 16
    text = prompt_of(length, seed=3)
    model = reference(name).model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        layers = model(torch.tensor([text]), output_attentions=True).attentions[:-1]
    model.set_attn_implementation("sdpa")
    rows = torch.stack(layers)[:, 0].sum((0, 1))[-observed:]
    expected = torch.nn.functional.pad(rows, (0, -length % PAGE)).unflatten(1, (-1, PAGE)).sum(2)
    engine = Engine.load(checkpoint(name), dtype, "cpu", 16, PAGE, True, 2, kv_cache_dtype=held)
    window = KvWindow(length, 0, 40, PAGE, keep=2)
    output = engine.run([Chunk(text, 0, BlockTable(range(10)), EVERYTHING, kv_window=window, observed=observed)])
    atol = {"auto": 1e-4 if dtype == "float32" else 0.3, "int8": 0.3, "fp8": 1.0}[held]  # of up to 24
    torch.testing.assert_close(torch.tensor(output.weights[0]), expected, atol=atol, rtol=0)
    torch.testing.assert_close(torch.tensor(output.weights[0]).sum(1), expected.sum(1), atol=1e-3, rtol=0)


def test_without_our_own_kernels_no_token_is_observed(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cpu", 4, PAGE, True, 1, native=False)
    with pytest.raises(ValueError, match="only our own kernels for CPUs tell what tokens attend to"):
        engine.run([Chunk([5], 0, BlockTable(range(1)), observed=1)])


@pytest.mark.parametrize(("first", "sinks"), [(7, 1), (6, 0)])
def test_a_chunk_that_attends_to_a_page_that_was_given_back_is_refused(first: int, sinks: int) -> None:
    table, window = BlockTable(range(13)), KvWindow(20, 1, 40, PAGE)
    table.give_back(first, tuple(range(sinks)))
    with pytest.raises(ValueError, match=f"attends to pages before the table's entry {first}"):
        flatten([Chunk([5], 140, table, kv_window=window)], PAGE, 13, 100)


@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_a_model_with_windows_of_its_own_says_why_not(name: str, checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint(name), "float32", "cpu", 4, PAGE, True, 1)
    assert engine.no_kv_windows == "layers of this model attend to a window of their own"
