"""The tokenizer and chat template in a GGUF file, as the files that a checkpoint has."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.errors import UnsupportedModel

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where the words of Llama 3 and Qwen end: their numbers have up to 3 digits, or 1."""
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's types of a special token, and of another that is found before words are
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write(fields: Mapping[str, Any], out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises UnsupportedModel."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in _SPECIAL.items()
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    read(fields).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if template := fields.get("tokenizer.chat_template"):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def read(fields: Mapping[str, Any]) -> Tokenizer:
    """Return the byte-level BPE of the fields. Raises UnsupportedModel for another kind.

    llama.cpp's "smollm" is SmolLM2's own rule: each digit is a word, and then GPT-2's words are found between them.
    "llama-bpe" is Llama 3's: a word that is a token is that token, whatever the merges. "qwen2" is that of Qwen2 and
    Qwen3, whose texts are normalized first, as transformers does.
    """
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind not in (("gpt2", "smollm"), ("gpt2", "llama-bpe"), ("gpt2", "qwen2")):
        raise UnsupportedModel(f"the tokenizer is of the kind {kind}; known: gpt2 with smollm, llama-bpe or qwen2")
    llama, smollm, qwen = (kind[1] == known for known in ("llama-bpe", "smollm", "qwen2"))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama))
    digits = 1 if qwen else 3
    words = pre_tokenizers.Digits(True) if smollm else pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=smollm)]
    )
    if qwen:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", llama):
        tokenizer.post_processor = processors.TemplateProcessing(f"{tokens[bos]} $A", None, [(tokens[bos], bos)])
    kinds = fields["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    return tokenizer
