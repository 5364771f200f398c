"""Cascades: names behind which a small model answers, or a large one where the small one is unsure.

Owns the choice. The small model's first tokens are held until their mean log-probability is known. Then they go to the
client with the rest, or the request is repeated on the large model. Both models' services do everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from statistics import fmean
from typing import Any, TypeAlias

import msgspec

from baton.config import CascadeConfig
from baton.errors import BatonError, ModelError, UnsupportedField
from baton.futures import looked_at
from baton.operator_api import CascadeChoice
from baton.timeline import Timeline
from router.events import CascadeDecided, Failed, RequestEnded, Summary
from router.frontend.generation import Fields, Generation, GenerationService
from router.frontend.output_stream import Output, OutputStream, ReadableStream, Result, ResultStream
from router.frontend.served_model import ServedModel
from router.queueing.admission import ModelLimits

log = logging.getLogger(__name__)

Start: TypeAlias = Callable[..., Awaitable[list[Generation]]]


class Cascade(GenerationService):
    """The service of a cascade's name. Its checks, tokens and prompts are those of the small model."""

    def __init__(self, name: str, config: CascadeConfig, small: GenerationService, large: GenerationService) -> None:
        """Raises ModelError where the models read a text differently."""
        super().__init__(small.driver, small.clock, small.tokenizing, tracer=small.tracer)
        self.grammars = small.grammars
        self.config, self._name, self.small, self.large = config, name, small, large
        check_texts(name, small.model, large.model)
        both = small.model.limits, large.model.limits
        limits = ModelLimits(min(one.vocab_size for one in both), min(one.max_context for one in both))
        self._served = replace(small.model, name=name, aliases=(), adapters={}, limits=limits)
        one, other = small.model.name, large.model.name
        self.driver.cascaded.update(
            {(name, one, "confident"): 0, (name, other, "unsure"): 0, (name, other, "class"): 0}
        )

    @property
    def model(self) -> ServedModel:
        return self._served

    def fingerprint(self, model: str) -> str:
        both = [service.fingerprint("") for service in (self.small, self.large)]
        return "-".join(both) if all(both) else ""

    async def start(
        self, name: str, received: float, size: int, read: Callable[[], Fields], deadline: float | None = None,
        *, further: bool = False, cascade: CascadeChoice | None = None,
    ) -> list[Generation]:  # fmt: skip
        fields: Fields = await self.apart(size, lambda: dict(read()))
        n = fields.get("n", 1)
        if fields.get("best_of", n) > n or "beam_search" in fields:
            raise UnsupportedField(
                f"best_of or a beam search is set, and the cascade {self._name!r} chooses by an output's first tokens; "
                f"leave it out, or name the model {self.large.model.name!r}"
            )

        async def start(service: GenerationService, why: CascadeChoice | None = None, **more: Any) -> list[Generation]:
            own = {**fields, "model": service.model.name, **more}
            return await service.start(name, received, size, lambda: own, deadline, further=further, cascade=why)

        if fields.get("priority", 0) in self.config.classes:
            self.count(choice := self.choice(self.large, "class"))
            return await start(self.large, choice)
        firsts = await start(self.small, logprobs=fields.get("logprobs", 0))
        return _Choosing(self, firsts, start, received, scored="logprobs" in fields).generations

    def choice(self, chosen: GenerationService, reason: Any, **more: Any) -> CascadeChoice:
        """Return the choice of one of the models."""
        return CascadeChoice(
            model=self._name, small=self.small.model.name, chosen=chosen.model.name, reason=reason,
            min_logprob=self.config.min_logprob, **more,
        )  # fmt: skip

    def count(self, choice: CascadeChoice) -> None:
        self.driver.cascaded[choice.model, choice.chosen, choice.reason] += 1


def check_texts(name: str, small: ServedModel, large: ServedModel) -> None:
    """Raise ModelError where the models of a cascade read a text differently."""
    if _texts(small) != _texts(large):
        raise ModelError(
            f"cascade {name!r}: {small.name!r} and {large.name!r} have different tokenizers or chat templates; choose "
            "models of one family"
        )


def _texts(model: ServedModel) -> object:
    """What decides the tokens of a text and of a chat."""
    file, template = model.tokenizer_file, model.chat_template
    return file and msgspec.json.decode(file.read_bytes()), template


class _Choosing:
    """One request, until it is known which model answers it."""

    def __init__(
        self, cascade: Cascade, firsts: list[Generation], start: Start, received: float, *, scored: bool
    ) -> None:
        """`firsts`: the small model's outputs. `start` repeats the request on a service. `scored`: the client gets
        log-probabilities."""
        self._cascade, self._start, self._received = cascade, start, received
        self._running = firsts
        self._streams = [ChosenStream(scored=scored) for _ in firsts]
        self.generations = [
            Generation(first.request, stream, self._close) for first, stream in zip(firsts, self._streams, strict=True)
        ]
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(looked_at)

    def _close(self) -> None:
        self._task.cancel()
        for generation in self._running:
            generation.close()

    async def _run(self) -> None:
        try:
            heads = await asyncio.gather(*(self._head(first.stream) for first in self._running))
            await self._choose(heads)
        except BatonError as error:
            self._fail(error)
        except Exception:
            log.exception("failed in the router")
            self._fail(BatonError("internal error; the router's log says more"))

    async def _head(self, stream: ReadableStream) -> list[Output]:
        """Read an output until it has the tokens that decide, or has ended."""
        head: list[Output] = []
        while sum(len(piece.tokens) for piece in head) < self._cascade.config.tokens:
            if isinstance(news := await stream.read(), RequestEnded):
                break
            head.append(news)
        return head

    async def _choose(self, heads: Sequence[list[Output]]) -> None:
        cascade, firsts = self._cascade, self._running
        most = cascade.config.tokens
        every = [islice(chain.from_iterable(piece.logprobs for piece in head), most) for head in heads]
        scores = [one.logprob for one in chain.from_iterable(every)]
        if not scores:  # it has failed, and its end says how
            self._follow(firsts, heads)
            return
        mean = fmean(scores)
        unsure = mean < cascade.config.min_logprob
        chosen, reason = (cascade.large, "unsure") if unsure else (cascade.small, "confident")
        choose = partial(cascade.choice, chosen, reason, mean_logprob=mean, tokens=len(scores))
        streams = [stream for first in firsts if isinstance(stream := first.stream, OutputStream)]
        for stream in streams:
            cascade.driver.handle(CascadeDecided(stream.name, choose(first=stream.name)))
        cascade.count(choose())
        if not unsure:
            self._follow(firsts, heads)
            return
        for stream in streams:
            if not stream.ended:
                cascade.driver.abandon(stream, f"{chosen.model.name!r} answers, as the cascade decided")
        seed = firsts[0].request.sampling.seed
        self._running = await self._start(chosen, choose(first=streams[0].name), seed=seed)
        self._follow(self._running, [[] for _ in firsts])

    def _follow(self, generations: Sequence[Generation], heads: Sequence[list[Output]]) -> None:
        for stream, generation, head in zip(self._streams, generations, heads, strict=True):
            stream.follow(generation.stream, head)

    def _fail(self, error: BatonError) -> None:
        summary = Summary(Timeline(received=self._received), self._received)
        for stream in self._streams:
            failed = ResultStream()
            failed.settle(Result(Output(), RequestEnded("", Failed(error), summary)))
            stream.follow(failed, [])


class ChosenStream:
    """An output of the model that is chosen."""

    def __init__(self, *, scored: bool) -> None:
        """`scored`: with log-probabilities, as far as the output has them."""
        self.reads = 0
        self._scored = scored
        self._source: ReadableStream | None = None
        self._head = deque[Output]()
        self._news = asyncio.Event()

    def follow(self, source: ReadableStream, head: Sequence[Output]) -> None:
        """Pass on an output, of which these pieces have been read."""
        self._source = source
        self._head += head
        self._news.set()

    @property
    def ended(self) -> bool:
        return self._source is not None and self._source.ended

    @property
    def stop_string(self) -> str | None:
        return None if self._source is None else self._source.stop_string

    def wake(self) -> None:
        """Have `read` return, with an output of size 0 if nothing is new."""
        if self._source is not None:
            self._source.wake()
        elif not self._head:
            self._head.append(Output())
            self._news.set()

    async def read(self) -> Output | RequestEnded:
        """The next piece, as the chosen model's stream has it."""
        self.reads += 1
        while not self._head and self._source is None:
            self._news.clear()
            await self._news.wait()
        if self._head:
            news = self._head.popleft()
        else:
            assert self._source is not None
            news = await self._source.read()
        if isinstance(news, Output) and not self._scored:
            news.logprobs.clear()
        return news

    def abandon(self) -> None:
        """Forget what is unread: the client does not come for it."""
        self._head.clear()
        if self._source is not None:
            self._source.abandon()
