"""Checkpoints of random weights to measure with: what a step costs does not depend on what the weights say."""

from __future__ import annotations

import json
import os
import shutil
import string
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import random_model
from engine.models.config import parse_spec
from engine.models.weights import expected_tensors

SEED = 20_260_201
LLAMA_100M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2_048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
DRAFT_100M = LLAMA_100M | {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA_1B = LLAMA_100M | {
    "hidden_size": 2_048, "intermediate_size": 5_632, "num_hidden_layers": 22, "num_attention_heads": 32,
}  # fmt: skip
_VERSION = 1  # of what is written; a cache of another version is left alone


def directory(name: str) -> Path:
    """`tiny` (1 M parameters, float32), `100m` (100 M, bfloat16), its `100m-draft` (10 M) and `1b` (1,034 M) are made
    once and kept in the user's cache; any other name is a directory already."""
    writer = {
        "tiny": random_model.write,
        "100m": partial(write_shape, config=LLAMA_100M),
        "100m-draft": partial(write_shape, config=DRAFT_100M),
        "1b": partial(write_shape, config=LLAMA_1B),
    }.get(name)
    if writer is None:
        return Path(name)
    cached = cache() / f"{name}-{_VERSION}"
    if not cached.exists():
        cache().mkdir(parents=True, exist_ok=True)
        # Made beside its place and moved there whole: two scripts may start at once, and one may be killed.
        building = Path(tempfile.mkdtemp(dir=cache()))
        try:
            writer(building)
            building.rename(cached)
        except OSError:
            if not cached.exists():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return cached


def cache() -> Path:
    """Return the folder of checkpoints, and of the environments of peers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-bench"


def write_shape(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint with this `config.json` into `folder`, which exists, and return it."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        # Wide enough that greedy output does not end up repeating one token.
        else torch.randn(shape, generator=generator).mul_(0.1).bfloat16()
        for name, shape in expected_tensors(parse_spec(config)).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    _tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with a text for every one of `size` ids, so that detokenizing costs what it costs."""
    vocab = {piece: index for index, piece in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges: list[tuple[str, str]] = []
    for left, right in islice(_pairs(), size - len(vocab)):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs() -> Iterator[tuple[str, str]]:
    """Every merge of a piece with one more letter, shortest pieces first; "Ġ" is the space of byte-level BPE."""
    pieces = ["Ġ", *string.ascii_lowercase]
    while True:
        pairs = [(piece, letter) for piece in pieces for letter in string.ascii_lowercase]
        yield from pairs
        pieces = [left + right for left, right in pairs]
