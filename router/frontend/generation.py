"""The way of every door's requests: checked, tokenized where that takes no other request's time, submitted, abandoned.

A door (gRPC, HTTP) turns its client's request into a `GenerateRequest` of `baton.v1` and the output into its own
answer. Nothing behind this module learns which door a request came through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from msgspec import structs

from baton.clock import Clock
from baton.errors import BatonError, ContextTooLong
from baton.v1 import generation_pb2
from router.frontend.beam_search import TextOf, beam_search
from router.frontend.beams import check_width
from router.frontend.client_sessions import RouterDriver
from router.frontend.grammar_checker import GrammarChecker
from router.frontend.identity import caller
from router.frontend.output_stream import OutputStream
from router.frontend.parallel_sampling import ReadableStream, ResultSet, best_of
from router.frontend.request_parsing import ValidatedRequest, parse_generate_request
from router.frontend.served_model import ServedModel
from router.frontend.tokenizer_threads import TokenizerThreads
from router.tracing.origin import origin
from router.tracing.request_spans import RequestSpans, SpanSink
from router.tracing.span import Value

T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """One output under way. Call `close` when its client needs no more of it."""

    validated: ValidatedRequest
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
        self._grammars = GrammarChecker(driver.model)

    async def close(self) -> None:
        """End what runs beside the service."""
        await self._grammars.close()

    @property
    def model(self) -> ServedModel:
        return self.driver.model

    def fingerprint(self, model: str) -> str:
        """What decides the tokens of a request that has begun to be answered, besides the request: see
        `kvstore.keys.system_fingerprint`. `model`: as the request names it."""
        return self.driver.fingerprint(self.model.adapter_of(model))

    async def start(
        self, request: generation_pb2.GenerateRequest, request_id: str, received: float, deadline: float | None = None
    ) -> list[Generation]:
        """Check and submit a request of this task's caller that came at `received`. Return its outputs, one for each
        that the client gets. Times are seconds of the clock. Raises BatonError."""
        spans = self._traced(request_id, received)
        try:
            return await self._start(request, request_id, received, deadline, spans)
        except BatonError as error:
            if spans is not None:
                spans.refused(error, self.clock.now())
            raise

    async def _start(
        self,
        request: generation_pb2.GenerateRequest,
        request_id: str,
        received: float,
        deadline: float | None,
        spans: RequestSpans | None,
    ) -> list[Generation]:
        validated = await self._check(request, request_id)
        complete: Callable[[], None] | None = None
        submit = partial(self.driver.submit, received=received, deadline=deadline, tenant=caller.get().tenant)
        if spans is not None:
            spans.add_attributes(_asked(validated), 1 if validated.length_penalty is not None else validated.best_of)
            submit, complete = partial(submit, spans=spans), spans.complete
        if validated.length_penalty is not None:
            search = beam_search(validated, submit, self.driver.abandon, self._text_of(validated), self.clock.now)
            return _chosen(validated, ResultSet(validated.n, received, search, complete))
        asked = validated.sampling.logprobs
        if validated.best_of > validated.n and asked is None:  # the choice needs them
            validated = replace(validated, sampling=structs.replace(validated.sampling, logprobs=0))
        streams = await self._submitted(validated, submit)
        if complete is not None:
            complete()
        if validated.best_of > validated.n:
            choice = best_of(streams, validated.n, asked, self.driver.abandon)
            return _chosen(validated, ResultSet(validated.n, received, choice))
        return [
            Generation(validated.sample(number), stream, partial(self._close, stream))
            for number, stream in enumerate(streams)
        ]

    async def _check(self, request: generation_pb2.GenerateRequest, request_id: str) -> ValidatedRequest:
        """Check a request of this task's caller. Raises BatonError."""
        check = partial(parse_generate_request, request, request_id, self.model, self.driver.draw_seed)
        validated: ValidatedRequest = await self.apart(request.ByteSize(), check)
        who = caller.get()
        if who.max_prompt_tokens is not None and len(validated.prompt) > who.max_prompt_tokens:
            raise ContextTooLong(
                f"a prompt of {len(validated.prompt)} tokens exceeds the {who.max_prompt_tokens} that the API key "
                f"{who.name!r} may send"
            )
        if validated.length_penalty is not None:
            check_width(validated.best_of, len(validated.stop_token_ids))
        if (grammar := validated.sampling.grammar) is not None:
            checked = structs.replace(validated.sampling, grammar=await self._grammars.check(grammar, who.tenant))
            validated = replace(validated, sampling=checked)
        return validated

    async def _submitted(self, validated: ValidatedRequest, submit: Callable[..., OutputStream]) -> list[OutputStream]:
        """Submit each sample in a turn of its own: many samples of a long prompt take a while."""
        streams = [submit(validated.sample(0))]
        try:
            for number in range(1, validated.best_of):
                await asyncio.sleep(0)
                streams.append(submit(validated.sample(number), leader=streams[0]))
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

    def _text_of(self, validated: ValidatedRequest) -> TextOf:
        """The text of a whole output."""

        def text_of(tokens: tuple[int, ...]) -> str:
            text = validated.text_stream(self.model.tokenizer)
            return text.feed(tokens).text + text.flush().text

        return text_of

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes: here if that is quick, else on a thread. Raises Overloaded."""
        return await self._tokenizing.run(size, work, caller.get().tenant)


def _chosen(validated: ValidatedRequest, results: ResultSet) -> list[Generation]:
    return [Generation(validated, stream, results.close) for stream in results.streams]


def _asked(validated: ValidatedRequest) -> dict[str, Value]:
    """What a request asks for, as its span tells it."""
    sampling = validated.sampling
    told: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": validated.n,
        "baton.priority": validated.priority,
    }
    if sampling.top_k:
        told["gen_ai.request.top_k"] = sampling.top_k
    if validated.max_tokens is not None:
        told["gen_ai.request.max_tokens"] = validated.max_tokens
    return told
