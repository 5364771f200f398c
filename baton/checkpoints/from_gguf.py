"""A GGUF file in Hugging Face's layout: with its numbers in bfloat16, or as it is.

The same file gives the same bytes on every machine: its nodes derive page keys from them.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.checkpoints import gguf_tokenizer
from baton.checkpoints.gguf_fields import Fields, config
from baton.errors import CorruptWeights, UnsupportedModel

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
HEAD = "lm_head"
FACTORS = {
    "rope_freqs.weight": "",
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
"""Tensors that go into the config, by the names that they have there. Those without one are for sequences of any
length: how far llama.cpp's converter has stretched each wave of a Llama 3.1."""
_COMMON = {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _COMMON | {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
_QWEN3 = _LLAMA | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = _QWEN3 | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _COMMON | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}


_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_QWEN3_MOE = _QWEN3 | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OF_A_LAYER = {
    "llama": _LLAMA | _MIXTRAL, "qwen2": _LLAMA, "qwen3": _QWEN3, "qwen3moe": _QWEN3_MOE, "gemma3": _GEMMA3,
    "phi3": _PHI3,
}  # fmt: skip
_BIASED = {"qwen2": ("attn_q", "attn_k", "attn_v")}
_ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens that end an answer, too. Many files name but one end, which is that of a text."""

CODES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types of tensors whose codes the engine reads as they are. Those of other types are made dense when they are read."""
FILE = "model.gguf"
"""What a checkpoint has in the place of safetensors, if its numbers are in a GGUF file."""


class Tensor(NamedTuple):
    """A tensor by its name in Hugging Face's layout: a whole one of the file, or one expert's part."""

    name: str
    source: str  # its name in the file
    kind: str
    shape: tuple[int, ...]
    data: NDArray[Any]  # as it is in the file

    @property
    def in_codes(self) -> bool:
        """Whether the engine reads its codes as they are. Routers are dense."""
        return self.kind in CODES and ".ffn_gate_inp." not in self.source

    def numbers(self, fields: Fields) -> NDArray[np.float32]:
        """Return it as published, in float32. Raises UnsupportedModel for a type that the package can't read."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            numbers = dequantize(self.data, GGMLQuantizationType[self.kind])
        except NotImplementedError:
            raise UnsupportedModel(
                f"{fields.source}: {self.source} is {self.kind}, which is not read; quantize it in another form"
            ) from None
        return as_published(self.source, numbers.astype(np.float32), fields)


def tensors(reader: Any, fields: Fields) -> Iterator[Tensor]:
    """Yield the tensors of a file. Raises UnsupportedModel for one that has no place."""
    for tensor in reader.tensors:
        if tensor.name in FACTORS:
            continue
        shape, kind = tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name
        name = hf_name(tensor.name, fields.architecture)
        if "{}" not in name:
            yield Tensor(name, tensor.name, kind, shape, tensor.data)
            continue
        for expert, data in enumerate(tensor.data):
            yield Tensor(name.format(expert), tensor.name, kind, shape[1:], data)


def convert(source: Path, out: Path, sampling: Mapping[str, Any]) -> None:
    """Write the checkpoint of `source` into the new directory `out`. `sampling` is what its authors recommend.

    Raises UnsupportedModel for another architecture, tokenizer or tensor than those known here, CorruptWeights.
    """
    reader, fields = read_gguf(source)
    _write_all(fields, _config(reader, fields), sampling, out)
    _save(dict(_weights(reader, fields)), out / "model.safetensors")


def link(source: Path, out: Path) -> None:
    """Write what describes `source` into the new directory `out`, and a link to the file. Raises as `convert`."""
    reader, fields = read_gguf(source)
    config = _config(reader, fields)
    types = {hf_name(one.source, fields.architecture): one.kind for one in tensors(reader, fields) if one.in_codes}
    codes = {name.removesuffix(".weight"): kind for name, kind in types.items()}
    embedding = _WHOLE["token_embd.weight"].removesuffix(".weight")
    if (kind := codes.pop(embedding, None)) is not None and config["tie_word_embeddings"]:
        # The embedding is made dense, and as the head it stays as it is.
        codes[HEAD] = kind
        config["tie_word_embeddings"] = False
    if codes:
        config["quantization_config"] = {"quant_method": "gguf", "types": codes}
    _write_all(fields, config, {}, out)
    (out / FILE).symlink_to(source.resolve())


def hf_name(name: str, architecture: str) -> str:
    """Return a tensor's name in Hugging Face's layout, "{}" standing for an expert. Raises UnsupportedModel."""
    if name in _WHOLE:
        return _WHOLE[name]
    parts = _OF_A_LAYER[architecture]
    match name.split("."):
        case ["blk", layer, part, "weight" as kind] if part in parts and layer.isdecimal():
            pass
        case ["blk", layer, part, "bias" as kind] if part in _BIASED.get(architecture, ()) and layer.isdecimal():
            pass
        case _:
            raise UnsupportedModel(f"the tensor {name} has no place in a checkpoint of the architecture {architecture}")
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def heads_of(name: str, fields: Mapping[str, Any]) -> int | None:
    """Return how many heads' rows a tensor has in llama.cpp's order; None if its rows are in ours, as all are but
    those of the architecture "llama"."""
    if fields["general.architecture"] != "llama":
        return None
    heads = fields["llama.attention.head_count"]
    count = {"attn_q": heads, "attn_k": fields.get("llama.attention.head_count_kv", heads)}
    return next((number for part, number in count.items() if f".{part}." in name), None)


def has_one_added(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether llama.cpp's converter has added one to a tensor, as Gemma's norms do when they are used."""
    return fields["general.architecture"] == "gemma3" and name.endswith("norm.weight")


def read_gguf(source: Path) -> tuple[Any, Fields]:
    """Return gguf's reader of a file, and the file's fields. Raises CorruptWeights."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """Takes an array at once, not by its elements: a vocabulary has 100,000s. Names the tensor that lies beyond the
        end of a file."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count, at = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if kind == GGUFValueType.STRING:
                parts: list[Any] = []
                memory, order = self.data.data, "little" if self.byte_order == "I" else "big"
                while len(parts) < count and at < len(memory):
                    begin = at + 8
                    at = begin + int.from_bytes(memory[at:begin], order)
                    parts.append(memory[begin:at])
            elif kind in self.gguf_scalar_to_np:
                numbers = self._get(at, self.gguf_scalar_to_np[kind], count)
                parts, at, count = [numbers], at + numbers.nbytes, count - len(numbers) + 1
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            if len(parts) != count or at > len(self.data):
                raise ValueError(f"an array of {kind.name} at byte {orig_offs:,} of {len(self.data):,} is cut off")
            return at - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, kind]

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                _, name, _, shape, kind, begin = field.parts
                inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
                end = start_offs + int(begin[0]) + math.prod(int(length) for length in shape) // inputs * size
                if end > len(self.data):
                    raise ValueError(f"{bytes(name).decode()} ends at byte {end:,} of {len(self.data):,}")
            super()._build_tensors(start_offs, fields)

    try:
        reader = Reader(source)
        return reader, Fields(source, {name: field.contents() for name, field in reader.fields.items()})
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CorruptWeights(f"{source} can't be read as GGUF: {error}; fetch it again") from error


def _config(reader: Any, fields: Fields) -> dict[str, Any]:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = {meant: [float(one) for one in tensors[name].data] for name, meant in FACTORS.items() if name in tensors}
    return config(fields, "output.weight" not in tensors, factors)


def _write_all(fields: Fields, config: Mapping[str, Any], sampling: Mapping[str, Any], out: Path) -> None:
    out.mkdir()
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    stops = [ends.get("eos_token_id"), fields.token("eot")]
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    stops += [tokens.index(end) for end in _ENDS_OF_TURNS if end in tokens]
    if len(stops := list(dict.fromkeys(stop for stop in stops if stop is not None))) > 1:
        ends["eos_token_id"] = stops
    _write(out / "config.json", config)
    _write(out / "generation_config.json", {**ends, **sampling})
    gguf_tokenizer.write(fields, out)


def _weights(reader: Any, fields: Fields) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield the tensors by their names in Hugging Face's layout, as bfloat16."""
    for tensor in tensors(reader, fields):
        yield tensor.name, bfloat16(tensor.numbers(fields))


def as_published(name: str, weight: NDArray[Any], fields: Mapping[str, Any]) -> NDArray[Any]:
    """Undo what llama.cpp's converter does to a tensor."""
    if (heads := heads_of(name, fields)) is not None:
        return halves(weight, heads)
    return weight - 1 if has_one_added(name, fields) else weight


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
