"""A step in a device's stream, without a wait of the host's: layers, head, scores and draws.

The tokens drawn stay on the device as well. A step launched ahead takes those that it follows from there. What only the
host finds out, that a filter reaches beyond the tokens that were looked at first, comes too late for such a step. Its
row has gone on from a wrong token then, and draws none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from baton.messages import PromptTokenLogprob
from baton.trace import Tracer
from engine.cuda.draws import DrawDevice, StepDraws
from engine.cuda.steps import LaunchedStep
from engine.cuda.streams import Event, Streams
from engine.device.uploads import upload
from engine.models.transformer import Transformer
from engine.sampling.device_sampler import DeviceSampler, LaunchedScores
from engine.sampling.mask_threads import MasksUnderWay, MaskThreads
from engine.sampling.sampler import SCORED_AT_ONCE
from engine.step.batch import Batch, Chunk


class _Last(NamedTuple):
    """The step launched before."""

    draws: StepDraws
    ended: Event


class StepLauncher:
    """Launches the steps of one model. Not for several threads at once."""

    def __init__(
        self,
        model: Transformer,
        sampler: DeviceSampler,
        masks: MaskThreads,
        device: torch.device,
        streams: Streams,
        tracer: Tracer,
    ) -> None:
        self._model, self._sampler = model, sampler
        self._device, self._streams, self._tracer = device, streams, tracer
        self._draws_with = DrawDevice(sampler, masks, streams, tracer)
        self._last: _Last | None = None

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], batch: Batch, masks: MasksUnderWay | None) -> tuple[LaunchedStep, Event]:
        """Launch one step and return it with the event behind its layers and the draws that have no mask. `masks`:
        those of the others, if there are any; nothing here waits for them. Raises ValueError for a chunk that follows
        a draw with a mask."""
        before = self._last
        for number, chunk in enumerate(chunks):
            if before is not None and chunk.follows is not None and before.draws.masked(chunk.follows):
                raise ValueError(f"chunk {number} follows a draw with a mask, whose token the device does not have")
        self._last = None
        if before is not None:
            before.draws.step_behind(before.ended)
        begun = self._streams.mark()
        with self._tracer.span("layers", "engine"):
            hidden = self._model.forward(batch, self._tokens(chunks, batch, before))
        scores: dict[int, list[LaunchedScores]] = {}
        draws = StepDraws(self._draws_with, chunks, None if before is None else before.draws)
        if hidden is not None:
            with self._tracer.span("head", "engine"):
                logits = self._score(chunks, hidden, scores)
            if logits is not None:
                draws.launch(logits, masks)
        ended = self._streams.mark()
        self._last = _Last(draws, ended)
        step = LaunchedStep(
            begun,
            ended,
            lambda: (draws.collect(), _collected(scores)),
            go_on=draws.launch_if_ready,
            draws_late=lambda: draws.hold_up,
        )
        return step, ended

    def _tokens(self, chunks: Sequence[Chunk], batch: Batch, before: _Last | None) -> torch.Tensor | None:
        """The step's tokens, if the device has some of them; else none."""
        if before is None:
            return None
        follows = [
            (span.first, row)
            for span, chunk in zip(batch.spans, chunks, strict=True)
            if chunk.follows is not None and (row := before.draws.row(chunk.follows)) is not None
        ]
        if not follows:
            return None
        places = upload(np.array(follows, np.int64), self._device)
        tokens = upload(batch.tokens.copy(), self._device)
        return tokens.index_copy_(0, places[:, 0], before.draws.tokens[places[:, 1]])

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


def _collected(scores: Mapping[int, Sequence[LaunchedScores]]) -> dict[int, list[PromptTokenLogprob]]:
    return {number: [one for part in parts for one in part.collect()] for number, parts in scores.items()}
