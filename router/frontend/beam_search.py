"""Beam search with the requests that it takes: one token of one beam is a request.

Each request asks for one token after the prompt and the beam so far. It goes where its parent ran. There the full pages
are shared by reference, and the partial one is copied, so that a beam costs one row of a step. A worker that dies costs
a recompute and changes nothing else, because a beam is its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from msgspec.structs import replace as changed

from baton.messages import SamplingParams
from kvstore.keys import pack_tokens
from router.events import Finished, RequestEnded, Summary, Usage
from router.frontend.beams import Beam, BeamSearch, FinishedBeam
from router.frontend.output_stream import Output, OutputStream
from router.frontend.parallel_sampling import Result, collect
from router.frontend.request_parsing import ValidatedRequest


class SubmitStep(Protocol):
    """Begins with one step of a beam; `cached_on` is the decode worker of the step before."""

    def __call__(self, validated: ValidatedRequest, *, cached_on: str) -> OutputStream: ...


class TextOf(Protocol):
    """Returns the text of an output."""

    def __call__(self, tokens: tuple[int, ...]) -> str: ...


async def beam_search(
    validated: ValidatedRequest,
    submit: SubmitStep,
    abandon: Callable[[OutputStream], None],
    text_of: TextOf,
    now: Callable[[], float],
) -> list[Result]:
    """Search, and return the `n` best outputs, best first. Raises the error that a step ends in."""
    assert validated.length_penalty is not None
    assert validated.max_tokens is not None
    search = BeamSearch(validated.best_of, validated.max_tokens, validated.stop_token_ids, validated.length_penalty)
    sampling = SamplingParams(temperature=0, logprobs=search.alternatives)
    workers: list[str] = [""]
    first: RequestEnded | None = None
    while search.running:
        streams: list[OutputStream] = []
        try:
            for beam in search.running:
                streams.append(submit(_step(validated, sampling, beam), cached_on=workers[beam.parent]))
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
    return [_result(output, first, validated, text_of, now()) for output in search.outputs[: validated.n]]


def _step(validated: ValidatedRequest, sampling: SamplingParams, beam: Beam) -> ValidatedRequest:
    """The request for a beam's next token."""
    return replace(
        validated,
        tokens=validated.tokens + pack_tokens(beam.tokens),
        prompt=[*validated.prompt, *beam.tokens],
        sampling=sampling,
        max_tokens=1,
        stop_token_ids=(),
        ttft=validated.ttft if not beam.tokens else None,
    )


def _result(
    output: FinishedBeam, first: RequestEnded, validated: ValidatedRequest, text_of: TextOf, now: float
) -> Result:
    beam, asked, summary = output.beam, validated.sampling.logprobs, first.summary
    told = [] if asked is None else [changed(one, top=one.top[:asked]) for one in beam.logprobs]
    usage = Usage(len(validated.prompt), summary.usage.cached, len(beam.tokens))
    account = Summary(replace(summary.timeline, ended=now), summary.submitted, usage, summary.served)
    ended = changed(first, outcome=Finished(output.reason), summary=account)
    return Result(Output(text_of(beam.tokens), list(beam.tokens), told), ended)
