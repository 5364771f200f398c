"""The draws of a step that was launched. Those without a mask lie in the stream; those with one come late.

    steps' stream   layers ── draws ── │ layers of the step ahead ── draws ── │
    beside it                          └── masked draws

A grammar's mask is computed on the host while the layers run. A launch does not wait for it. Masked draws are launched
when all masks of the step are there: behind the step's layers, or beside the step ahead if that lies there already.
Collecting the step waits for masks, but not long, and for slow ones only if no step ahead was launched. A mask that is
late by then leaves its row without a token.

The tokens of the other draws stay on the device, and a step ahead takes those that it follows from there. Nothing
follows a masked draw: the mask after it needs its token. The scheduler knows that, and a launcher refuses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from msgspec.structs import replace

from baton.trace import Tracer
from engine.cuda.streams import Event, Streams
from engine.device.uploads import upload
from engine.sampling.device_sampler import DeviceSampler, LaunchedDraws
from engine.sampling.mask_threads import MasksUnderWay, MaskThreads
from engine.step.batch import Chunk, Sampled, TokenDraw

_Stream: TypeAlias = "Callable[[], contextlib.AbstractContextManager[None]]"


class DrawDevice(NamedTuple):
    """What draws are launched with."""

    sampler: DeviceSampler
    threads: MaskThreads
    streams: Streams
    tracer: Tracer


class _Rows(NamedTuple):
    """Some of a step's draws: rows of its logits, and the chunks that they belong to."""

    rows: Sequence[int]
    numbers: Sequence[int]
    draws: Sequence[TokenDraw]
    positions: Sequence[int]  # of the new tokens

    @classmethod
    def of(cls, chunks: Sequence[Chunk], *, masked: bool) -> _Rows:
        draws = [(number, chunk.end, chunk.sample) for number, chunk in enumerate(chunks) if chunk.sample is not None]
        rows = [row for row, (_, _, draw) in enumerate(draws) if (draw.mask is not None) == masked]
        chosen = [draws[row] for row in rows]
        return cls(
            rows, [number for number, _, _ in chosen], [draw for _, _, draw in chosen], [end for _, end, _ in chosen]
        )

    def logits(self, of_step: torch.Tensor) -> torch.Tensor:
        if len(self.rows) == len(of_step):
            return of_step
        return of_step.index_select(0, upload(np.array(self.rows, np.int64), of_step.device))


class StepDraws:
    """The draws of one step: on the device for the next one, and on the host once they are collected."""

    def __init__(self, device: DrawDevice, chunks: Sequence[Chunk], before: StepDraws | None) -> None:
        """`before`: those of the step launched before this one."""
        self._device = device
        self._at_once, self._late = _Rows.of(chunks, masked=False), _Rows.of(chunks, masked=True)
        self._row_of = {number: row for row, number in enumerate(self._at_once.numbers)}
        self._follows = [(number, chunk.follows) for number, chunk in enumerate(chunks) if chunk.follows is not None]
        self._before = before if self._follows else None
        self._launched: LaunchedDraws | None = None
        self._masked: _MaskedDraws | None = None
        self._tokens: torch.Tensor | None = None
        self._ended: Event | None = None  # of this step, once another one lies behind it
        self._sampled: list[Sampled | None] = [None] * len(chunks)
        self._misleading: set[int] = set()  # chunks whose token on the device is none that counts
        self._collected = False

    def launch(self, logits: torch.Tensor, masks: MasksUnderWay | None) -> None:
        """Launch the draws from [draws, vocab]; those with a mask if all masks are there already."""
        sampler = self._device.sampler
        sampler.prepare(logits.shape[-1])
        if self._at_once.rows:
            with self._device.tracer.span("sampling", "engine"):
                some = self._at_once
                self._launched = sampler.launch(some.logits(logits), some.draws, some.positions)
                self._tokens = self._launched.tokens
        if self._late.rows and masks is not None:
            self._masked = _MaskedDraws(self._device, self._late, self._late.logits(logits), masks, self._stream)
            self._masked.launch_if_ready()

    def masked(self, number: int) -> bool:
        """Whether a chunk's draw has a mask, so that its token is not on the device."""
        return number in self._late.numbers

    def row(self, number: int) -> int | None:
        """Where in `tokens` that of a chunk stands; none if nothing is drawn for it."""
        return self._row_of.get(number) if self._tokens is not None else None

    @property
    def tokens(self) -> torch.Tensor:
        """[draws without a mask], int64, on the device."""
        assert self._tokens is not None
        return self._tokens

    def launch_if_ready(self) -> None:
        """Launch the masked draws if all masks are there. Waits for nothing and raises nothing."""
        if self._masked is not None:
            self._masked.launch_if_ready()

    def step_behind(self, ended: Event) -> None:
        """Another step is about to lie behind this one, whose end is `ended`."""
        self.launch_if_ready()
        self._ended = ended

    @property
    def hold_up(self) -> bool:
        """Whether the device has nothing to do until masked draws have come."""
        return self._masked is not None and self._ended is None

    def gives(self, number: int) -> bool:
        """Whether the chunk has a token, and the device has gone on from it."""
        return self.collect()[number] is not None and number not in self._misleading

    def collect(self) -> list[Sampled | None]:
        """Wait for the tokens, for each chunk one or none."""
        if self._collected:
            return self._sampled
        self._collected = True
        if self._masked is not None:
            waits = self._ended is None
            for number, one in zip(self._late.numbers, self._masked.collect(slow=waits), strict=True):
                self._sampled[number] = one
        if self._launched is not None:
            with self._stream():
                collected = self._launched.collect()
            for number, one in zip(self._at_once.numbers, collected, strict=True):
                self._sampled[number] = one
            self._misleading = {self._at_once.numbers[row] for row in self._launched.corrected}
        for number, followed in self._follows:
            if self._before is None or not self._before.gives(followed):
                self._sampled[number] = None
        self._before = self._launched = self._masked = None  # the logits
        return self._sampled

    def _stream(self) -> contextlib.AbstractContextManager[None]:
        """Where what is launched now waits for nothing but this step."""
        return contextlib.nullcontext() if self._ended is None else self._device.streams.beside(self._ended)


class _MaskedDraws:
    """Those draws of a step that have a mask."""

    def __init__(
        self, device: DrawDevice, rows: _Rows, logits: torch.Tensor, masks: MasksUnderWay, stream: _Stream
    ) -> None:
        """`logits` are those of `rows`. `stream` is asked for whenever something is launched."""
        self._device, self._rows, self._logits, self._masks, self._stream = device, rows, logits, masks, stream
        self._launched: LaunchedDraws | None = None
        self._late: Sequence[int] = ()
        self._error: Exception | None = None

    def launch_if_ready(self) -> None:
        if self._launched is None and self._error is None and not self._unready():
            try:
                self._launch()
            except Exception as error:  # noqa: BLE001 - the step that is collected raises it, not the one being launched
                self._error = error

    def collect(self, *, slow: bool) -> list[Sampled | None]:
        """Wait for the masks, but not long, and for the draws. A row whose mask is late has no token. `slow`: wait for
        slow masks, too, if there are no others."""
        if self._error is not None:
            raise self._error
        if self._launched is None:
            with self._device.tracer.span("masks", "engine"):
                self._device.threads.wait(self._masks, slow=slow)
            self._launch()
        assert self._launched is not None
        with self._stream():
            drawn = self._launched.collect()
        return [None if row in self._late else one for row, one in enumerate(drawn)]

    def _unready(self) -> list[int]:
        return [row for row, draw in enumerate(self._rows.draws) if draw.mask is not None and not draw.mask.ready]

    def _launch(self) -> None:
        self._late = self._unready()  # these draw something that does not count
        draws = [replace(draw, mask=None) if row in self._late else draw for row, draw in enumerate(self._rows.draws)]
        with self._device.tracer.span("sampling", "engine"), self._stream():
            self._launched = self._device.sampler.launch(self._logits, draws, self._rows.positions)
