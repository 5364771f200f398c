"""A few steps of several sizes, run before there is any work: how fast a worker is before its first request.

The smallest ones are run before anything is measured: the first step of a process loads kernels and makes handles, on
a GPU for longer than all of this takes. Small ones come first, since a slow machine gets no further than its time
allows. Each is run twice, and the quicker one counts: what is done once for each size is part of no later step.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from baton.messages import MAX_STEP_SAMPLES, StepSample
from engine.step.batch import Chunk, TokenDraw
from engine.step.timing import sample_of

SECONDS = 0.2  # for all that is measured; the size whose turn it is then is still finished

_ROWS = ((1, 16), (8, 64), (1, 1_024), (32, 64), (8, 512), (32, 512))  # how many, and tokens of each
_PROMPTS = ((16, 0), (64, 0), (32, 1_024), (128, 0), (64, 2_048), (256, 0))  # tokens, and how many come before them
_TOKEN = 1


def calibrate(
    step: Callable[[Sequence[Chunk]], float],
    now: Callable[[], float],
    page_size: int,
    num_pages: int,
    max_context: int,
    *,
    decodes: bool,
    most_rows: int = 32,
) -> tuple[StepSample, ...]:
    """Run `step` on chunks of all sizes that fit into `num_pages` pages, with rows if the worker `decodes`, at most
    `most_rows` of them. What is in the pages is read as if it were computed, and written over. `step` returns seconds
    by the device's clock. `now` tells those of the host's, which bounds the whole."""
    limit = min(max_context, num_pages * page_size)  # of all tokens, that which is drawn among them
    fitting = [
        chunks
        for chunks in _sizes(page_size, decodes)
        if len(chunks) <= most_rows
        and max(max(chunk.pages) for chunk in chunks) < num_pages
        and max(chunk.end + (chunk.sample is not None) for chunk in chunks) <= limit
    ]
    for chunks in fitting[: 2 if decodes else 1]:  # one of each kind
        step(chunks)
    samples: list[StepSample] = []
    until = now() + SECONDS
    with contextlib.suppress(torch.OutOfMemoryError):  # larger ones would not fit either
        _measure(fitting, samples, step, now, until)
    assert len(samples) <= MAX_STEP_SAMPLES
    return tuple(samples)


def _measure(
    fitting: Sequence[Sequence[Chunk]],
    samples: list[StepSample],
    step: Callable[[Sequence[Chunk]], float],
    now: Callable[[], float],
    until: float,
) -> None:
    for chunks in fitting:
        if now() >= until:
            break
        times: list[float] = []
        while len(times) < 2 and sum(times) < SECONDS:  # one that takes so long is long beside what is done once
            times.append(step(chunks))
        samples.append(sample_of(chunks, min(times)))


def _sizes(page_size: int, decodes: bool) -> Iterator[list[Chunk]]:
    for rows, prompt in zip(_ROWS, _PROMPTS, strict=True):
        if decodes:
            count, tokens = rows
            each = -(-tokens // page_size)
            draw = TokenDraw(temperature=0)
            yield [Chunk([_TOKEN], tokens - 1, range(i * each, (i + 1) * each), draw) for i in range(count)]
        tokens, context = prompt
        yield [Chunk([_TOKEN] * tokens, context, range(-(-(context + tokens) // page_size)))]
