"""The tokenizer and chat template in a GGUF file, as the files that a checkpoint has."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.checkpoints.gguf_fields import Fields
from baton.errors import CorruptWeights, UnsupportedModel

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,%d}}" + _ENDS % ""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_RULES = {
    "llama-bpe": _WORDS % 3,
    "dbrx": _WORDS % 3,
    "qwen2": _WORDS % 1,
    "tekken": rf"{_BY_CASE}|\p{{N}}" + _ENDS % "/",
    "gpt-4o": rf"{_BY_CASE}{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _ENDS % "/",
}
"""Where words end, by the names that llama.cpp has for these rules: those of Llama 3, Phi-4, Qwen, Mistral Nemo and
Phi-4-mini. In the last two a word also ends where a small letter is followed by a capital."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Rules under which a word that is a token is that token, whatever the merges. Their texts begin with a token, too."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF's types of special tokens, and of others found before words are
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE, _END_OF_TEXT = "▁", "<|endoftext|>"


def write(fields: Fields, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises UnsupportedModel, CorruptWeights."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        name: tokens[number] for name, kind in _SPECIAL.items() if (number := fields.token(kind)) is not None
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields.number("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    read_tokenizer(fields).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if template := fields.get("tokenizer.chat_template"):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def read_tokenizer(fields: Fields) -> Tokenizer:
    """Return the tokenizer. Raises UnsupportedModel for a kind that is not known, CorruptWeights."""
    kind, rule = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    if len(types) != len(tokens):
        raise CorruptWeights(f"{fields.source} has {len(tokens)} tokens and types of {len(types)}; fetch it again")
    match kind:
        case "llama":
            tokenizer = _of_pieces(fields)
        case "gpt2" if rule == "smollm" or rule in _RULES:
            tokenizer = _of_bytes(fields, rule)
        case _:
            known = ", ".join(("smollm", *_RULES))
            raise UnsupportedModel(f"the tokenizer is of the kind {kind, rule}; known: llama, and gpt2 with {known}")
    bos = fields.token("bos")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule in _WHOLE_WORDS):
        tokenizer.post_processor = processors.TemplateProcessing(f"{tokens[bos]} $A", None, [(tokens[bos], bos)])
    # Phi-3 takes what is white behind most of its special tokens for a part of them, and no field says so.
    white = kind == "llama" and fields.architecture == "phi3"
    plain = {tokens[number] for one in ("bos", "unknown") if (number := fields.token(one)) is not None} | {_END_OF_TEXT}
    tokenizer.add_tokens(
        [
            AddedToken(token, rstrip=white and token not in plain, normalized=False, special=type_ != _USER_DEFINED)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokenizer.token_to_id(token) is not None
        ]
    )
    return tokenizer


def _of_bytes(fields: Fields, rule: str) -> Tokenizer:
    """Return byte-level BPE.

    llama.cpp's "smollm" is SmolLM2's own rule: each digit is a word, and then GPT-2's words are found between them.
    Qwen's texts are normalized first, as transformers does.
    """
    pairs = (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"])
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(_bpe(fields, fields["tokenizer.ggml.tokens"], merges, ignore_merges=rule in _WHOLE_WORDS))
    smollm = rule == "smollm"
    words = pre_tokenizers.Digits(True) if smollm else pre_tokenizers.Split(Regex(_RULES[rule]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=smollm)]
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(fields: Fields) -> Tokenizer:
    """Return SentencePiece's BPE as transformers converts it: merges are the pieces that are two others, the best
    first. Gemma's scores do not say which is best, but the order of its pieces does, and its spaces are no pieces
    for the file, but spaces."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    gemma, phi = fields.architecture == "gemma3", fields.architecture == "phi3"
    scores: list[float] = fields["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise CorruptWeights(f"{fields.source} has {len(tokens)} tokens and scores of {len(scores)}; fetch it again")
    if gemma:
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-float(number) for number in range(len(tokens))]
    number = fields.token("unknown")
    unknown = None if number is None else tokens[number]
    merges = _merges(tokens, scores)
    tokenizer = Tokenizer(_bpe(fields, tokens, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    begins = fields.get("tokenizer.ggml.add_space_prefix", not gemma)
    if phi and begins:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if begins else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    stripped = [decoders.Strip(" ", 1, 0)] if begins else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    vocabulary = set(tokens)
    pairs = [
        (-score, -at, at - len(token), token[:at], token[at:])
        for token, score in zip(tokens, scores, strict=True)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    pairs.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in pairs]


def _bpe(fields: Fields, tokens: list[str], merges: list[tuple[str, str]], **settings: Any) -> models.BPE:
    try:
        return models.BPE({token: number for number, token in enumerate(tokens)}, merges, **settings)
    except Exception as error:  # the library has no type of its own
        raise CorruptWeights(f"{fields.source}: its tokenizer can't be made: {error}; fetch it again") from error
