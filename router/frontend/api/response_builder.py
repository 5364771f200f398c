"""What the response builders of all HTTP APIs share: outputs of one or several choices as JSON, whole or in chunks.

Pure: `streaming.py` reads the outputs and sends what stands here. A whole response is a struct, of which `openapi.py`
derives its schema. The chunks of a stream are objects with such structs in them.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from baton.errors import BatonError
from baton.messages import PromptTokenLogprob, TokenLogprob
from router.events import RequestEnded
from router.frontend.api import errors
from router.frontend.api.token_logprobs import Json, TokenNames, added_texts, cut_texts
from router.frontend.chat.deltas import ChatDelta
from router.frontend.chat.parser import ChatParser
from router.frontend.detokenizer import MARK, TextStream
from router.frontend.output_stream import Output
from router.not_cached import Reason

Count: TypeAlias = Annotated[int, Meta(ge=0)]
StopCause: TypeAlias = Literal["stop", "length", "tool_calls"]  # baton.messages.FinishReason, and calls


class NotCachedTokens(Struct):
    """Why prompt tokens were not cached, as far as the client may know: `router.not_cached` has the reasons."""

    reason: Reason  # of the first page
    first_token: Count  # of that page, in its prompt
    tokens: dict[Reason, Count]  # estimates, which add up to those not cached


class PromptTokensDetails(Struct):
    """Prompt tokens that came from caches, and if the client asks for it, why the others did not."""

    cached_tokens: Count
    not_cached: NotCachedTokens | UnsetType = UNSET


class Usage(Struct, kw_only=True):
    """Tokens over all choices. A prompt counts once, however many choices it has."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: dict[Literal["reasoning_tokens"], Count] | UnsetType = UNSET


class Metrics(Struct, kw_only=True):
    """Times of the first choice, in milliseconds: vLLM's names, and every hop since receipt."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    hops_ms: dict[str, float]


PromptLogprobs: TypeAlias = list[dict[str, Json] | None]  # as vLLM has them, by token id


class OpenAiResponse(Struct, kw_only=True, tag_field="object"):
    """What completions and chat completions have in common."""

    id: str
    created: Count
    model: str
    system_fingerprint: str | None
    usage: Usage
    metrics: Metrics


@dataclass
class Choice:
    """One output of a request, as far as it has come."""

    index: int
    prompt: Sequence[int]
    leader: Choice | None = None  # the first choice of its prompt; none: it is that itself
    text: list[str] = field(default_factory=list[str])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[PromptTokenLogprob] = field(default_factory=list[PromptTokenLogprob])  # the leader's alone
    characters: int = 0  # of the text so far
    stream: TextStream | None = None  # tells what each token adds to the text
    token_texts: list[str] = field(default_factory=list[str])  # of the tokens in `logprobs`
    whole_tokens: int = 0  # of these: all of what they add is in the text
    offset: int = 0  # of the next token's text
    end: RequestEnded | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    parser: ChatParser | None = None  # of a chat

    @property
    def chat(self) -> ChatParser:
        assert self.parser is not None
        return self.parser

    def add_piece(self, piece: Output) -> None:
        if self.parser is not None:
            self.parser.feed(piece.text)
        self.text.append(piece.text)
        self.tokens += piece.tokens
        self.prompt_logprobs += piece.prompt_logprobs
        self._take_tokens(piece)

    def _take_tokens(self, piece: Output) -> None:
        self.characters += len(piece.text) - piece.text.count(MARK)
        self.logprobs += piece.logprobs
        if self.stream is not None:
            self.token_texts += added_texts(self.stream, (one.token for one in piece.logprobs))

    def released(self, piece: Output) -> tuple[list[TokenLogprob], list[str]]:
        """Take the tokens of a stream's piece. Return those whose text has been given out, and these texts. Others wait
        for the end of a character, or because a stop string may take them back."""
        if self.stream is None:  # no log-probabilities are wanted
            return [], []
        self._take_tokens(piece)
        if not self.token_texts:
            return [], []
        end, count = self.offset, 0
        for number, text in enumerate(self.token_texts, start=1):
            end += len(text)
            if end > self.characters:
                break
            if text:
                self.offset, count = end, number
        ready = self.logprobs[:count], self.token_texts[:count]
        del self.logprobs[:count], self.token_texts[:count]
        return ready

    def finish(self) -> None:
        """The output is whole."""
        if self.parser is not None:
            self.finish_chat()
        self.finish_tokens()

    def finish_tokens(self) -> None:
        """No more tokens come: those that are left have the rest of the text."""
        if self.stream is not None and self.token_texts:
            self.token_texts[-1] += self.stream.flush().text  # bytes that have become no character
        self.token_texts, self.whole_tokens = cut_texts(self.token_texts, self.characters - self.offset)

    def finish_chat(self) -> Sequence[ChatDelta]:
        """Return what the parser held back, once the output has ended."""
        return self.chat.finish(cut=self.finish_reason == "length")

    @property
    def first_of_prompt(self) -> bool:
        return self.leader is None

    @property
    def prompt_scores(self) -> Sequence[PromptTokenLogprob]:
        """Log-probabilities of the prompt's tokens, without the first."""
        return (self.leader or self).prompt_logprobs

    @property
    def finish_reason(self) -> StopCause:
        assert self.end is not None
        reason = self.end.finish_reason()
        return "tool_calls" if reason == "stop" and self.parser and self.parser.output.calls else reason


class ResponseOptions(Struct, frozen=True):
    """What a response is to contain."""

    request: Any  # as it came
    id: str
    model: str
    created: int  # seconds since the epoch
    fingerprint: Callable[[], str | None]  # to be asked once the response has begun
    names: TokenNames
    logprobs: bool = False
    token_ids: bool = False
    usage_at_end: bool = False
    usage_always: bool = False
    echo: str | None = None  # text before the output
    prompt_logprobs: bool = False
    reasoning_end: str | None = None  # the text that ends reasoning
    not_cached: bool = False  # the usage tells why prompt tokens were not cached
    prompt_only: bool = False  # the output is not shown: it was asked for no tokens


class ResponseBuilder:
    """Builds one request's response. Each API has a builder of its own."""

    prefix: str  # of ids
    chunk_kind: str  # of OpenAI's chunks
    end_of_stream = b"data: [DONE]\n\n"

    def __init__(self, options: ResponseOptions, choices: Sequence[Choice]) -> None:
        self.options = options
        self.choices = choices

    # --- streams -----------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[Json]:
        """Yield the chunks before all output."""
        yield from ()

    def add_piece(self, choice: Choice, piece: Output) -> None:
        choice.add_piece(Output(prompt_logprobs=piece.prompt_logprobs) if self.options.prompt_only else piece)

    def output(self, choice: Choice, piece: Output) -> Sequence[bytes]:
        """Return events with new output; none if there is nothing that the client would see."""
        choice.prompt_logprobs += piece.prompt_logprobs
        choice.tokens += piece.tokens
        if (delta := self._delta(choice, piece)) is None:
            return ()
        if self.options.usage_always:
            return (self.event(self._chunk([delta])),)
        before, behind = self._frame
        return (before + msgspec.json.encode(delta) + behind,)

    @cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """The event of a chunk, before and behind its one choice. It is the same for all chunks of a stream."""
        before, behind = self.event(self._chunk([])).split(b"[]", 1)  # the choices stand before what a client names
        return before + b"[", b"]" + behind

    def _shows_tokens(self, piece: Output) -> bool:
        """Whether a piece has ids of tokens to show."""
        return self.options.token_ids and bool(piece.tokens)

    def ending(self, choice: Choice) -> Iterator[Json]:
        """Yield the chunks after a choice's output, with the reason why it ended."""
        raise NotImplementedError

    def event(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def sign_of_life(self) -> bytes:
        """What tells clients and proxies that a quiet stream goes on."""
        return b": keep-alive\n\n"

    def failed(self, error: BatonError) -> Json | Struct:
        return errors.body_of(error)

    def closing(self) -> Iterator[Json]:
        """Yield the chunk with the usage, if it was asked for."""
        if self.options.usage_at_end:
            yield self._chunk([]) | {"usage": self.usage(), "metrics": self.metrics()}

    def _chunk(self, choices: list[Any]) -> Json:
        chunk: Json = {"object": self.chunk_kind, "choices": choices, **self._about}
        if self.options.usage_always:
            chunk["usage"] = self.usage()
        elif self.options.usage_at_end:
            chunk["usage"] = None
        return chunk

    def _delta(self, choice: Choice, piece: Output) -> Any:
        raise NotImplementedError

    # --- whole responses ---------------------------------------------------------------------------------------------

    def whole(self) -> Struct:
        """The response once every choice has ended."""
        raise NotImplementedError

    @cached_property
    def _about(self) -> Json:
        """What is alike in all parts of a response. The first of them asks for the fingerprint."""
        own = self.options
        return {"id": own.id, "created": own.created, "model": own.model, "system_fingerprint": own.fingerprint()}

    def prompt_logprobs(self, choice: Choice) -> PromptLogprobs:
        """Log-probabilities of the prompt's tokens as vLLM has them: the token itself, then the likeliest ones."""
        scores: PromptLogprobs = [None]
        own = TokenNames(self.options.names.tokenizer).own
        for one in choice.prompt_scores:
            ranked = {token: (value, rank) for rank, (token, value) in enumerate(one.top, start=1)}
            ranked = {one.token: (one.logprob, one.rank)} | ranked
            scores.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": own(token)}
                    for token, (value, rank) in ranked.items()
                }
            )
        return scores

    # --- both --------------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Tokens as far as they have come."""
        prompt = sum(len(choice.prompt) for choice in self.choices if choice.first_of_prompt)
        completion = sum(len(choice.tokens) for choice in self.choices)
        ended = [choice.end for choice in self.choices if choice.first_of_prompt and choice.end is not None]
        cached = sum(end.summary.usage.cached for end in ended)
        reasoning = self._reasoning_tokens()
        return Usage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached, self._not_cached(ended)),
            completion_tokens_details=UNSET if reasoning is None else {"reasoning_tokens": reasoning},
        )  # fmt: skip

    def _not_cached(self, ended: Sequence[RequestEnded]) -> NotCachedTokens | UnsetType:
        """Why tokens of these prompts were not cached, if it is asked for; the first page is the first prompt's."""
        known = [why.for_client() for end in ended if (why := end.summary.not_cached) is not None]
        if not known or not self.options.not_cached:
            return UNSET
        tokens: Counter[Reason] = Counter()
        for why in known:
            tokens.update(why.tokens)
        return NotCachedTokens(known[0].reason, known[0].token, dict(tokens))

    def _reasoning_tokens(self) -> int | None:
        """Tokens of reasoning over all samples; None if they are not known."""
        end, tokenizer = self.options.reasoning_end, self.options.names.tokenizer
        parsers = [(choice.parser, choice.tokens) for choice in self.choices if choice.parser]
        if end is None or tokenizer is None or not parsers:
            return None
        return sum(parser.reasoning_tokens(tokens, tokenizer, end) for parser, tokens in parsers)

    def metrics(self) -> Metrics:
        """Return the times of the first choice, which has ended."""
        choice = self.choices[0]
        assert choice.end is not None
        line = choice.end.summary.timeline
        generation = line.between("first_token", "ended")
        return Metrics(
            time_to_first_token_ms=_ms(line.ttft),
            generation_time_ms=_ms(generation),
            queue_time_ms=_ms(line.between("received", "placed")),
            mean_itl_ms=_ms(line.tpot(len(choice.tokens))),
            tokens_per_second=round(len(choice.tokens) / generation, 3) if generation else None,
            hops_ms={hop: round(seconds * 1_000, 3) for hop, seconds in line.hops().items()},
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1_000, 3)
