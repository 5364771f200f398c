"""Draws and scores logits in host memory, one row after the other: the oracle for every other sampler.

Temperature, then top-k, top-p and min-p. Among the tokens left, Gumbel-max with the noise of
`engine.sampling.counter_rng`. The noise belongs to the token and not to its rank or its share of the sum. So a last-bit
difference between two workers' logits moves a draw only if two candidates were tied to that bit, or one crosses a
filter's edge.

Sorting a whole vocabulary costs more than a small model's step, so filters first look at the likeliest `PREFIX` tokens;
where a filter might reach beyond, they look again at all of them. Both give the same candidates.

NumPy does what is done to single rows. An operation of torch has its threads spin for milliseconds on a CPU, and waits
for all of them where another process has a core.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.messages import PromptTokenLogprob
from engine.sampling import counter_rng
from engine.sampling.filter_edges import LEFT_NO_TOKEN, NO_MASK, PREFIX, filters, min_p_logit, temperature, top_p_mass
from engine.sampling.gumbel_argmax import GumbelArgmax
from engine.step.batch import Floats, Ints, LogitsEdits, Sampled, TokenDraw, TokenMask

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Ranked:
    """Tokens by falling logit, ties by rising id. Logits are scaled by the temperature and relative to the largest."""

    logits: Doubles
    ids: Ints
    whole: bool  # every token of the vocabulary is here
    log_total: float  # log of the sum of exponentials over the whole vocabulary, same scale


class HostSampler:
    """A `Sampler` for CPUs. Not for several threads at once."""

    def __init__(self) -> None:
        self._gumbel_argmax = GumbelArgmax()

    def sample(
        self,
        logits: torch.Tensor,
        draws: Sequence[TokenDraw],
        positions: Sequence[int],
        best: Sequence[int] | None = None,
    ) -> list[Sampled]:
        raw = logits = logits.float()
        rows = raw.numpy()
        if best is None:
            tokens: list[int] = rows.argmax(axis=-1).tolist()
            largest: list[float] = rows[np.arange(len(rows)), tokens].tolist()  # the first NaN, if there is one
        else:
            tokens = list(best)
            largest = logits.amax(dim=-1).tolist()
        if changed := [(row, draw.edits) for row, draw in enumerate(draws) if draw.edits is not None]:
            logits = logits.clone()
            rows = logits.numpy()
            for row, edits in changed:
                apply(edits, logits[row])
                tokens[row] = int(rows[row].argmax())
                if math.isfinite(largest[row]):  # the rules may leave no token, which a mask tells apart
                    largest[row] = float(rows[row, tokens[row]]) if draws[row].mask is None else 0.0
        failures: dict[int, str] = {}
        with np.errstate(invalid="ignore"):  # said by rows that are not finite
            for row, draw in enumerate(draws):
                if draw.mask is not None:
                    if math.isfinite(largest[row]):
                        drawn = _draw_masked(draw, draw.mask, rows[row], raw[row].numpy(), tokens[row], positions[row])
                        if isinstance(drawn, str):
                            failures[row] = drawn
                        else:
                            tokens[row] = drawn
                elif draw.temperature > 0:
                    if filters(draw, rows.shape[-1]):
                        tokens[row] = _draw_filtered(rows[row], tokens[row], draw, positions[row])
                    else:
                        key = counter_rng.key(draw.seed, draw.index, positions[row])
                        tokens[row] = self._gumbel_argmax.winner(rows[row], tokens[row], temperature(draw), key)
        sampled = _report(raw, draws, tokens)
        for row, logit in enumerate(largest):
            if not math.isfinite(logit) or row in failures:
                sampled[row] = Sampled(tokens[row], finite=False, failure=failures.get(row, ""))
        return sampled

    def score(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> list[PromptTokenLogprob]:
        logits = logits.float()
        chosen = torch.tensor(list(targets))[:, None]
        ranks: list[int] = (logits > logits.gather(1, chosen)).sum(dim=-1).tolist()
        logprobs = logits.log_softmax(dim=-1)
        values: list[float] = logprobs.gather(1, chosen)[:, 0].tolist()
        likeliest = _likeliest(logits, logprobs, top)
        return [
            PromptTokenLogprob(target, values[row], likeliest[row], ranks[row] + 1)
            for row, target in enumerate(targets)
        ]


def apply(edits: LogitsEdits, logits: torch.Tensor) -> None:
    """Change one row of logits [vocab], float32, in place."""

    if edits.allowed is not None:
        only = torch.from_numpy(edits.allowed)
        values = logits[only]
        logits.fill_(-math.inf)
        logits[only] = values
    if edits.forbidden is not None:
        logits[torch.from_numpy(edits.forbidden)] = -math.inf
    if edits.bias is not None:
        logits.index_add_(0, *map(torch.from_numpy, edits.bias))
    if edits.repeated is not None:
        ids = torch.from_numpy(edits.repeated)
        before = logits[ids]
        logits[ids] = torch.where(before > 0, before / edits.repetition, before * edits.repetition)
    if edits.lowered is not None:
        ids, values = map(torch.from_numpy, edits.lowered)
        logits.index_add_(0, ids, -values)


def _draw_filtered(logits: Floats, best: int, draw: TokenDraw, position: int) -> int:
    """Draw a token from a row [vocab], among those that its filters leave. `best` is the likeliest."""
    scaled = (logits - logits[best]) / np.float32(temperature(draw))
    if not math.isfinite(scaled[best]):
        return best
    remaining, ids = _filtered(scaled, np.arange(len(scaled)), draw)
    return _noisiest(remaining, ids, draw, position)


def _draw_masked(draw: TokenDraw, mask: TokenMask, logits: Floats, raw: Floats, best: int, position: int) -> int | str:
    """Draw a token that the mask allows from a row of logits [vocab], or return why there is none. `raw` is the row
    without the request's other rules, `best` the likeliest token. Where rules and mask together leave no token, the
    output ends if the grammar accepts that.

    Few tokens are allowed where a grammar is strict, so this gathers them.
    """
    if mask.allowed is None:
        return mask.failure or NO_MASK
    if draw.temperature == 0 and mask.allowed[best] and logits[best] > -np.inf:
        return best
    ids, values = _possible(logits, np.flatnonzero(mask.allowed))
    if not len(ids) and mask.may_end:
        ids, values = _possible(raw, np.array(sorted(one for one in mask.ends if one < len(raw)), np.int64))
    if not len(ids):
        return LEFT_NO_TOKEN
    if draw.temperature == 0:
        return int(ids[np.argmax(values)])
    scaled = (values - values.max()) / np.float32(temperature(draw))
    if filters(draw, len(logits)):
        remaining, ids = _filtered(scaled, ids, draw)
    else:
        remaining = scaled.astype(np.float64)
    return _noisiest(remaining, ids, draw, position)


def _possible(logits: Floats, ids: Ints) -> tuple[Ints, Floats]:
    """Those of the tokens that are not masked otherwise, and their logits."""
    values = logits[ids]
    if (there := values > -np.inf).all():
        return ids, values
    return ids[there], values[there]


def _noisiest(logits: Doubles, ids: Ints, draw: TokenDraw, position: int) -> int:
    noisy = logits + counter_rng.gumbel(counter_rng.key(draw.seed, draw.index, position), ids)
    return int(ids[np.argmax(noisy)])


def _filtered(scaled: Floats, ids: Ints, draw: TokenDraw) -> tuple[Doubles, Ints]:
    """Those that pass all filters of a row's only tokens, which stand by rising id."""
    log_total = 0.0
    if draw.top_p < 1 and not 0 < draw.top_k < len(ids):  # top-k leaves a total of its own
        log_total = math.log(np.exp(scaled).sum(dtype=np.float64))
    if len(ids) > PREFIX:
        likeliest = _likeliest_places(scaled)
        ranked = _rank(scaled[likeliest], ids[likeliest], len(likeliest) == len(ids), log_total)
        if (count := _keep(ranked, draw)) is not None:
            return ranked.logits[:count], ranked.ids[:count]
    ranked = _rank(scaled, ids, True, log_total)
    count = _keep(ranked, draw)
    assert count is not None
    return ranked.logits[:count], ranked.ids[:count]


def _likeliest_places(scaled: Floats) -> Ints:
    """Where the `PREFIX` largest are, their equals, and some more. The maxima of groups bound them: so many groups have
    a number that is not below the bound."""
    group = max(1, len(scaled) // (8 * PREFIX))
    maxima = scaled[: len(scaled) // group * group].reshape(-1, group).max(axis=-1)
    return np.flatnonzero(scaled >= np.partition(maxima, -PREFIX)[-PREFIX])


def _rank(logits: Floats, ids: Ints, whole: bool, log_total: float) -> _Ranked:
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
    logits, width = ranked.logits, len(ranked.logits)
    open_end = not ranked.whole  # tokens that are not here may pass too
    edge = logits[-1]  # of a prefix: which of the tokens with this logit are here is chance
    log_total = ranked.log_total

    if draw.top_k > 0 and (open_end or draw.top_k < width):
        if open_end and (draw.top_k > width or logits[draw.top_k - 1] <= edge):
            return None
        width = _count_from(logits, logits[draw.top_k - 1])  # the k-th token's equals pass with it
        log_total = float(np.logaddexp.reduce(logits[:width]))
        open_end = False
    if draw.top_p < 1:
        cumulated = np.cumsum(np.exp(logits[:width] - log_total))
        nucleus = int(np.searchsorted(cumulated, top_p_mass(draw))) + 1  # the smallest set that reaches top_p
        if open_end and (nucleus > width or logits[nucleus - 1] <= edge):
            return None
        width = min(nucleus, width)
        open_end = False
    if (limit := logits[0] + min_p_logit(draw)) > -math.inf:
        if open_end and limit <= edge:
            return None
        width = min(width, max(1, _count_from(logits, limit)))
        open_end = False
    return None if open_end else width


def _count_from(falling: Doubles, limit: float) -> int:
    """How many of the falling values are at least `limit`."""
    return int(np.searchsorted(-falling, -limit, side="right"))


def _report(logits: torch.Tensor, draws: Sequence[TokenDraw], tokens: Sequence[int]) -> list[Sampled]:
    """Tokens with the log-probabilities that their draws ask for."""
    counts = [(row, draw.logprobs) for row, draw in enumerate(draws) if draw.logprobs is not None]
    sampled = [Sampled(token) for token in tokens]
    if not counts:
        return sampled
    rows = [row for row, _ in counts]
    if len(rows) < len(draws):
        logits = logits[rows]
    logprobs = logits.log_softmax(dim=-1)
    likeliest = _likeliest(logits, logprobs, max(count for _, count in counts))
    chosen = logprobs[torch.arange(len(rows)), [tokens[row] for row in rows]].tolist()
    for place, (row, count) in enumerate(counts):
        sampled[row] = Sampled(tokens[row], chosen[place], likeliest[place][:count])
    return sampled


def _likeliest(logits: torch.Tensor, logprobs: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Each row's likeliest tokens with their log-probabilities: by falling logit, of equals the lowest id first."""
    vocab = logits.shape[-1]
    count = min(count, vocab)
    if not count:
        return [()] * len(logits)
    # One more than asked for shows whether equals were left out.
    best, best_ids = (part.numpy() for part in logits.topk(min(count + 1, vocab), dim=-1))
    rows: list[tuple[tuple[int, float], ...]] = []
    for row, (values, ids) in enumerate(zip(best, best_ids, strict=True)):
        if count < vocab and values[count] == values[count - 1]:
            above = ids[values > values[count]]
            equal = np.flatnonzero(logits[row].numpy() == values[count])
            ids = np.concatenate((above, equal[: count - len(above)]))
            values = logits[row].numpy()[ids]
        ids = ids[:count][np.lexsort((ids[:count], -values[:count]))]
        rows.append(tuple(zip(ids.tolist(), logprobs[row].numpy()[ids].tolist(), strict=True)))
    return rows
