"""Steps of every family at real shapes, under fake tensors: what they launch, copy, and never wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from engine.device import uploads
from engine.engine import Engine, layout_of, linear_maker
from engine.models import mlp
from engine.models.config import parse_spec
from engine.models.weights import assembled
from engine.step.batch import Chunk, ComputedMask, PromptScoring, TokenDraw
from engine.step.block_table import BlockTable
from tests.cuda.fake_gpu import FakeGpu, HostWaits

pytestmark = pytest.mark.slow

PAGE, PAGES, ROWS, CONTEXT, CHUNK = 16, 4_096, 32, 2_000, 2_048

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 32_768}


def shape(
    family: str, architecture: str, vocab: int, hidden: int, inner: int, heads: int, kv: int, **more: Any
) -> Mapping[str, Any]:
    """A model's config.json, as far as the engine reads it."""
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    named = {"model_type": family, "architectures": [architecture], "num_key_value_heads": kv}
    return {**_COMMON, **sizes, **named, "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more}


# Qwen3 30B has 128 experts. As many tensors take 30 seconds to make, and no more kernels.
MOE = {"moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": True}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 1_024}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": shape("llama", "LlamaForCausalLM", 128_256, 4_096, 14_336, 32, 8),
    "mistral": shape("mistral", "MistralForCausalLM", 32_768, 4_096, 14_336, 32, 8, sliding_window=None),
    "qwen2": shape("qwen2", "Qwen2ForCausalLM", 152_064, 3_584, 18_944, 28, 4),
    "qwen3": shape("qwen3", "Qwen3ForCausalLM", 151_936, 4_096, 12_288, 32, 8, head_dim=128),
    "phi3": shape("phi3", "Phi3ForCausalLM", 32_064, 3_072, 8_192, 32, 32),
    "gemma3": shape("gemma3_text", "Gemma3ForCausalLM", 262_208, 3_840, 15_360, 16, 8, head_dim=256, **GEMMA),
    "mixtral": shape("mixtral", "MixtralForCausalLM", 32_000, 4_096, 14_336, 32, 8, num_local_experts=8,
                     num_experts_per_tok=2),
    "qwen3_moe": shape("qwen3_moe", "Qwen3MoeForCausalLM", 151_936, 2_048, 6_144, 32, 4, head_dim=128, **MOE),
}  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu(values=False) as gpu:
        yield gpu


def engine(family: str, layers: int) -> Engine:
    """A model of so many layers, without numbers in its weights."""
    config = {**SHAPES[family], "num_hidden_layers": layers}
    if family == "gemma3":
        config["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    spec = parse_spec(config)
    layout, device = layout_of(spec, "bfloat16", PAGE), torch.device("cuda:0")

    def take(_name: str, size: Sequence[int], _kinds: object) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=torch.bfloat16, device=device)

    weights = assembled(spec, torch.bfloat16, device, True, linear_maker("cuda:0", spec), take)
    pool = torch.empty((PAGES, *layout.shape), dtype=torch.bfloat16, device=device)
    return Engine(spec, weights, b"a" * 16, layout, pool, 1)


def decode(draw: TokenDraw) -> list[Chunk]:
    width = -(-CONTEXT // PAGE) + 1
    return [Chunk([1], CONTEXT, [(row * width + page) % PAGES for page in range(width)], draw) for row in range(ROWS)]


def prefill() -> list[Chunk]:
    return [Chunk([1] * CHUNK, CHUNK, list(range(2 * CHUNK // PAGE)))]


def count(gpu: FakeGpu, model: Engine, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Launch a step, and count its kernels and its copies to the device."""
    gpu.kernels.clear()
    gpu.uploads = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.launch(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return gpu.kernels.total(), gpu.uploads


GREEDY = TokenDraw(temperature=0.0)
BUDGET: Mapping[str, tuple[int, int, int]] = {
    "llama": (31, 30, 35),
    "mistral": (31, 30, 35),
    "qwen2": (31, 30, 35),
    "qwen3": (33, 32, 35),
    "phi3": (31, 30, 35),
    "gemma3": (45, 44, 50),
    "mixtral": (48, 47, 35),
    "qwen3_moe": (50, 49, 35),
}
"""Kernels at most: of a layer where each row decodes, of one in a chunk of a prompt, and of a step that decodes besides
its layers. Lower a number whenever fewer are needed."""
UPLOADS = 14, 9  # copies to the device in a step that decodes, and in a chunk

ALLOWED = np.arange(128_256) % 2 == 0
DRAWS: Mapping[str, tuple[TokenDraw, int]] = {
    "temperature": (TokenDraw(temperature=1.0, seed=3), 24),
    "filters": (TokenDraw(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, logprobs=5), 125),
    "mask": (TokenDraw(temperature=0.0, mask=ComputedMask(ALLOWED)), 10),
}
"""Draws, and how many kernels more than greedy ones they take."""


def check(gpu: FakeGpu, family: str) -> None:
    """Raises if a step waits for the device, or takes too many kernels or copies."""
    layers = (4, 6) if family == "gemma3" else (2, 3)  # of as many kinds of attention
    small, large = (engine(family, number) for number in layers)
    for place, chunks in enumerate((decode(GREEDY), prefill())):
        few, many = count(gpu, small, chunks), count(gpu, large, chunks)
        layer = (many[0] - few[0]) / (layers[1] - layers[0])
        assert layer <= BUDGET[family][place], f"{layer} kernels a layer: {gpu.kernels}"
        assert few[0] - layers[0] * layer <= (BUDGET[family][2], 4)[place], gpu.kernels
        assert few[1] == many[1], "a layer copies to the device"
        assert few[1] <= UPLOADS[place]


@pytest.mark.parametrize("family", SHAPES)
def test_a_step_waits_for_nothing_and_keeps_its_budget(family: str, gpu: FakeGpu) -> None:
    check(gpu, family)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_wait_for_nothing_and_keep_their_budget(name: str, gpu: FakeGpu) -> None:
    draw, budget = DRAWS[name]
    model = engine("llama", 2)
    plain, _ = count(gpu, model, decode(GREEDY))
    kernels, uploads = count(gpu, model, decode(draw))
    assert kernels - plain <= budget, gpu.kernels
    assert uploads <= UPLOADS[0]


def test_a_step_ahead_and_scores_wait_for_nothing(gpu: FakeGpu) -> None:
    model, table, draw = engine("llama", 2), BlockTable(range(8)), TokenDraw(temperature=1.0, seed=3)
    _, plain = count(gpu, model, [Chunk([5], 40, list(range(8)), draw)])
    count(gpu, model, [Chunk([5] * 40, 0, table, draw)])
    _, ahead = count(gpu, model, [Chunk([0], 40, table, draw, follows=0)])
    assert ahead == plain + 1, "the rows that the device itself has the tokens of"
    count(gpu, model, [Chunk([5] * 300, 0, list(range(32)), scoring=PromptScoring(0, [5] * 200, 5))])


def _name(mistake: Any) -> str:
    return mistake.__name__[1:]


def _item(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


def _flag(x: torch.Tensor) -> torch.Tensor:
    return x if (x > 0).any() else -x


def _host_and_back(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(x.device)


def _chosen(x: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, torch.nonzero(x[:, 0])[:, 0], x)


def _masked(x: torch.Tensor) -> torch.Tensor:
    return x.index_put((x > 0,), x[x > 0])


def _host_index(x: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(len(x))]


def _pageable(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(x.shape[-1]).to(x.device, x.dtype, non_blocking=True)


def _constant(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0], device=x.device)


@pytest.mark.parametrize(
    "mistake", [_item, _flag, _host_and_back, _chosen, _masked, _host_index, _pageable, _constant], ids=_name
)
def test_it_notices_a_wait_in_a_layer(mistake: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlp.dense
    monkeypatch.setattr(mlp, "dense", lambda w, activation, x: right(w, activation, mistake(x)))
    with pytest.raises((HostWaits, DynamicOutputShapeException)):
        count(gpu, engine("llama", 2), decode(GREEDY))


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _an_upload(x: torch.Tensor) -> torch.Tensor:
    return x * uploads.upload(np.ones(1, np.float32), x.device)


@pytest.mark.parametrize("mistake", [_one_more, _an_upload], ids=_name)
def test_it_notices_more_kernels_and_copies(mistake: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlp.dense
    monkeypatch.setattr(mlp, "dense", lambda w, activation, x: right(w, activation, mistake(x).to(x.dtype)))
    with pytest.raises(AssertionError, match="a layer"):
        check(gpu, "llama")


def test_it_notices_a_tensor_of_another_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.transformer.upload", lambda array, _: torch.from_numpy(array))
    model = engine("llama", 2)
    with pytest.raises(HostWaits, match="a tensor of the host"):
        count(gpu, model, prefill())
