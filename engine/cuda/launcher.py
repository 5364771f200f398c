"""A step in a device's stream, without a wait of the host's: layers, head, scores and draws.

The tokens drawn stay on the device as well. A step launched ahead takes those that it follows from there. What only the
host finds out, that a filter reaches beyond the tokens that were looked at first, comes too late for such a step. Its
row has gone on from a wrong token then, and draws none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from baton.messages import PromptTokenLogprob
from baton.trace import Tracer
from engine.cuda.steps import Event, LaunchedStep
from engine.device.uploads import upload
from engine.models.transformer import Transformer
from engine.sampling.device_sampler import DeviceSampler, LaunchedDraws, LaunchedScores
from engine.sampling.mask_threads import MasksUnderWay, MaskThreads
from engine.sampling.sampler import SCORED_AT_ONCE
from engine.step.batch import Batch, Chunk, Sampled


class StepLauncher:
    """Launches the steps of one model. Not for several threads at once."""

    def __init__(
        self,
        model: Transformer,
        sampler: DeviceSampler,
        masks: MaskThreads,
        device: torch.device,
        mark: Callable[[], Event],
        tracer: Tracer,
    ) -> None:
        """`mark` puts an event into the stream behind all that lies there."""
        self._model, self._sampler, self._masks = model, sampler, masks
        self._device, self._mark, self._tracer = device, mark, tracer
        self._last: _Draws | None = None  # those of the step launched before

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], batch: Batch, masks: MasksUnderWay | None) -> tuple[LaunchedStep, Event]:
        """Launch one step and return it with the event at its end. Draws wait for `masks`, if there are any, and are
        launched by the host when the results are asked for."""
        before, self._last = self._last, None
        begun = self._mark()
        with self._tracer.span("layers", "engine"):
            hidden = self._model.forward(batch, self._tokens(chunks, batch, before))
        scores: dict[int, list[LaunchedScores]] = {}
        draws = _Draws(chunks, before)
        if hidden is not None:
            with self._tracer.span("head", "engine"):
                logits = self._score(chunks, hidden, scores)
            if logits is not None:
                draws.begin(lambda: self._draw(chunks, draws.places, logits, masks), now=masks is None)
        self._last = draws
        ended = self._mark()
        return LaunchedStep(begun, ended, lambda: (draws.collect(), _collected(scores)), draws=masks is not None), ended

    def _tokens(self, chunks: Sequence[Chunk], batch: Batch, before: _Draws | None) -> torch.Tensor | None:
        """The step's tokens, if the device has some of them; else none."""
        found = [
            (span.first, row)
            for span, chunk in zip(batch.spans, chunks, strict=True)
            if chunk.follows is not None and before is not None and (row := before.row(chunk.follows)) is not None
        ]
        if not found or before is None:
            return None
        places = upload(np.array(found, np.int64), self._device)
        tokens = upload(batch.tokens.copy(), self._device)
        return tokens.index_copy_(0, places[:, 0], before.tokens(self._device)[places[:, 1]])

    def _score(
        self, chunks: Sequence[Chunk], hidden: torch.Tensor, scores: dict[int, list[LaunchedScores]]
    ) -> torch.Tensor | None:
        """Launch the scores. Return the logits of the rows that a token is drawn from, if any."""
        if all(chunk.scoring is None for chunk in chunks):
            return self._model.logits(hidden)
        drawn: list[int] = []
        row = 0
        for number, chunk in enumerate(chunks):
            if (scoring := chunk.scoring) is not None:
                scores[number] = []
                for at in range(0, len(scoring.targets), SCORED_AT_ONCE):
                    targets = scoring.targets[at : at + SCORED_AT_ONCE]
                    logits = self._model.logits(hidden[row : row + len(targets)])
                    scores[number].append(self._sampler.launch_scores(logits, targets, scoring.top))
                    row += len(targets)
            if chunk.sample is not None:
                drawn.append(row)
                row += 1
        if not drawn:
            return None
        return self._model.logits(hidden[upload(np.array(drawn, np.int64), self._device)])

    def _draw(
        self, chunks: Sequence[Chunk], places: Sequence[int], logits: torch.Tensor, masks: MasksUnderWay | None
    ) -> tuple[LaunchedDraws, frozenset[int]]:
        """Launch the draws. Return them with the rows whose masks are late, which draw nothing that counts."""
        if masks is not None:
            with self._tracer.span("masks", "engine"):
                self._masks.wait(masks)
        wanted = [draw for place in places if (draw := chunks[place].sample) is not None]
        late = frozenset(row for row, draw in enumerate(wanted) if draw.mask is not None and not draw.mask.ready)
        asked = [replace(draw, mask=None) if row in late else draw for row, draw in enumerate(wanted)]
        with self._tracer.span("sampling", "engine"):
            return self._sampler.launch(logits, asked, [chunks[place].end for place in places]), late


class _Draws:
    """The draws of a step: on the device for the next one, and on the host once they are collected."""

    def __init__(self, chunks: Sequence[Chunk], before: _Draws | None) -> None:
        self.places = [number for number, chunk in enumerate(chunks) if chunk.sample is not None]
        self._rows = {number: row for row, number in enumerate(self.places)}
        self._follows = [(number, chunk.follows) for number, chunk in enumerate(chunks) if chunk.follows is not None]
        self._before = before if self._follows else None
        self._begins = False
        self._launch: Callable[[], tuple[LaunchedDraws, frozenset[int]]] | None = None
        self._launched: tuple[LaunchedDraws, frozenset[int]] | None = None
        self._tokens: torch.Tensor | None = None
        self._sampled: list[Sampled | None] = [None] * len(chunks)
        self._misleading: set[int] = set()  # chunks whose token on the device is none that counts
        self._collected = False

    def begin(self, launch: Callable[[], tuple[LaunchedDraws, frozenset[int]]], *, now: bool) -> None:
        """Launch the draws, now or when they are needed."""
        self._begins, self._launch = True, launch
        if now:
            self._begun()

    def row(self, number: int) -> int | None:
        """Where in `tokens` that of a chunk stands; none if nothing is drawn for it."""
        return self._rows.get(number) if self._begins else None

    def tokens(self, device: torch.device) -> torch.Tensor:
        """[draws], int64, on the device."""
        if self._tokens is None:
            self._begun()
        assert self._tokens is not None
        return self._tokens

    def gives(self, number: int) -> bool:
        """Whether the chunk has a token, and the device has gone on from it."""
        return self.collect()[number] is not None and number not in self._misleading

    def collect(self) -> list[Sampled | None]:
        """Wait for the tokens, for each chunk one or none."""
        if self._collected:
            return self._sampled
        self._collected = True
        if self._begins:
            draws, late = self._begun()
            for row, (place, one) in enumerate(zip(self.places, draws.collect(), strict=True)):
                self._sampled[place] = None if row in late else one
            self._misleading = {self.places[row] for row in draws.corrected}
        for number, followed in self._follows:
            if self._before is None or not self._before.gives(followed):
                self._sampled[number] = None
        self._before = self._launched = None  # the logits
        return self._sampled

    def _begun(self) -> tuple[LaunchedDraws, frozenset[int]]:
        if self._launched is None:
            assert self._launch is not None
            self._launched, self._launch = self._launch(), None
            self._tokens = self._launched[0].tokens
        return self._launched


def _collected(scores: Mapping[int, Sequence[LaunchedScores]]) -> dict[int, list[PromptTokenLogprob]]:
    return {number: [one for part in parts for one in part.collect()] for number, parts in scores.items()}
