"""Draws and scores logits where they are, all rows at once, with the tokens of `host_sampler`.

A step's rules, masks and numbers go to the device in one copy, and tokens, log-probabilities and flags come back in
one. No row of logits leaves the device. A second, small copy follows only in a step in which a filter reaches beyond
the likeliest `PREFIX` tokens of a row: such rows are sorted whole, on the device. Later rows of the same output are
sorted whole at once, because a step launched ahead can't wait for a second look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from baton.messages import PromptTokenLogprob
from engine.device.uploads import Download
from engine.sampling import counter_rng, device_rng, filters
from engine.sampling.device_edits import NUMBERS_AT_ONCE, BatchEdits
from engine.sampling.filter_edges import LEFT_NO_TOKEN, NO_MASK, PREFIX, min_p_logit, temperature, top_p_mass
from engine.sampling.filter_edges import filters as filters_tokens
from engine.sampling.filters import FilterRows
from engine.sampling.packed_upload import PackedUpload
from engine.step.batch import Sampled, TokenDraw

_SORTED_AT_ONCE = NUMBERS_AT_ONCE // 4  # whole rows, which need four times as many temporaries

_REMEMBERED = 4_096  # outputs with a filter that has reached beyond the prefix

Numbers = npt.NDArray[np.int32]


class _Rows(Struct, frozen=True, gc=False):
    """Some rows of a step, and on the device what their draws need."""

    places: Sequence[int]
    index: torch.Tensor  # int64: the same
    temperatures: torch.Tensor  # float32
    filters: FilterRows

    def block(self, first: int, last: int) -> _Rows:
        part = slice(first, last)
        of = self.filters
        cut = FilterRows(of.top_k[part], of.top_p_mass[part], of.min_p_logit[part], of.keys[part])
        return _Rows(self.places[part], self.index[part], self.temperatures[part], cut)


class DeviceSampler:
    """A `Sampler` for every device that has int64 and float64. Not for several threads at once."""

    def __init__(self, device: torch.device, prefix: int = PREFIX) -> None:
        """Filters look at the likeliest `prefix` tokens first; the tokens drawn are the same with any."""
        self._device = device
        self._prefix = prefix
        self._counters = torch.empty(0, dtype=torch.int64, device=device)
        self._wide: dict[tuple[int, int], None] = {}  # outputs, by seed and index, to be sorted whole; oldest first

    def sample(
        self,
        logits: torch.Tensor,
        draws: Sequence[TokenDraw],
        positions: Sequence[int],
        best: Sequence[int] | None = None,
    ) -> list[Sampled]:
        """As `Sampler.sample`. `best` is found again here, beside the row's largest logit."""
        return self.launch(logits, draws, positions).collect()

    @torch.inference_mode()
    def prepare(self, vocab: int) -> None:
        """Make what all draws from rows of so many logits share. Call it in the stream that all streams in which draws
        are launched lie behind."""
        if len(self._counters) != vocab:
            self._counters = device_rng.counters(torch.arange(vocab, device=self._device))

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, draws: Sequence[TokenDraw], positions: Sequence[int]) -> LaunchedDraws:
        """Begin to draw: everything is on its way to the device, and nothing waits for it. Masks must be computed. The
        logits may not change before the result is collected."""
        self.prepare(logits.shape[-1])
        return LaunchedDraws(logits.float(), draws, positions, self._counters, self._prefix, self._wide)

    def score(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> list[PromptTokenLogprob]:
        return self.launch_scores(logits, targets, top).collect()

    @torch.inference_mode()
    def launch_scores(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> LaunchedScores:
        """As `launch`, for scores."""
        return LaunchedScores(logits.float(), targets, min(top, logits.shape[-1]))


class LaunchedDraws:
    """Draws that the device computes. Collect them once."""

    def __init__(
        self,
        raw: torch.Tensor,
        draws: Sequence[TokenDraw],
        positions: Sequence[int],
        counters: torch.Tensor,
        prefix: int,
        wide: dict[tuple[int, int], None],
    ) -> None:
        """`raw` [rows, vocab] is float32. `counters` [vocab] are those of `device_rng`. `wide`: the sampler's."""
        self._raw = raw
        self._wide = wide
        self._counters = counters
        self._draws = draws
        vocab = raw.shape[-1]
        upload = PackedUpload()
        edits = BatchEdits(draws, vocab, upload)
        warm = [row for row, draw in enumerate(draws) if draw.temperature > 0]
        filtered = [row for row in warm if filters_tokens(draws[row], vocab)]
        wide_places = [row for row in filtered if _output(draws[row]) in wide]
        self._filtered_places = [row for row in filtered if _output(draws[row]) not in wide]
        plain_places = [row for row in warm if not filters_tokens(draws[row], vocab)]
        add_plain, add_filtered, add_wide = (
            _add(upload, places, draws, positions, vocab) if places else ()
            for places in (plain_places, self._filtered_places, wide_places)
        )
        self._reported = [row for row, draw in enumerate(draws) if draw.logprobs is not None]
        self._top = min(max((draws[row].logprobs or 0 for row in self._reported), default=0), vocab)
        reported = upload.add_array(np.array(self._reported, np.int64)) if self._reported else 0
        sent = upload.send(raw.device)

        self._logits = edits.applied(raw, sent)
        self._largest, tokens = self._logits.max(-1)
        # Each operation is a launch: the host finds out whether these are finite.
        checked = [self._largest] if self._logits is raw else [self._largest, raw.amax(-1)]
        decided: list[torch.Tensor] = []
        if plain_places:
            plain = _rows(plain_places, sent, add_plain)
            tokens.index_copy_(0, plain.index, _draw_plain(self._logits, self._largest, plain, counters))
        if wide_places:
            whole_rows = _rows(wide_places, sent, add_wide)
            drawn, _ = _draw_filtered(self._logits, self._largest, whole_rows, counters, vocab)
            tokens.index_copy_(0, whole_rows.index, drawn)
        if self._filtered_places:
            self._filtered = _rows(self._filtered_places, sent, add_filtered)
            drawn, by_prefix = _draw_filtered(self._logits, self._largest, self._filtered, counters, prefix)
            decided.append(by_prefix.int())
            tokens.index_copy_(0, self._filtered.index, drawn)
        parts = [tokens.int(), *(largest.view(torch.int32) for largest in checked), *decided]
        if self._reported:
            self._index = sent[reported]
            parts += _logprobs(self._reported_logits(), tokens[self._index], self._top)
        self.packed = torch.cat(parts)
        """What is copied to the host, int32 bits: tokens; each row's largest logit, and if there are edits that before
        them; which of the filtered rows are decided; log-probabilities of the rows that ask for them."""
        self.tokens = tokens
        """[rows], int64: those that the device has drawn. `collect` corrects some."""
        self.corrected: frozenset[int] = frozenset()
        """The rows that `collect` has given other tokens."""
        self._download = Download(self.packed)

    @torch.inference_mode()
    def collect(self) -> list[Sampled]:
        """Wait for the device. Return one token for each draw."""
        collected, reported = self._download.wait(), len(self._reported)
        counts = [len(self._draws)] * (2 if self._logits is self._raw else 3)
        counts += [len(self._filtered_places), reported]
        first, *parts, decided, chosen, rest = np.split(collected, np.cumsum(counts))
        tokens, logprobs = first.copy(), chosen.copy()
        has_token, finite = (np.isfinite(part.view(np.float32)) for part in (parts[0], parts[-1]))
        undecided = np.flatnonzero(decided == 0).tolist()
        if undecided:
            again = Download(self._redraw(undecided)).wait()
            places = [self._filtered_places[place] for place in undecided]
            self._remember(places)
            tokens[places] = again[: len(places)]
            self.corrected = frozenset(row for row in places if tokens[row] != first[row])
            at = {row: place for place, row in enumerate(self._reported)}
            for row, logprob in zip((row for row in places if row in at), again[len(places) :], strict=True):
                logprobs[at[row]] = logprob
        values = _floats(logprobs)
        likeliest = _pairs(rest, reported, self._top)
        sampled = [Sampled(token) for token in tokens.tolist()]
        for place, row in enumerate(self._reported):
            sampled[row] = Sampled(sampled[row].token, values[place], likeliest[place][: self._draws[row].logprobs])
        missing = {row for row, draw in enumerate(self._draws) if draw.mask is not None and draw.mask.allowed is None}
        for row in missing.union(np.flatnonzero(~(has_token & finite)).tolist()):
            failure = self._failure(self._draws[row], bool(finite[row]), bool(has_token[row]))
            sampled[row] = Sampled(sampled[row].token, finite=False, failure=failure)
        return sampled

    def _remember(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._wide[_output(self._draws[row])] = None
        while len(self._wide) > _REMEMBERED:
            del self._wide[next(iter(self._wide))]

    def _failure(self, draw: TokenDraw, finite: bool, has_token: bool) -> str:
        if draw.mask is None or not finite:
            return ""
        if draw.mask.allowed is None:
            return draw.mask.failure or NO_MASK
        return "" if has_token else LEFT_NO_TOKEN

    def _redraw(self, undecided: Sequence[int]) -> torch.Tensor:
        """Draw those of the filtered rows again, from all tokens. Returns the tokens as int32, and log-probabilities of
        those that ask for them."""
        upload = PackedUpload()
        upload.add_array(np.array(undecided, np.int64))
        places = [self._filtered_places[place] for place in undecided]
        upload.add_array(np.array([at for at, row in enumerate(places) if row in set(self._reported)], np.int64))
        chosen, reported = upload.send(self._raw.device)
        of = self._filtered.filters
        cut = FilterRows(of.top_k[chosen], of.top_p_mass[chosen], of.min_p_logit[chosen], of.keys[chosen])
        rows = _Rows(places, self._filtered.index[chosen], self._filtered.temperatures[chosen], cut)
        tokens, _ = _draw_filtered(self._logits, self._largest, rows, self._counters, len(self._counters))
        parts = [tokens.int()]
        if reported.numel():
            parts += _logprobs(self._raw[rows.index[reported]], tokens[reported], 0)
        return torch.cat(parts)

    def _reported_logits(self) -> torch.Tensor:
        return self._raw if len(self._reported) == len(self._draws) else self._raw[self._index]


class LaunchedScores:
    """Scores that the device computes. Collect them once."""

    def __init__(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> None:
        """`logits` [rows, vocab] are float32."""
        self._targets = targets
        self._top = top
        upload = PackedUpload()
        upload.add_array(np.array(targets, np.int64))
        (chosen,) = upload.send(logits.device)
        ranks = (logits > logits.gather(1, chosen[:, None])).sum(-1)
        self.packed = torch.cat([ranks.int(), *_logprobs(logits, chosen, top)])
        """What is copied to the host, int32: ranks and log-probabilities."""
        self._download = Download(self.packed)

    def collect(self) -> list[PromptTokenLogprob]:
        """Wait for the device. Return one score for each target."""
        collected, rows = self._download.wait(), len(self._targets)
        ranks, values = collected[:rows].tolist(), _floats(collected[rows : 2 * rows])
        likeliest = _pairs(collected[2 * rows :], rows, self._top)
        return [
            PromptTokenLogprob(target, values[row], likeliest[row], ranks[row] + 1)
            for row, target in enumerate(self._targets)
        ]


def _output(draw: TokenDraw) -> tuple[int, int]:
    return draw.seed, draw.index


def _add(
    upload: PackedUpload, places: Sequence[int], draws: Sequence[TokenDraw], positions: Sequence[int], vocab: int
) -> Sequence[int]:
    """Add to an upload what `_rows` takes out of it."""
    some = [draws[row] for row in places]
    keys = counter_rng.keys(
        [draw.seed for draw in some], [draw.index for draw in some], [positions[row] for row in places]
    )
    return [
        upload.add_array(np.array(places, np.int64)),
        upload.add_array(np.array([temperature(draw) for draw in some], np.float32)),
        upload.add_array(np.array([draw.top_k if draw.top_k < vocab else 0 for draw in some], np.int64)),
        upload.add_array(np.array([top_p_mass(draw) for draw in some], np.float64)),
        upload.add_array(np.array([min_p_logit(draw) for draw in some], np.float64)),
        upload.add_array(keys.view(np.int64)),
    ]


def _rows(places: Sequence[int], sent: Sequence[torch.Tensor], added: Sequence[int]) -> _Rows:
    index, temperatures, top_k, top_p_masses, min_p_logits, keys = (sent[place] for place in added)
    return _Rows(places, index, temperatures, FilterRows(top_k, top_p_masses, min_p_logits, keys))


def _blocks(rows: _Rows, vocab: int, numbers: int) -> Iterator[_Rows]:
    step = max(1, numbers // vocab)
    for first in range(0, len(rows.places), step):
        yield rows.block(first, first + step)


def _scaled(logits: torch.Tensor, largest: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Return logits [rows, vocab] relative to the row's largest, by temperature."""
    if len(rows.places) < len(logits):
        logits, largest = logits[rows.index], largest[rows.index]
    return (logits - largest[:, None]).div_(rows.temperatures[:, None])


def _floats(bits: Numbers) -> list[float]:
    return bits.view(np.float32).tolist()


def _pairs(packed: Numbers, rows: int, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Ids and log-probabilities of the likeliest tokens of each row, as `_logprobs` packs them."""
    if not count:
        return [()] * rows
    ids = packed[: rows * count].reshape(rows, count).tolist()
    values = packed[rows * count : 2 * rows * count].view(np.float32).reshape(rows, count).tolist()
    return [tuple(zip(*one, strict=True)) for one in zip(ids, values, strict=True)]


def _draw_plain(logits: torch.Tensor, largest: torch.Tensor, rows: _Rows, counters: torch.Tensor) -> torch.Tensor:
    """Return a token for each of the rows, which filter nothing."""
    tokens: list[torch.Tensor] = []
    for part in _blocks(rows, logits.shape[-1], NUMBERS_AT_ONCE):
        noise = device_rng.gumbel(counters + part.filters.keys[:, None])
        tokens.append(noise.add_(_scaled(logits, largest, part)).argmax(-1))
    return torch.cat(tokens)


def _draw_filtered(
    logits: torch.Tensor, largest: torch.Tensor, rows: _Rows, counters: torch.Tensor, prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each of the rows, and whether the `prefix` likeliest tokens decide it."""
    vocab = logits.shape[-1]
    drawn = [
        filters.draw(_scaled(logits, largest, part), part.filters, counters, prefix)
        for part in _blocks(rows, vocab, _SORTED_AT_ONCE if prefix == vocab else NUMBERS_AT_ONCE)
    ]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([decided for _, decided in drawn])


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the log-probability of one token for each row [rows, vocab], then ids and log-probabilities of the `count`
    likeliest, all flat and as int32 bits."""
    chosen: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    step = max(1, NUMBERS_AT_ONCE // logits.shape[-1])
    for first in range(0, len(logits), step):
        rows = logits[first : first + step]
        logprobs = rows.log_softmax(-1)
        chosen.append(logprobs.gather(1, tokens[first : first + step, None]).view(-1))
        if count:
            _, best = filters.rank(rows, count)
            ids.append(best.int().view(-1))
            values.append(logprobs.gather(1, best).view(-1))
    return [*(part.view(torch.int32) for part in chosen), *ids, *(part.view(torch.int32) for part in values)]
