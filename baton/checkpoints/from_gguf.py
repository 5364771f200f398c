"""A GGUF file in Hugging Face's layout: with its numbers in bfloat16, or as it is.

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
from baton.errors import CorruptWeights, UnsupportedModel

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
HEAD, FREQUENCIES = "lm_head", "rope_freqs.weight"
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
_OF_AN_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "qwen2": {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    "qwen3": {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
}
"""Further tensors of a layer."""
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

CODES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Types of tensors whose codes the engine reads as they are. Those of other types are made dense when they are read."""
FILE = "model.gguf"
"""What a checkpoint has in the place of safetensors, if its numbers are in a GGUF file."""


def convert(source: Path, out: Path, sampling: Mapping[str, Any]) -> None:
    """Write the checkpoint of `source` into the new directory `out`. `sampling` is what its authors recommend.

    Raises UnsupportedModel for another architecture, tokenizer or tensor than those known here.
    """
    reader, config = _opened(source)
    _write_all(reader, config, sampling, out)
    _save(dict(_weights(reader)), out / "model.safetensors")


def link(source: Path, out: Path) -> None:
    """Write what describes `source` into the new directory `out`, and a link to the file. Raises as `convert`."""
    reader, config = _opened(source)
    types = {
        hf_name(tensor.name, config["model_type"]): tensor.tensor_type.name
        for tensor in reader.tensors
        if tensor.name != FREQUENCIES
    }
    codes = {name.removesuffix(".weight"): kind for name, kind in types.items() if kind in CODES}
    embedding = _WHOLE["token_embd.weight"].removesuffix(".weight")
    if (kind := codes.pop(embedding, None)) is not None and config["tie_word_embeddings"]:
        # The embedding is made dense, and as the head it stays as it is.
        codes[HEAD] = kind
        config["tie_word_embeddings"] = False
    if codes:
        config["quantization_config"] = {"quant_method": "gguf", "types": codes}
    _write_all(reader, config, {}, out)
    (out / FILE).symlink_to(source.resolve())


def hf_name(name: str, architecture: str) -> str:
    """Return a tensor's name in Hugging Face's layout. Raises UnsupportedModel."""
    if name in _WHOLE:
        return _WHOLE[name]
    more = _OF_AN_ARCHITECTURE[architecture]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _OF_A_LAYER and layer.isdecimal():
            return f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight"
        case ["blk", layer, *rest] if (part := ".".join(rest)) in more and layer.isdecimal():
            return f"model.layers.{layer}.{more[part]}"
        case _:
            raise UnsupportedModel(f"the tensor {name} has no place in a checkpoint of the architecture {architecture}")


def heads_of(name: str, fields: Mapping[str, Any]) -> int | None:
    """Return how many heads' rows a tensor has in llama.cpp's order; None if its rows are in ours, as all are but
    those of the architecture "llama"."""
    if fields["general.architecture"] != "llama":
        return None
    heads = fields["llama.attention.head_count"]
    count = {"attn_q": heads, "attn_k": fields.get("llama.attention.head_count_kv", heads)}
    return next((number for part, number in count.items() if f".{part}." in name), None)


def read(source: Path) -> tuple[Any, Mapping[str, Any]]:
    """Return gguf's reader of a file, and the file's fields. Raises CorruptWeights."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CorruptWeights(f"{source} can't be read as GGUF: {error}; fetch it again") from error


def _opened(source: Path) -> tuple[Any, dict[str, Any]]:
    reader, fields = read(source)
    if (architecture := fields.get("general.architecture")) not in _CLASSES:
        raise UnsupportedModel(f"{source.name} is of the architecture {architecture!r}; known: {', '.join(_CLASSES)}")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    factors = [tensor.data for tensor in reader.tensors if tensor.name == FREQUENCIES]
    if factors:
        # Llama 3.1 stretches its waves. llama.cpp has computed by how much, for each of them.
        numbers = [float(factor) for factor in factors[0]]
        scaling = {"rope_type": "longrope", "long_factor": numbers, "short_factor": numbers, "attention_factor": 1.0}
        config["rope_scaling"] = scaling
    return reader, config


def _write_all(reader: Any, config: Mapping[str, Any], sampling: Mapping[str, Any], out: Path) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir()
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    _write(out / "config.json", config)
    _write(out / "generation_config.json", {**ends, **sampling})
    gguf_tokenizer.write(fields, out)


def _config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    architecture = fields["general.architecture"]
    own = {name.removeprefix(f"{architecture}."): value for name, value in fields.items()}
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    if (scaling := own.get("rope.scaling.type", "none")) != "none":
        raise UnsupportedModel(f"rotary embedding scaled as {scaling!r} is not read from GGUF")
    config = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", hidden // heads),
        "max_position_embeddings": own["context_length"],
        # As float32: the shortest number that means it, 1e-05 and not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(own.get("rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return config | {
        name: fields[field] for name, kind in ids.items() if (field := f"tokenizer.ggml.{kind}_token_id") in fields
    }


def _weights(reader: Any) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield the tensors by their names in Hugging Face's layout, as bfloat16."""
    from gguf.quants import dequantize

    fields = {name: field.contents() for name, field in reader.fields.items()}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if (heads := heads_of(tensor.name, fields)) is not None:
            weight = halves(weight, heads)
        yield hf_name(tensor.name, fields["general.architecture"]), bfloat16(weight)


def halves(weight: NDArray[Any], heads: int) -> NDArray[Any]:
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
