"""A Llama's checkpoint as a GGUF file, for our engine and llama.cpp alike.

Q4_K is made here, since the package `gguf` only reads it: the scale and minimum of each group of 32 span its numbers.
Matrices of other kinds are the package's own. The embedding, which is the head too, is in Q8_0.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file

from baton.checkpoints.from_gguf import heads_of, hf_name
from engine.models.config import load_spec

_EMBEDDING, _PARTS = "token_embd", ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write(checkpoint: Path, kind: str, file: Path) -> None:
    """Write the file with matrices in `kind`. The checkpoint has one file of weights, and a tied embedding."""
    spec, tensors = load_spec(checkpoint), load_file(checkpoint / "model.safetensors")
    raw = json.loads((checkpoint / "config.json").read_text())
    bpe = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    making = file.with_suffix(".part")
    out = gguf.GGUFWriter(making, "llama")
    out.add_context_length(spec.max_positions)
    out.add_embedding_length(spec.hidden_size)
    out.add_block_count(spec.num_layers)
    out.add_feed_forward_length(spec.intermediate_size)
    out.add_head_count(spec.num_heads)
    out.add_head_count_kv(spec.num_kv_heads)
    out.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    out.add_rope_freq_base(raw["rope_theta"])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("llama-bpe")
    out.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].__getitem__))
    out.add_token_types([3, 3] + [1] * (spec.vocab_size - 2))  # two special ones
    out.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    out.add_bos_token_id(raw["bos_token_id"])
    out.add_eos_token_id(raw["eos_token_id"])
    fields = {"general.architecture": "llama", "llama.attention.head_count": spec.num_heads}
    fields |= {"llama.attention.head_count_kv": spec.num_kv_heads}
    layers = [f"blk.{layer}." for layer in range(spec.num_layers)]
    for name in ["output_norm", *(layer + part for layer in layers for part in ("attn_norm", "ffn_norm"))]:
        out.add_tensor(f"{name}.weight", tensors[hf_name(f"{name}.weight", "llama")].float().numpy())
    for name in [_EMBEDDING, *(layer + part for layer in layers for part in _PARTS)]:
        weight = tensors[hf_name(f"{name}.weight", "llama")].float().numpy()
        if (heads := heads_of(f"{name}.weight", fields)) is not None:  # in llama.cpp's order of rotated rows
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        of = "Q8_0" if name == _EMBEDDING else kind
        data = q4_k(weight) if of == "Q4_K" else quantize(weight, Kind[of])
        out.add_tensor(f"{name}.weight", data, raw_dtype=Kind[of])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    making.rename(file)


def q4_k(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the blocks of a matrix whose inputs are a multiple of 256: bytes, [out, in / 256 · 144]."""
    groups = weight.reshape(len(weight), -1, 8, 32)
    least = np.minimum(groups.min(3), 0)
    scale, scales = _parts((groups.max(3) - least) / 15)
    minimum, minimums = _parts(-least)
    step, offset = (whole.astype(np.float32) * parts for whole, parts in ((scale, scales), (minimum, minimums)))
    steps = np.divide(groups + offset[..., None], step[..., None], where=step[..., None] > 0, out=np.zeros_like(groups))
    codes = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
    low, middle = (parts[..., :4] | parts[..., 4:] >> 4 << 6 for parts in (scales, minimums))
    mixed = scales[..., 4:] & 15 | (minimums[..., 4:] & 15) << 4
    nibbles = (codes[..., ::2, :] | codes[..., 1::2, :] << 4).reshape(*codes.shape[:2], 128)
    wholes = [whole.view(np.uint8) for whole in (scale, minimum)]
    return np.concatenate([*wholes, low, middle, mixed, nibbles], 2).astype(np.uint8).reshape(len(weight), -1)


def _parts(numbers: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Write the numbers of a block's 8 groups as parts, 0 to 63, of one float16."""
    whole = (numbers.max(2, keepdims=True) / 63).astype(np.float16)
    divisor = np.where(whole > 0, whole, 1).astype(np.float32)
    return whole, np.clip(np.rint(numbers / divisor), 0, 63).astype(np.uint8)
