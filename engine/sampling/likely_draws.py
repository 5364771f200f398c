"""Draws for guesses, of all rows at once: with the noise of the sampler, among the likeliest tokens alone.

A draw that falls on a token less likely than these is another one than the sampler's, so its guess is wrong. In return
only these tokens get noise, and nothing is computed row by row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling import counter_rng
from engine.sampling.filter_edges import filters, min_p_logit, temperature, top_p_mass
from engine.sampling.host_sampler import apply
from engine.step.batch import TokenDraw

_LIKELIEST = 32


def draw_likely(logits: torch.Tensor, draws: Sequence[TokenDraw], keys: counter_rng.Words) -> list[int]:
    """Return a token for each row [rows, vocab]. `keys` are those of the draws, which have no mask."""
    if changed := [(row, draw.edits) for row, draw in enumerate(draws) if draw.edits is not None]:
        logits = logits.to(torch.float32, copy=True)
        for row, edits in changed:
            apply(edits, logits[row])
    if not any(draw.temperature for draw in draws):
        return logits.argmax(-1).tolist()
    vocab = logits.shape[-1]
    best, best_ids = logits.topk(min(_LIKELIEST, vocab))
    ids, scaled = best_ids.numpy(), best.double().numpy()
    scaled = (scaled - scaled[:, :1]) / np.array([[temperature(draw)] for draw in draws])
    if any(filters(draw, vocab) for draw in draws):
        shares = np.exp(scaled)
        before = (shares.cumsum(1) - shares) / shares.sum(1, keepdims=True)
        cut = before >= np.array([[top_p_mass(draw)] for draw in draws])
        cut |= scaled < np.array([[min_p_logit(draw)] for draw in draws])
        cut |= np.arange(ids.shape[1]) >= np.array([[draw.top_k or vocab] for draw in draws])
        scaled[cut] = -np.inf
    states = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(counter_rng.GOLDEN) + keys[:, None]
    noise = counter_rng.gumbel_of(counter_rng.uniform_of(counter_rng.scramble(states, np.empty_like(states))))
    return ids[np.arange(len(ids)), (scaled + noise).argmax(1)].tolist()
