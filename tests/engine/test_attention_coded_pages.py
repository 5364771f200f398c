"""Pages of int8 and FP8: what they hold, and what is read from them, by native kernels and by torch."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine, layout_of
from engine.models.config import load_spec
from engine.step.batch import Chunk, TokenDraw
from kvstore.layout import FP8, INT8, PageLayout
from tests.engine.driver import prompt_of
from tests.support.checkpoints import VOCAB
from tests.support.coded_pages import KINDS, parts, quantised

TOKENS = 300  # of a prompt: queries of many kinds, and pages that are read in another step than they were written in

coded = pytest.mark.parametrize("held", [INT8, FP8])


@pytest.fixture
def engine(checkpoint: Callable[[str], Path]) -> Callable[..., Engine]:
    def loaded(
        name: str | Path, held: str, *, native: bool = True, dtype: str = "float32", page_size: int = 16
    ) -> Engine:
        path = name if isinstance(name, Path) else checkpoint(name)
        return Engine.load(path, dtype, "cpu", 2 * 320 // page_size, page_size, True, 1, native, held)

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


@coded
@pytest.mark.parametrize("native", [True, False])
def test_a_row_is_quantised_by_its_own_largest_number(
    native: bool, held: str, checkpoint: Callable[[str], Path], tmp_path: Path, engine: Callable[..., Engine]
) -> None:
    """Of the first layer, whose input no page has touched. V has numbers that lie between two codes of FP8."""
    model = shutil.copytree(checkpoint("llama-bias"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    middles, few = (8.5 + torch.arange(8)) / 8, (0.5 + torch.arange(8)) * 2**-9
    row = torch.cat([torch.tensor([448.0]), middles * 16, middles * 2**-6, few, few[:7]])
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    tensors["model.layers.0.self_attn.v_proj.bias"] = torch.cat([row, -row])
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    exact, ours = (engine(model, one, native=native) for one in ("auto", held))
    for one in (exact, ours):
        one.step([Chunk(prompt_of(60), 0, range(4))])
    codes, scales = parts(ours.pool[:3, :, :1], ours.layout)
    right_codes, right_scales = quantised(exact.pool[:3, :, :1], held)
    assert torch.equal(scales, right_scales)
    assert torch.equal(codes.view(torch.int8), right_codes.view(torch.int8))
    assert codes.float().abs().amax(-1).eq(KINDS[held][1]).all()


@coded
def test_every_code_is_read(held: str, engine: Callable[..., Engine]) -> None:
    """A token attends to pages that hold all of them, scaled to be of one size. Of FP8, token i has the exponent i."""
    ours, twin = (engine("llama", held, native=native) for native in (True, False))
    codes, scales = parts(twin.pool, twin.layout)
    torch.manual_seed(0)  # of 300 seeds one rounds the new token's K or V to another code
    if held == INT8:
        codes.random_(-127, 128)
        scales.fill_(1 / 64)
    else:
        exponents = torch.arange(16).expand_as(scales)
        small = torch.randint(7, codes.shape) + torch.randint(2, codes.shape) * 128  # mantissa and sign
        codes = (small + exponents[..., None] * 8).to(torch.uint8)
        scales = 2.0 ** (7 - exponents.clamp(1))
    rows = [part.contiguous().view(torch.int8).flatten(3) for part in (codes, scales)]
    twin.pool.copy_(torch.cat(rows, -1))
    ours.pool.copy_(twin.pool)
    draw = TokenDraw(temperature=0, logprobs=VOCAB)
    both = [one.step([Chunk([7], TOKENS, range(one.num_pages), draw)])[0] for one in (ours, twin)]
    native, right = (dict(sampled.top) for sampled in both if sampled is not None)
    assert all(abs(native[token] - right[token]) < 1e-3 for token in right)


@coded
@pytest.mark.parametrize("page_size", [1, 16, 320])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "phi3"])
def test_kernels_read_what_torch_reads(name: str, page_size: int, held: str, engine: Callable[..., Engine]) -> None:
    ours, twin = (engine(name, held, native=native, page_size=page_size) for native in (True, False))
    right = scores(twin, 100)
    # A code next to a border may become either one where the last bits of a sum differ.
    assert torch.allclose(scores(ours, 100), right, atol=0.02)
    assert torch.equal(scores(ours, 100), scores(ours, 170))
    exact = scores(engine(name, "auto", page_size=page_size), 100)
    assert not torch.allclose(exact, right, atol=0.2)


@coded
def test_pages_take_little_more_than_half(
    held: str, checkpoint: Callable[[str], Path], engine: Callable[..., Engine]
) -> None:
    assert PageLayout(2, 4, 64, 16, held).page_bytes <= 0.54 * PageLayout(2, 4, 64, 16, "bfloat16").page_bytes
    ours, plain = (engine("llama", one, dtype="bfloat16") for one in (held, "auto"))
    assert ours.layout == layout_of(load_spec(checkpoint("llama")), "bfloat16", 16, held)
    assert ours.pages.view(0).shape == (ours.layout.page_bytes,)
    assert ours.fingerprint not in (plain.fingerprint, engine("llama", held).fingerprint)
