"""From the tensors of a checkpoint to the matrices the model multiplies with.

Owns the names and shapes that a family's checkpoint must have, and what is fused: q, k and v into one product, gate and
up into another. Loads all or nothing: a tensor that is missing, misshapen or not foreseen raises CorruptWeights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.errors import CorruptWeights
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.layers.linear import TILE, Linear, stacked
from engine.models.config import ModelSpec

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KeyValueWeights:
    """What makes a layer's K and V from its input: all that a prefill worker has of the last layer."""

    input_norm: torch.Tensor  # [hidden]
    kv: Linear  # hidden → (2 · kv_heads) · head_dim: keys, then values
    k_norm: torch.Tensor | None  # [head_dim], of Qwen3


@dataclass(frozen=True)
class LayerWeights:
    """One whole layer."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden → (heads + 2 · kv_heads) · head_dim: queries, keys, values
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim], of Qwen3: one row for each head of q, then of k
    output: Linear  # heads · head_dim → hidden
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden → 2 · inner: gate, then up
    down: Linear  # inner → hidden, where inner is the intermediate size rounded up to whole tiles, zeros behind it


@dataclass(frozen=True)
class ModelWeights:
    """`layers` are whole; without a head, the last layer is only `last_kv`, and there are no norm and head."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    last_kv: KeyValueWeights | None
    norm: torch.Tensor | None  # [hidden]
    head: Linear | None  # hidden → vocab


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Weights in memory, with the digest of the checkpoint they came from."""

    weights: ModelWeights
    fingerprint: bytes


def load(path: Path, config: ModelSpec, dtype: torch.dtype, device: torch.device, head: bool) -> LoadedCheckpoint:
    """Read the checkpoint in `path`.

    Without `head`, what a prefill worker never uses is digested but not kept: final norm, output head, and of the last
    layer all but K and V. So the fingerprint is the same for both kinds of worker.
    Raises ModelNotFound or CorruptWeights.
    """
    with TensorFiles(path) as files:
        expected = expected_tensors(config)
        _refuse_unforeseen(files.names, expected, config)

        def read(name: str) -> torch.Tensor:
            # A copy even where nothing changes: the file's mapping must not outlive the loading.
            return files.read(name, expected[name]).to(device=device, dtype=dtype, copy=True)

        weights = _assemble(read, config, head)
        for name in sorted(expected.keys() - files.seen):
            files.read(name, expected[name])
        return LoadedCheckpoint(weights, files.fingerprint(config.canonical))


def outline(config: ModelSpec, dtype: torch.dtype, head: bool) -> ModelWeights:
    """Return weights of the shapes and dtype that `load` would return, without memory of their own (device "meta")."""
    expected = expected_tensors(config)
    return _assemble(lambda name: torch.empty(expected[name], dtype=dtype, device="meta"), config, head)


def expected_tensors(config: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with this config must hold."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config)}
    tensors["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return tensors


def _layer_tensors(config: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    products = [
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for name, out_size, in_size, bias in products:
        yield f"{name}.weight", (out_size, in_size)
        if bias:
            yield f"{name}.bias", (out_size,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def _refuse_unforeseen(names: frozenset[str], expected: dict[str, tuple[int, ...]], config: ModelSpec) -> None:
    """Raise for a tensor that no layer uses (a bias, a scale): this is another model than its config says."""
    unforeseen = {name for name in names - expected.keys() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
        unforeseen.discard("lm_head.weight")  # some releases save the tied copy too
    if unforeseen:
        raise CorruptWeights(f"the checkpoint holds {min(unforeseen)}, which its config has no place for")


def _assemble(read: Callable[[str], torch.Tensor], config: ModelSpec, head: bool) -> ModelWeights:
    embedding = read("model.embed_tokens.weight")
    last = config.num_layers - 1
    layers = [_layer(read, config, f"model.layers.{layer}.") for layer in range(last + head)]
    if not head:
        last_kv = _key_value(read, config, f"model.layers.{last}.")
        return ModelWeights(embedding, tuple(layers), last_kv, None, None)
    output = embedding if config.tied_embeddings else read("lm_head.weight")
    return ModelWeights(embedding, tuple(layers), None, read("model.norm.weight"), Linear(output))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _layer(read: Callable[[str], torch.Tensor], config: ModelSpec, prefix: str) -> LayerWeights:
    def product(names: tuple[str, ...], bias: bool, pad: Callable[[torch.Tensor], torch.Tensor] = _as_it_is) -> Linear:
        return _product(read, tuple(prefix + name for name in names), bias, pad)

    qk_norm = None
    if config.qk_norm:
        q_norm = read(prefix + "self_attn.q_norm.weight").expand(config.num_heads, -1)
        k_norm = read(prefix + "self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
        qk_norm = torch.cat((q_norm, k_norm))
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=product(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        qk_norm=qk_norm,
        output=product(("self_attn.o_proj",), config.output_bias),
        mlp_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=product(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias, lambda part: _whole_tiles(part, 0)),
        down=Linear(
            _whole_tiles(read(prefix + "mlp.down_proj.weight"), 1),
            read(prefix + "mlp.down_proj.bias") if config.mlp_bias else None,
        ),
    )


def _key_value(read: Callable[[str], torch.Tensor], config: ModelSpec, prefix: str) -> KeyValueWeights:
    return KeyValueWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        kv=_product(read, (prefix + "self_attn.k_proj", prefix + "self_attn.v_proj"), config.qkv_bias),
        k_norm=read(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
    )


def _product(
    read: Callable[[str], torch.Tensor],
    names: tuple[str, ...],
    bias: bool,
    pad: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
) -> Linear:
    weights = [pad(read(f"{name}.weight")) for name in names]
    return stacked(weights, [pad(read(f"{name}.bias")) if bias else None for name in names])


def _whole_tiles(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros added along `dim` up to whole tiles, so that no tile holds some of gate and some of up. What goes through
    them is zero, whatever comes in."""
    missing = -tensor.shape[dim] % TILE
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
