"""From logits to tokens.

Temperature, then top-k, top-p and min-p. Among the tokens left, Gumbel-max with the noise of
`engine.sampling.counter_rng`. The noise belongs to the token and not to its rank or its share of the sum. So a last-bit
difference between two workers' logits moves a draw only if two candidates were tied to that bit, or one crosses a
filter's edge.

Sorting a whole vocabulary costs more than a small model's step, so filters first look at the likeliest `PREFIX` tokens;
where a filter might reach beyond, they look again at all of them. Both give the same candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.messages import PromptTokenLogprob
from engine.batch import Ints, LogitsEdits, Sampled, TokenDraw, TokenMask
from engine.sampling import counter_rng

PREFIX = 256
_FEW = 4_096  # tokens
COLDEST = 1e-6
"""Temperatures below this one count as this one, which keeps a scaled logit finite."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Ranked:
    """Tokens by falling logit, ties by rising id. Logits are scaled by the temperature and relative to the largest."""

    logits: Floats
    ids: Ints
    whole: bool  # every token of the vocabulary is here
    log_total: float  # log of the sum of exponentials over the whole vocabulary, same scale


def sample(
    logits: torch.Tensor, draws: Sequence[TokenDraw], positions: Sequence[int], best: Sequence[int] | None = None
) -> list[Sampled]:
    """Draw one token from each row of `logits` [rows, vocab]; `positions` are those that the new tokens will have.

    `best` is the likeliest token of each row, of equal logits the lowest id, if that is known already. A row that is
    not finite gives some token of the vocabulary, which `Sampled.finite` tells apart, and touches no other row.
    """
    # The largest of a row is NaN where any of them is. Minus infinity is a mask's, unless it is all that there is.
    largest: list[float] = logits.amax(dim=-1).tolist()
    tokens: list[int] = logits.argmax(dim=-1).tolist() if best is None else list(best)
    raw = logits
    if changed := [(row, draw.edits) for row, draw in enumerate(draws) if draw.edits is not None]:
        logits = logits.float().clone()
        for row, edits in changed:
            apply(edits, logits[row])
            tokens[row] = int(logits[row].argmax())
            if math.isfinite(largest[row]):  # the rules may leave no token, which a mask tells apart
                largest[row] = float(logits[row, tokens[row]]) if draws[row].mask is None else 0.0
    warm = [row for row, draw in enumerate(draws) if draw.temperature > 0 and draw.mask is None]
    if warm:
        picked = _draw_rows(logits[warm], [draws[row] for row in warm], [positions[row] for row in warm])
        for row, token in zip(warm, picked, strict=True):
            tokens[row] = token
    failures: dict[int, str] = {}
    for row, draw in enumerate(draws):
        if draw.mask is not None and math.isfinite(largest[row]):
            drawn = _draw_masked(draw, draw.mask, logits[row], raw[row], tokens[row], positions[row])
            if isinstance(drawn, str):
                failures[row] = drawn
            else:
                tokens[row] = drawn
    sampled = _report(raw, draws, tokens)
    for row, logit in enumerate(largest):
        if not math.isfinite(logit) or row in failures:
            sampled[row] = Sampled(tokens[row], finite=False, failure=failures.get(row, ""))
    return sampled


def score(logits: torch.Tensor, targets: Sequence[int], top: int) -> list[PromptTokenLogprob]:
    """Return the log-probability and rank of one token for each row of `logits` [rows, vocab], and the `top` likeliest
    tokens of that row."""
    logprobs = logits.float().log_softmax(dim=-1)
    ids = torch.tensor(list(targets), device=logits.device)
    chosen = logprobs.gather(1, ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1).tolist()
    best, best_ids = (part.tolist() for part in logprobs.topk(min(top, logits.shape[-1]), dim=-1))
    values = chosen[:, 0].tolist()
    return [
        PromptTokenLogprob(target, values[row], tuple(zip(best_ids[row], best[row], strict=True)), ranks[row] + 1)
        for row, target in enumerate(targets)
    ]


def apply(edits: LogitsEdits, logits: torch.Tensor) -> None:
    """Change one row of logits [vocab], float32, in place."""

    def there(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device)

    if edits.allowed is not None:
        kept = there(edits.allowed)
        values = logits[kept]
        logits.fill_(-math.inf)
        logits[kept] = values
    if edits.forbidden is not None:
        logits[there(edits.forbidden)] = -math.inf
    if edits.bias is not None:
        logits.index_add_(0, *map(there, edits.bias))
    if edits.repeated is not None:
        ids = there(edits.repeated)
        found = logits[ids]
        logits[ids] = torch.where(found > 0, found / edits.repetition, found * edits.repetition)
    if edits.lowered is not None:
        ids, values = map(there, edits.lowered)
        logits.index_add_(0, ids, -values)


def _draw_rows(logits: torch.Tensor, draws: Sequence[TokenDraw], positions: Sequence[int]) -> list[int]:
    """As `sample`, for rows with a temperature."""
    logits, vocab = logits.float(), logits.shape[-1]
    heat = torch.tensor([max(draw.temperature, COLDEST) for draw in draws], dtype=torch.float32)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / heat.to(logits.device)[:, None]
    log_totals: list[float] = scaled.logsumexp(dim=-1).tolist()
    best, best_ids = (part.cpu().numpy() for part in scaled.topk(min(PREFIX, vocab), dim=-1))
    tokens: list[int] = []
    with np.errstate(invalid="ignore"):  # said by rows that are not finite
        for row, (draw, position) in enumerate(zip(draws, positions, strict=True)):
            prefix = _rank(best[row], best_ids[row], len(best[row]) == vocab, log_totals[row])
            kept, ids = _candidates(prefix, scaled[row], draw)
            noisy = kept + counter_rng.gumbel(counter_rng.key(draw.seed, draw.index, position), ids)
            tokens.append(int(ids[np.argmax(noisy)]))
    return tokens


def _draw_masked(
    draw: TokenDraw, mask: TokenMask, logits: torch.Tensor, raw: torch.Tensor, best: int, position: int
) -> int | str:
    """Draw a token that the mask allows from a row of logits [vocab], or return why there is none. `raw` is the row
    without the request's other rules, `best` the likeliest token. Where rules and mask together leave no token, the
    output ends if the grammar accepts that.

    Few tokens are allowed where a grammar is strict, so this gathers them, in NumPy: an operation of torch on a row has
    its threads spin for milliseconds on a CPU.
    """
    if mask.allowed is None:
        return mask.failure or "the mask was not computed"
    if draw.temperature == 0 and mask.allowed[best] and logits[best] > -math.inf:
        return best
    ids = np.flatnonzero(mask.allowed)
    values = _gather(logits, ids)
    if not (possible := values > -np.inf).all():
        values, ids = values[possible], ids[possible]
    if not len(ids):
        if not mask.may_end or not mask.ends:
            return "the grammar and the request's other rules leave no token"
        ids = np.array(sorted(mask.ends), np.int64)
        values = _gather(raw, ids)
    if draw.temperature == 0:
        return int(ids[np.argmax(values)])
    scaled = (values - values.max()) / np.float32(max(draw.temperature, COLDEST))
    kept = scaled.astype(np.float64)
    if _filters(draw):
        kept, ids = _filtered(scaled, ids, draw)
    noisy = kept + counter_rng.gumbel(counter_rng.key(draw.seed, draw.index, position), ids)
    return int(ids[np.argmax(noisy)])


def _gather(row: torch.Tensor, ids: Ints) -> npt.NDArray[np.float32]:
    if row.device.type != "cpu" and len(ids) < _FEW:  # a few are gathered before they are copied
        row, ids = row[torch.from_numpy(ids).to(row.device)], np.arange(len(ids))
    return row.float().cpu().numpy()[ids]


def _filtered(scaled: npt.NDArray[np.float32], ids: Ints, draw: TokenDraw) -> tuple[Floats, Ints]:
    """Those that pass all filters of a row's only tokens."""
    log_total = float(np.log(np.exp(scaled.astype(np.float64)).sum()))
    if len(ids) > PREFIX:
        likeliest = np.argpartition(scaled, -PREFIX)[-PREFIX:]
        ranked = _rank(scaled[likeliest], ids[likeliest], False, log_total)
        if (count := _keep(ranked, draw)) is not None:
            return ranked.logits[:count], ranked.ids[:count]
    ranked = _rank(scaled, ids, True, log_total)
    count = _keep(ranked, draw)
    assert count is not None
    return ranked.logits[:count], ranked.ids[:count]


def _candidates(prefix: _Ranked, scaled: torch.Tensor, draw: TokenDraw) -> tuple[Floats, Ints]:
    """Scaled logits and ids of the tokens that pass all filters; `scaled` [vocab] is what `prefix` is the best of."""
    ranked = prefix
    count = _keep(ranked, draw)
    if count is None:
        everything = scaled.cpu().numpy()
        if not _filters(draw):
            return everything.astype(np.float64), np.arange(len(everything))
        ranked = _rank(everything, np.arange(len(everything)), True, prefix.log_total)
        count = _keep(ranked, draw)
        assert count is not None
    return ranked.logits[:count], ranked.ids[:count]


def _filters(draw: TokenDraw) -> bool:
    return draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0


def _rank(logits: npt.NDArray[np.float32], ids: Ints, whole: bool, log_total: float) -> _Ranked:
    """Sort by one integer made of both keys, an order of magnitude faster than by two.

    The bits of a float32 that is not above zero, read as an integer, rise as the number falls; adding zero makes the
    negative zero, which would stand apart, the plain one.
    """
    half = np.uint64(32)
    keys = ((logits + np.float32(0)).view(np.uint32).astype(np.uint64) << half) | ids.astype(np.uint64)
    keys.sort()
    sorted_logits = (keys >> half).astype(np.uint32).view(np.float32)
    sorted_ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return _Ranked(sorted_logits.astype(np.float64), sorted_ids, whole, log_total)


def _keep(ranked: _Ranked, draw: TokenDraw) -> int | None:
    """How many of the first tokens pass all filters, at least one; None when that can't be told from a prefix."""
    logits, kept = ranked.logits, len(ranked.logits)
    open_end = not ranked.whole  # tokens that are not here may pass too
    edge = logits[-1]  # of a prefix: which of the tokens with this logit are here is chance
    log_total = ranked.log_total

    if draw.top_k > 0 and (open_end or draw.top_k < kept):
        if open_end and (draw.top_k > kept or logits[draw.top_k - 1] <= edge):
            return None
        kept = _count_from(logits, logits[draw.top_k - 1])  # the k-th token's equals pass with it
        log_total = float(np.logaddexp.reduce(logits[:kept]))
        open_end = False
    if draw.top_p < 1:
        cumulated = np.cumsum(np.exp(logits[:kept] - log_total))
        nucleus = int(np.searchsorted(cumulated, draw.top_p)) + 1  # the smallest set that reaches top_p
        if open_end and (nucleus > kept or logits[nucleus - 1] <= edge):
            return None
        kept = min(nucleus, kept)
        open_end = False
    if draw.min_p > 0:
        limit = logits[0] + math.log(draw.min_p)
        if open_end and limit <= edge:
            return None
        kept = min(kept, max(1, _count_from(logits, limit)))
        open_end = False
    return None if open_end else kept


def _count_from(falling: Floats, limit: float) -> int:
    """How many of the falling values are at least `limit`."""
    return int(np.searchsorted(-falling, -limit, side="right"))


def _report(logits: torch.Tensor, draws: Sequence[TokenDraw], tokens: Sequence[int]) -> list[Sampled]:
    """Tokens with the log-probabilities that their draws ask for."""
    wanted = [(row, draw.logprobs) for row, draw in enumerate(draws) if draw.logprobs is not None]
    sampled = [Sampled(token) for token in tokens]
    if not wanted:
        return sampled
    rows = [row for row, _ in wanted]
    logprobs = logits[rows].float().log_softmax(dim=-1)
    most = min(max(count for _, count in wanted), logits.shape[-1])
    best, best_ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    chosen = logprobs[torch.arange(len(rows)), [tokens[row] for row in rows]].tolist()
    for i, (row, count) in enumerate(wanted):
        top = tuple(zip(best_ids[i][:count], best[i][:count], strict=True))
        sampled[row] = Sampled(tokens[row], chosen[i], top)
    return sampled
