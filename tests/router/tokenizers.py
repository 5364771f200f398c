"""Small tokenizers of the two kinds that models have, made here: no download, no file."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. It stops at the end of the sentence.",
    "Größe, naïve café, señor, 東京タワー, 안녕하세요, 🙂🙃🚀 and numbers 1234567890.",
    "\n\nUser: hello there\n\nAssistant: hello yourself",
] * 3


@cache
def byte_level(size: int = 400) -> Tokenizer:
    """Like GPT-2's and Llama 3's: any bytes, several tokens for one character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Like Llama 2's: spaces are part of words, and unknown characters are spelt as bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *map(chr, range(33, 127)), "▁the", "▁hello", "▁world", "stop", "▁st", "op"]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
