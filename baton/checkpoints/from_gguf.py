"""A GGUF file of llama's architecture as a checkpoint in Hugging Face's layout, in bfloat16.

The same file gives the same bytes on every machine: its nodes derive page keys from them.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.checkpoints import gguf_tokenizer
from baton.errors import UnsupportedModel

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, out: Path, sampling: Mapping[str, Any]) -> None:
    """Write the checkpoint of `source` into the new directory `out`. `sampling` is what its authors recommend.

    Raises UnsupportedModel for another architecture, tokenizer or tensor than those known here.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    if (architecture := fields["general.architecture"]) != "llama":
        raise UnsupportedModel(f"{source.name} is of the architecture {architecture!r}; only llama is converted")
    out.mkdir()
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(out / "config.json", config)
    _write(out / "generation_config.json", {**ends, **sampling})
    gguf_tokenizer.write(fields, out)
    _save(dict(_weights(reader, config)), out / "model.safetensors")


def _config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # As float32: the shortest number that means it, 1e-05 and not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _weights(reader: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield the tensors by their names in Hugging Face's layout, as bfloat16."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _WHOLE:
            yield _WHOLE[tensor.name], bfloat16(weight)
            continue
        layer, part = _place(tensor.name)
        if part in heads:
            weight = _halves(weight, heads[part])
        yield f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight", bfloat16(weight)


def _place(name: str) -> tuple[int, str]:
    """Return the layer and the part that a tensor's name says. Raises UnsupportedModel."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _OF_A_LAYER and layer.isdecimal():
            return int(layer), part
        case _:
            raise UnsupportedModel(f"the tensor {name} has no place in a Llama checkpoint")


def _halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of rotated rows: pairs lie side by side there, and half a head apart here."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def bfloat16(weight: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even. NumPy has no such type, so its bits stand in uint16."""
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _save(weights: Mapping[str, NDArray[np.uint16]], file: Path) -> None:
    """Write safetensors: the length of the header, the header, the tensors. The library has no bfloat16 for NumPy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        begin, end = end, end + weight.nbytes
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for weight in weights.values():
            out.write(weight.tobytes())


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
