"""Train the tokenizer on the world's own text: byte-level BPE, most words one token, each digit one token.

Any text goes in and comes out: a word that the world doesn't have becomes several tokens, down to bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import vocabulary as words
from tools.demo_model.conversation import BEGIN, END, PAD, TOOL_MARKERS
from tools.demo_model.world import text

SEED = 20_261_124
VOCABULARY = 2_560
_WORDS = Regex(r"'[a-z]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")


def train(vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return the tokenizer, the same one every time. Ids 0 to 2 are the special tokens `PAD`, `BEGIN` and `END`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TOOL_MARKERS),
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in TOOL_MARKERS])
    return tokenizer


def _text() -> Iterator[str]:
    draw = random.Random(SEED)
    for _ in range(3_000):
        yield text(draw, 400).text.replace(BEGIN, "").replace(END, "").replace(PAD, "")
    for _ in range(60):  # so that every name and town is one token, with a space before it and without
        yield "\n".join(f"{word} {word}" for word in (*words.NAMES, *words.TOWNS))
