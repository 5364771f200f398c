"""The way of every door's requests: checked, tokenized where that takes no other request's time, submitted, abandoned.

A door (gRPC, HTTP) reads the fields that its client has set, and turns the output into its own answer. Nothing behind
this module learns which door a request came through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from baton.clock import Clock
from baton.errors import BatonError, ContextTooLong
from router.frontend.beam_search import TextOf, beam_search, check_width
from router.frontend.client_sessions import RouterDriver
from router.frontend.detokenizer import TextStream
from router.frontend.grammar_checker import GrammarChecker
from router.frontend.identity import caller
from router.frontend.output_stream import OutputStream, ReadableStream, ResultSet, best_of
from router.frontend.request_parsing import Fields, generation_request
from router.frontend.served_model import ServedModel
from router.frontend.tokenizer_threads import TokenizerThreads
from router.generation_request import GenerationRequest
from router.tracing.origin import origin
from router.tracing.request_spans import RequestSpans, SpanSink
from router.tracing.span import Value

T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """One output under way. Call `close` when its client needs no more of it."""

    request: GenerationRequest
    stream: ReadableStream
    close: Callable[[], None]  # cancels what has not ended


class Apart(Protocol):
    """Does work in proportion to so many bytes where it holds no other request up."""

    async def __call__(self, size: int, work: Callable[[], T]) -> T: ...


class GenerationService:
    """Starts requests. One object serves all doors."""

    def __init__(
        self,
        driver: RouterDriver,
        clock: Clock,
        tokenizing: TokenizerThreads,
        *,
        tracer: SpanSink | None = None,
    ) -> None:
        """`tracer`: takes the spans of requests; none: there are none."""
        self.driver = driver
        self.clock = clock
        self.tracer = tracer
        self._tokenizing = tokenizing
        self.grammars = GrammarChecker(driver.model)

    async def close(self) -> None:
        """End what runs beside the service."""
        await self.grammars.close()

    @property
    def model(self) -> ServedModel:
        return self.driver.model

    def fingerprint(self, model: str) -> str:
        """What decides the tokens of a request that has begun to be answered, besides the request: see
        `kvstore.keys.system_fingerprint`. `model`: as the request names it."""
        return self.driver.fingerprint(self.model.adapter_of(model))

    async def start(
        self, name: str, received: float, size: int, read: Callable[[], Fields], deadline: float | None = None,
        *, further: bool = False,
    ) -> list[Generation]:  # fmt: skip
        """Check and submit a request of this task's caller that came at `received`. Return its outputs, one for each
        that the client gets. `read` returns its fields, whose size is about so many bytes. `further`: another prompt
        of the same body has begun. Times are seconds of the clock. Raises BatonError."""
        spans = self._traced(name, received)
        try:
            request = await self._checked(name, size, read)
            request = replace(request, received=received, deadline=deadline, tenant=caller.get().tenant)
            if spans is not None:
                outputs = 1 if request.length_penalty is not None else request.best_of
                spans.add_attributes(_span_attributes(request), outputs)
            return await self._begun(request, spans, further)
        except BatonError as error:
            if spans is not None:
                spans.refused(error, self.clock.now())
            raise

    async def _begun(self, request: GenerationRequest, spans: RequestSpans | None, further: bool) -> list[Generation]:
        complete = None if spans is None else spans.complete
        submit = partial(self.driver.submit, spans=spans, further=further)
        if request.length_penalty is not None:
            search = beam_search(request, submit, self.driver.abandon, self._text_of(request), self.clock.now)
            return _chosen(request, ResultSet(request.n, request.received, search, complete))
        logprobs = request.sampling.logprobs
        if request.best_of > request.n and logprobs is None:  # the choice needs them
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        streams = await self._submitted(request, submit)
        if complete is not None:
            complete()
        if request.best_of > request.n:
            choice = best_of(streams, request.n, logprobs, self.driver.abandon)
            return _chosen(request, ResultSet(request.n, request.received, choice))
        return [
            Generation(request.sample(number), stream, partial(self._close, stream))
            for number, stream in enumerate(streams)
        ]

    async def _checked(self, name: str, size: int, read: Callable[[], Fields]) -> GenerationRequest:
        """Return the checked request of this task's caller. Raises BatonError."""
        model, draw_seed = self.model, self.driver.draw_seed
        request = await self.apart(size, lambda: generation_request(read(), name, model, draw_seed))
        identity = caller.get()
        if identity.max_prompt_tokens is not None and request.prompt > identity.max_prompt_tokens:
            raise ContextTooLong(
                f"The maximum context length is {identity.max_prompt_tokens} tokens for the API key {identity.name!r}. "
                f"However, your prompt contains {request.prompt} input tokens; send fewer",
                prompt=request.prompt, context=identity.max_prompt_tokens,
            )  # fmt: skip
        if request.length_penalty is not None:
            check_width(request.best_of, len(request.stop_token_ids))
        if (grammar := request.sampling.grammar) is not None:
            grammar = await self.grammars.check(grammar, identity.tenant)
            return replace(request, sampling=replace(request.sampling, grammar=grammar))
        return request

    async def _submitted(self, request: GenerationRequest, submit: Callable[..., OutputStream]) -> list[OutputStream]:
        """Submit each sample in a turn of its own: many samples of a long prompt take a while."""
        streams = [submit(request.sample(0))]
        try:
            for number in range(1, request.best_of):
                await asyncio.sleep(0)
                streams.append(submit(request.sample(number), leader=streams[0]))
            await asyncio.sleep(0)
        except BaseException:
            for stream in streams:
                self._close(stream)
            raise
        return streams

    def _traced(self, request_id: str, received: float) -> RequestSpans | None:
        """What collects the spans of a request of this task's caller; None where tracing is off."""
        if self.tracer is None:
            return None
        attributes: dict[str, Value] = {"gen_ai.request.id": request_id, "gen_ai.response.model": self.model.name}
        if tenant := caller.get().tenant:
            attributes["baton.tenant"] = tenant
        return RequestSpans(self.tracer, origin.get(), received, attributes)

    def _close(self, stream: OutputStream) -> None:
        if not stream.ended:
            self.driver.abandon(stream)

    def _text_of(self, request: GenerationRequest) -> TextOf:
        """The text of a whole output."""

        def text_of(tokens: tuple[int, ...]) -> str:
            text = TextStream.of(self.model.tokenizer, request)
            return text.feed(tokens).text + text.flush().text

        return text_of

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes: here if that is quick, else on a thread. Raises Overloaded."""
        return await self._tokenizing.run(size, work, caller.get().tenant)


def _chosen(request: GenerationRequest, results: ResultSet) -> list[Generation]:
    return [Generation(request, stream, results.close) for stream in results.streams]


def _span_attributes(request: GenerationRequest) -> dict[str, Value]:
    """Return what a request sets, by the names of OpenTelemetry."""
    sampling = request.sampling
    attributes: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": request.n,
        "baton.priority": request.priority,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if request.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.max_tokens
    return attributes
