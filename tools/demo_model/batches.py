"""Pack conversations into rows of tokens, with a weight for each.

Owns which random numbers a batch is drawn with: the seed, the step and the rank. A run that is resumed draws the same.
"""

from __future__ import annotations

import bisect
import random

import torch
from tokenizers import Tokenizer

from tools.demo_model.conversation import Rendered
from tools.demo_model.world import text


def draw_batch(
    tokenizer: Tokenizer, seed: tuple[int, int, int], rows: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and weights, both [rows, length + 1]. Conversations of up to `length` tokens fill the rows."""
    draw = random.Random(repr(seed))
    tokens = torch.empty(rows, length + 1, dtype=torch.long)
    weights = torch.empty(rows, length + 1, dtype=torch.long)
    for row in range(rows):
        ids: list[int] = []
        kinds: list[int] = []
        while len(ids) <= length:
            # A conversation that fills the row, or shorter ones: facts are asked for at any distance.
            size = length if draw.random() < 0.6 else draw.randint(length // 4, length)
            more_ids, more_kinds = weighed(tokenizer, text(draw, size))
            ids += more_ids
            kinds += more_kinds
        tokens[row] = torch.tensor(ids[: length + 1])
        weights[row] = torch.tensor(kinds[: length + 1])
    return tokens, weights


def weighed(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], list[int]]:
    """Return the text's token ids, and for each its kind, such as `VALUE`."""
    encoded = tokenizer.encode(rendered.text)
    begins, ends = [at for at, _ in encoded.offsets], [end for _, end in encoded.offsets]
    kinds = [0] * len(encoded.ids)
    for begin, end, weight in rendered.parts:
        at = bisect.bisect_right(ends, begin)
        while at < len(kinds) and begins[at] < end:
            kinds[at] = weight
            at += 1
    return list(encoded.ids), kinds
