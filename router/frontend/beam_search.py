"""Beam search with the requests that it takes: one token of one beam is a request.

Each request asks for one token after the prompt and the beam so far. It goes where its parent ran. There the full pages
are shared by reference, and the partial one is copied, so that a beam costs one row of a step. A worker that dies costs
a recompute and changes nothing else, because a beam is its tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from baton.messages import SamplingParams
from kvstore.keys import pack_tokens
from router.events import Finished, RequestEnded, Usage
from router.frontend.beams import Beam, BeamSearch, FinishedBeam
from router.frontend.output_stream import Output, OutputStream
from router.frontend.parallel_sampling import Result, collect
from router.generation_request import GenerationRequest


class TextOf(Protocol):
    """Returns the text of an output."""

    def __call__(self, tokens: tuple[int, ...]) -> str: ...


async def beam_search(
    request: GenerationRequest,
    submit: Callable[[GenerationRequest], OutputStream],
    abandon: Callable[[OutputStream], None],
    text_of: TextOf,
    now: Callable[[], float],
) -> list[Result]:
    """Search, and return the `n` best outputs, best first. Raises the error that a step ends in."""
    assert request.length_penalty is not None
    assert request.max_tokens is not None
    search = BeamSearch(request.best_of, request.max_tokens, request.stop_token_ids, request.length_penalty)
    sampling = SamplingParams(temperature=0, logprobs=search.alternatives)
    workers: list[str] = [""]
    first: RequestEnded | None = None
    while search.running:
        streams: list[OutputStream] = []
        try:
            for beam in search.running:
                streams.append(submit(_step(request, sampling, beam, workers[beam.parent])))
                await asyncio.sleep(0)  # many beams of a long prompt take a while
            results = await asyncio.gather(*map(collect, streams))
        finally:
            for stream in streams:
                if not stream.ended:
                    abandon(stream)
        first = first or results[0].end
        workers = [stream.worker for stream in streams]
        search.extend([result.output.logprobs[0].top for result in results])
    assert first is not None
    return [_result(output, first, request, text_of, now()) for output in search.outputs[: request.n]]


def _step(request: GenerationRequest, sampling: SamplingParams, beam: Beam, worker: str) -> GenerationRequest:
    """The request for a beam's next token. `worker` computed the one before."""
    return replace(
        request,
        tokens=request.tokens + pack_tokens(beam.tokens),
        sampling=sampling,
        max_tokens=1,
        stop_token_ids=(),
        ttft=request.ttft if not beam.tokens else None,
        cached_on=worker,
    )


def _result(
    output: FinishedBeam, first: RequestEnded, request: GenerationRequest, text_of: TextOf, now: float
) -> Result:
    beam, most, summary = output.beam, request.sampling.logprobs, first.summary
    logprobs = [] if most is None else [replace(one, top=one.top[:most]) for one in beam.logprobs]
    usage = Usage(request.prompt, summary.usage.cached, len(beam.tokens))
    account = replace(summary, timeline=dataclasses.replace(summary.timeline, ended=now), usage=usage)
    ended = replace(first, outcome=Finished(output.reason), summary=account)
    return Result(Output(text_of(beam.tokens), list(beam.tokens), logprobs), ended)
