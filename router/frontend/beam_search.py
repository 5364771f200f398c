"""Beam search over the log-probabilities that a model reports.

The algorithm is that of transformers' `generate` with its default `early_stopping=False`. Each step ranks all
continuations of all beams by their summed log-probability. Of the best `width` of them those that end are finished
outputs. The best `width` that don't end go on. A finished output's score is its sum divided by its length, in output
tokens, to the power of `length_penalty`. The search ends when the outputs have `max_tokens`, or when no running beam
as it stands would score better than the worst of `width` finished outputs.

Each request asks for one token after the prompt and the beam so far. It goes where its parent ran. There the full pages
are shared by reference, and the partial one is copied, so that a beam costs one row of a step. A worker that dies costs
a recompute and changes nothing else, because a beam is its tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest

from msgspec.structs import replace

from baton.errors import InvalidRequest
from baton.messages import FinishReason, SamplingParams, TokenLogprob
from kvstore.keys import pack_tokens
from router.events import Finished, RequestEnded, Usage
from router.frontend.output_stream import Output, OutputStream, Result, collect
from router.generation_request import GenerationRequest

MOST_ALTERNATIVES = 128  # of one token, reported to a beam search; `baton.messages.SamplingParams` has the same limit


@dataclass(frozen=True)
class Beam:
    """The beginning of an output, or a whole one."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    total: float = 0.0  # sum of the log-probabilities
    parent: int = 0  # which of the beams before it goes on

    def extended(self, token: TokenLogprob, parent: int) -> Beam:
        return Beam((*self.tokens, token.token), (*self.logprobs, token), self.total + token.logprob, parent)


@dataclass(frozen=True)
class FinishedBeam:
    """A whole output."""

    beam: Beam
    score: float
    reason: FinishReason


class BeamSearch:
    """One search. `running` are the beams that need another token, best first."""

    def __init__(self, width: int, max_tokens: int, ends: Collection[int], length_penalty: float) -> None:
        """`ends`: tokens that end an output."""
        self._width, self._max_tokens, self._length_penalty = width, max_tokens, length_penalty
        self._ends = frozenset(ends)
        self.running: list[Beam] = [Beam()]
        self._finished: list[FinishedBeam] = []

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens each running beam must report: enough that `width` of them go on."""
        return alternatives(self._width, len(self._ends))

    @property
    def outputs(self) -> list[FinishedBeam]:
        """The finished outputs, best first."""
        return self._finished

    def extend(self, reports: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Take one step. `reports`: for each running beam its likeliest next tokens with their log-probabilities, best
        first."""
        candidates = [
            (beam.total + logprob, place, TokenLogprob(token, logprob, tuple(report)))
            for place, (beam, report) in enumerate(zip(self.running, reports, strict=True))
            for token, logprob in report
        ]
        best = nlargest(self.alternatives, candidates, key=lambda candidate: candidate[0])
        length = len(self.running[0].tokens) + 1
        full = length >= self._max_tokens
        going: list[Beam] = []
        for rank, (_, place, token) in enumerate(best):
            beam = self.running[place].extended(token, place)
            if not full and token.token not in self._ends:
                going.append(beam)
            elif rank < self._width:
                reason: FinishReason = "stop" if token.token in self._ends else "length"
                self._finished.append(FinishedBeam(beam, self._score(beam.total, length), reason))
        self._finished = nlargest(self._width, self._finished, key=lambda output: output.score)
        self.running = [] if full else going[: self._width]
        if self.running and len(self._finished) == self._width:
            possible = self._score(self.running[0].total, length)
            if possible <= self._finished[-1].score:
                self.running = []

    def _score(self, total: float, length: int) -> float:
        return total / length**self._length_penalty


def alternatives(width: int, ends: int) -> int:
    """The likeliest tokens that each beam of a search of that width reports, with so many tokens that end outputs."""
    return max(2, 1 + ends) * width


def check_width(width: int, ends: int) -> None:
    """Raise InvalidRequest for a search that would need more alternatives than workers report."""
    if (reported := alternatives(width, ends)) > MOST_ALTERNATIVES:
        raise InvalidRequest(
            f"{width} beams with {ends} tokens that end the output need {reported} alternatives for each token, and at "
            f"most {MOST_ALTERNATIVES} are reported; search with fewer beams"
        )


async def beam_search(
    request: GenerationRequest,
    submit: Callable[[GenerationRequest], OutputStream],
    abandon: Callable[[OutputStream], None],
    text_of: Callable[[tuple[int, ...]], str],
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
    return [
        _result(output, first, request, text_of(output.beam.tokens), now()) for output in search.outputs[: request.n]
    ]


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


def _result(output: FinishedBeam, first: RequestEnded, request: GenerationRequest, text: str, now: float) -> Result:
    beam, most, summary = output.beam, request.sampling.logprobs, first.summary
    logprobs = [] if most is None else [replace(one, top=one.top[:most]) for one in beam.logprobs]
    usage = Usage(request.prompt, summary.usage.cached, len(beam.tokens))
    account = replace(summary, timeline=dataclasses.replace(summary.timeline, ended=now), usage=usage)
    ended = replace(first, outcome=Finished(output.reason), summary=account)
    return Result(Output(text, list(beam.tokens), logprobs), ended)
