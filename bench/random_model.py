"""Make a small model, the same bytes every time: Llama's architecture with about a million random weights.

Its text is meaningless, but serving it is real. It has a byte-level BPE tokenizer trained here on text written here,
grouped-query attention, a context of 4,096 tokens. The weights have a wider standard deviation than usual (0.1 instead
of 0.02). Greedy output then does not repeat one token, and the loss of a single KV page changes it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 20_260_131
INITIALIZER_RANGE = 0.1
_BEGIN, _END = "<s>", "</s>"

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 624,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4_096,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

# Parts of sentences: the training text of the tokenizer.
_WHO = (
    "the router|a worker|the store|one request|every page|the scheduler|a client|the cluster|our model|the supervisor|"
    "my neighbour|the old bridge|a quiet river|the morning train|her garden|some music|the long winter|a young engineer"
)
_DOES = (
    "carries|computes|keeps|sends|reads|seals|places|restarts|forgets|streams|counts|measures|follows|returns|"
    "remembers|crosses|explains|changes|brings|leaves|finds|opens|holds|writes"
)
_WHAT = (
    "the prompt|its tokens|a prefix|the cache|an answer|the next step|what it holds|each page|the queue|a heartbeat|"
    "a letter|the whole story|another question|bread and water|the light of the moon|a simple machine|good advice"
)
_HOW = (
    "quickly|once|in order|without waiting|on another node|as it was written|before the deadline|again|at the end|"
    "because nobody else would|under the mountain|with great care|for a thousand years|"
    "between two stations|since yesterday"
)


def write(folder: Path) -> Path:
    """Write the checkpoint into `folder`, creating it if needed, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(text()).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _CONFIG)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write_json(folder / "tokenizer_config.json", {"bos_token": _BEGIN, "eos_token": _END, "add_bos_token": True})
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def text(sentences: int = 3_000) -> list[str]:
    """Return sentences about serving models and other things, the same ones every time."""
    draw = random.Random(SEED)
    columns = [column.split("|") for column in (_WHO, _DOES, _WHAT, _HOW)]
    lines: list[str] = []
    for _ in range(sentences):
        who, does, what, how = (draw.choice(column) for column in columns)
        ending = draw.choice([".", "!", "?", f"; {draw.choice(columns[0])} {draw.choice(columns[1])} it too."])
        lines.append(f"{who.capitalize()} {does} {what} {how}{ending}")
    return lines


def tokenizer(sentences: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which encodes and decodes any text without loss."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_CONFIG["vocab_size"], special_tokens=[_BEGIN, _END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(sentences, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{_BEGIN} $A", special_tokens=[(_BEGIN, 0)])
    return bpe


def weights() -> dict[str, np.ndarray]:
    """Return every tensor by its Hugging Face name."""
    draw = np.random.default_rng(SEED)
    return {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else (draw.standard_normal(shape, np.float32) * np.float32(INITIALIZER_RANGE))
        for name, shape in _shapes()
    }


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    vocab, hidden, inner = _CONFIG["vocab_size"], _CONFIG["hidden_size"], _CONFIG["intermediate_size"]
    queries = _CONFIG["num_attention_heads"] * _CONFIG["head_dim"]
    keys = _CONFIG["num_key_value_heads"] * _CONFIG["head_dim"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(_CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
