"""Pages of int8: what they hold, and what is read from them, by native kernels and by torch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.engine import Engine, layout_of
from engine.models.config import load_spec
from engine.step.batch import Chunk, TokenDraw
from kvstore.layout import PageLayout
from tests.engine.driver import prompt_of
from tests.support.checkpoints import VOCAB
from tests.support.int8_pages import parts, quantised

TOKENS = 300  # of a prompt: queries of many kinds, and pages that are read in another step than they were written in


@pytest.fixture
def engine(checkpoint: Callable[[str], Path]) -> Callable[..., Engine]:
    def loaded(name: str, held: str, *, native: bool = True, dtype: str = "float32", page_size: int = 16) -> Engine:
        return Engine.load(checkpoint(name), dtype, "cpu", 2 * 320 // page_size, page_size, True, 1, native, held)

    return loaded


def scores(engine: Engine, cut: int) -> torch.Tensor:
    """Log-probabilities after a prompt that is computed in two steps, and after one more token: [2, vocabulary]."""
    prompt, draw, pages = prompt_of(TOKENS), TokenDraw(temperature=0, logprobs=VOCAB), range(engine.num_pages)
    engine.step([Chunk(prompt[:cut], 0, pages)])
    rows: list[torch.Tensor] = []
    for chunk in (Chunk(prompt[cut:], cut, pages, draw), Chunk([7], TOKENS, pages, draw)):
        (sampled,) = engine.step([chunk])
        assert sampled is not None
        by_token = dict(sampled.top)
        rows.append(torch.tensor([by_token[token] for token in range(VOCAB)]))
    return torch.stack(rows)


@pytest.mark.parametrize("native", [True, False])
def test_a_row_is_quantised_by_its_own_largest_number(native: bool, engine: Callable[..., Engine]) -> None:
    """Of the first layer, whose input no page has touched."""
    exact, ours = (engine("qwen3", held, native=native) for held in ("auto", "int8"))
    for one in (exact, ours):
        one.step([Chunk(prompt_of(60), 0, range(4))])
    codes, scales = parts(ours.pool[:3, :, :1], ours.layout)
    right_codes, right_scales = quantised(exact.pool[:3, :, :1])
    assert torch.equal(scales, right_scales)
    assert torch.equal(codes, right_codes)
    assert codes.abs().amax(-1).eq(127).all()


@pytest.mark.parametrize("page_size", [1, 16, 320])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "phi3"])
def test_kernels_read_what_torch_reads(name: str, page_size: int, engine: Callable[..., Engine]) -> None:
    ours, twin = (engine(name, "int8", native=native, page_size=page_size) for native in (True, False))
    right = scores(twin, 100)
    # A code next to a border may become either one where the last bits of a sum differ.
    assert torch.allclose(scores(ours, 100), right, atol=0.02)
    assert torch.equal(scores(ours, 100), scores(ours, 170))
    exact = scores(engine(name, "auto", page_size=page_size), 100)
    assert not torch.allclose(exact, right, atol=0.2)


def test_pages_take_little_more_than_half(checkpoint: Callable[[str], Path], engine: Callable[..., Engine]) -> None:
    assert PageLayout(2, 4, 64, 16, "int8").page_bytes <= 0.54 * PageLayout(2, 4, 64, 16, "bfloat16").page_bytes
    ours, plain = (engine("llama", held, dtype="bfloat16") for held in ("int8", "auto"))
    assert ours.layout == layout_of(load_spec(checkpoint("llama")), "bfloat16", 16, "int8")
    assert ours.pages.view(0).shape == (ours.layout.page_bytes,)
    assert ours.fingerprint not in (plain.fingerprint, engine("llama", "int8").fingerprint)
