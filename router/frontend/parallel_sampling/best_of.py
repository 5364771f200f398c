"""The best of several samples of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf

from router.frontend.output_stream import Output, OutputStream
from router.frontend.parallel_sampling.result_stream import Result, collect


async def best_of(
    streams: Sequence[OutputStream], n: int, logprobs: int | None, abandon: Callable[[OutputStream], None]
) -> list[Result]:
    """Return the `n` outputs with the highest mean log-probability per token, best first. The streams report
    log-probabilities in any case; without `logprobs` the client gets none. Raises the error that one ends in."""
    try:
        results = await asyncio.gather(*map(collect, streams))
    finally:
        for stream in streams:
            if not stream.ended:
                abandon(stream)
    ranked = sorted(results, key=lambda result: _mean(result.output), reverse=True)
    if logprobs is None:
        for result in ranked:
            result.output.logprobs.clear()
    # What is told of the prompt came with the first sample.
    prompt = next((result.output.prompt_logprobs for result in results if result.output.prompt_logprobs), [])
    for result in ranked[:n]:
        result.output.prompt_logprobs = prompt
    return ranked[:n]


def _mean(output: Output) -> float:
    told = output.logprobs
    return sum(one.logprob for one in told) / len(told) if told else -inf
