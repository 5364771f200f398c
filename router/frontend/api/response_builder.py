"""The answers of the HTTP APIs, and that of completions: outputs of one or several samples as JSON, whole or in chunks.

Pure: the doors read the outputs and send what stands here.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from baton.errors import BatonError
from baton.messages import PromptTokenLogprob, TokenLogprob
from router.events import Finished, RequestEnded
from router.frontend.api import errors
from router.frontend.api.token_logprobs import Json, TokenNames, added_texts
from router.frontend.chat.families import ChatParser
from router.frontend.detokenizer import TextStream
from router.frontend.output_stream import Output

_HOPS = ("placed", "accepted", "prefill_sent", "prefilled", "started", "first_token", "ended")


@dataclass
class Sample:
    """One output of a request, as far as it has come."""

    index: int
    prompt: Sequence[int]
    leader: Sample | None = None  # the first sample of its prompt; none: it is that itself
    text: list[str] = field(default_factory=list[str])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[PromptTokenLogprob] = field(default_factory=list[PromptTokenLogprob])  # the leader's alone
    characters: int = 0  # of the text so far
    stream: TextStream | None = None  # tells what each token adds to the text
    token_texts: list[str] = field(default_factory=list[str])  # of the tokens in `logprobs`
    offset: int = 0  # of the next token's text
    end: RequestEnded | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    parser: ChatParser | None = None  # of a chat

    @property
    def chat(self) -> ChatParser:
        assert self.parser is not None
        return self.parser

    def take(self, piece: Output) -> None:
        """Add a piece to the output."""
        if self.parser is not None:
            self.parser.feed(piece.text)
        self.text.append(piece.text)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.token_texts += self.added(piece.logprobs)
        self.prompt_logprobs += piece.prompt_logprobs

    def added(self, logprobs: Sequence[TokenLogprob]) -> list[str]:
        """Return what the next tokens add to the text."""
        return added_texts(self.stream, (one.token for one in logprobs)) if self.stream is not None else []

    def finish(self) -> None:
        """The output is whole."""
        if self.parser is not None:
            self.parser.finish()
        if self.stream is not None and self.token_texts:
            self.token_texts[-1] += self.stream.flush().text  # bytes that have become no character

    @property
    def first_of_prompt(self) -> bool:
        return self.leader is None

    @property
    def prompt_scores(self) -> Sequence[PromptTokenLogprob]:
        """Log-probabilities of the prompt's tokens, without the first."""
        return (self.leader or self).prompt_logprobs

    @property
    def finish_reason(self) -> str:
        assert self.end is not None
        assert isinstance(self.end.outcome, Finished)
        reason = self.end.outcome.reason
        return "tool_calls" if reason == "stop" and self.parser and self.parser.output.calls else reason


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer is to contain."""

    id: str
    model: str
    created: int  # seconds since the epoch
    fingerprint: Callable[[], str | None]  # to be asked once the answer has begun
    names: TokenNames
    logprobs: bool = False
    token_ids: bool = False
    usage_at_end: bool = False
    usage_always: bool = False
    echo: str | None = None  # text before the output
    prompt_logprobs: bool = False
    reasoning_end: int | None = None  # the token that ends reasoning
    prompt_only: bool = False  # the output is not shown: it was asked for no tokens


class Answer:
    """One request's answer. The kinds of APIs differ in their choices."""

    kind: str
    chunk_kind: str
    end_of_stream = b"data: [DONE]\n\n"

    def __init__(self, wanted: AnswerOptions, samples: Sequence[Sample]) -> None:
        self.wanted = wanted
        self.samples = samples

    # --- streams -----------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[Json]:
        """Yield the chunks before all output."""
        yield from ()

    def take(self, sample: Sample, piece: Output) -> None:
        """Add a piece to a sample's output."""
        sample.take(Output(prompt_logprobs=piece.prompt_logprobs) if self.wanted.prompt_only else piece)

    def ended(self, sample: Sample) -> None:
        """A sample's output is whole."""
        sample.finish()

    def chunks(self, sample: Sample, piece: Output) -> Iterator[Json]:
        """Yield chunks with new output; none if there is nothing that the client would see."""
        sample.prompt_logprobs += piece.prompt_logprobs
        sample.tokens += piece.tokens
        if (choice := self._delta(sample, piece)) is not None:
            yield self._chunk([choice])

    def _shows_tokens(self, piece: Output) -> bool:
        """Whether a piece has more than text to show."""
        return bool((self.wanted.logprobs and piece.logprobs) or (self.wanted.token_ids and piece.tokens))

    def ending(self, sample: Sample) -> Iterator[Json]:
        """Yield the chunk with the reason why a sample ended."""
        yield self._chunk([self._end(sample)])

    def event(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def failed(self, error: BatonError) -> Json:
        """An error as this API has it."""
        return errors.body_of(error)

    def closing(self) -> Iterator[Json]:
        """Yield the chunk with the usage, if it was asked for."""
        if self.wanted.usage_at_end:
            yield self._chunk([]) | {"usage": self.usage(), "metrics": self.metrics()}

    def _chunk(self, choices: list[Json]) -> Json:
        wanted = self.wanted
        chunk: Json = {
            "id": wanted.id,
            "object": self.chunk_kind,
            "created": wanted.created,
            "model": wanted.model,
            "system_fingerprint": wanted.fingerprint(),
            "choices": choices,
        }
        if wanted.usage_always:
            chunk["usage"] = self.usage()
        elif wanted.usage_at_end:
            chunk["usage"] = None
        return chunk

    def _delta(self, sample: Sample, piece: Output) -> Json | None:
        raise NotImplementedError

    def _end(self, sample: Sample) -> Json:
        raise NotImplementedError

    # --- whole answers -----------------------------------------------------------------------------------------------

    def whole(self) -> Json:
        """The answer once every sample has ended."""
        return {
            "id": self.wanted.id,
            "object": self.kind,
            "created": self.wanted.created,
            "model": self.wanted.model,
            "system_fingerprint": self.wanted.fingerprint(),
            "choices": [self._choice(sample) for sample in self.samples],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def _choice(self, sample: Sample) -> Json:
        raise NotImplementedError

    def prompt_logprobs(self, sample: Sample) -> list[Json | None]:
        """Log-probabilities of the prompt's tokens as vLLM has them: the token itself, then the likeliest ones."""
        told: list[Json | None] = [None]
        own = replace(self.wanted.names, as_ids=False).own
        for one in sample.prompt_scores:
            ranked = {token: (value, rank) for rank, (token, value) in enumerate(one.top, start=1)}
            ranked = {one.token: (one.logprob, one.rank)} | ranked
            told.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": own(token)}
                    for token, (value, rank) in ranked.items()
                }
            )
        return told

    # --- both --------------------------------------------------------------------------------------------------------

    def usage(self) -> Json:
        """Tokens over all samples, as far as they have come. A prompt counts once, however many samples it has."""
        prompt = sum(len(sample.prompt) for sample in self.samples if sample.first_of_prompt)
        completion = sum(len(sample.tokens) for sample in self.samples)
        ended = [sample.end for sample in self.samples if sample.first_of_prompt and sample.end is not None]
        cached = sum(end.summary.usage.cached for end in ended)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if (reasoning := self._reasoning_tokens()) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _reasoning_tokens(self) -> int | None:
        """Tokens of reasoning over all samples; None if they are not known."""
        end = self.wanted.reasoning_end
        counts = [sample.parser.reasoning_tokens(sample.tokens, end) for sample in self.samples if sample.parser]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def metrics(self) -> Json:
        """Times of the first sample, in milliseconds: vLLM's names, and every hop since receipt."""
        sample = self.samples[0]
        assert sample.end is not None
        line = sample.end.summary.timeline
        generation = line.between("first_token", "ended")
        tpot = line.tpot(len(sample.tokens))
        return {
            "time_to_first_token_ms": _ms(line.ttft),
            "generation_time_ms": _ms(generation),
            "queue_time_ms": _ms(line.between("received", "placed")),
            "mean_itl_ms": _ms(tpot),
            "tokens_per_second": round(len(sample.tokens) / generation, 3) if generation else None,
            "hops_ms": {hop: ms for hop in _HOPS if (ms := _ms(line.between("received", hop))) is not None},
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1_000, 3)
