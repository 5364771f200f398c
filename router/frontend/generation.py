"""The way of every door's requests: checked, tokenized where that takes no other request's time, submitted, abandoned.

A door (gRPC, HTTP) turns its client's request into a `GenerateRequest` of `baton.v1` and the output into its own
answer. Nothing behind this module learns which door a request came through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import structs

from baton.clock import Clock
from baton.errors import ContextTooLong
from baton.v1 import cache_pb2, generation_pb2
from router.frontend.client_sessions import RouterDriver
from router.frontend.grammar_checker import GrammarChecker
from router.frontend.identity import caller
from router.frontend.output_stream import OutputStream
from router.frontend.request_parsing import ValidatedRequest, parse_generate_request
from router.frontend.served_model import ServedModel
from router.frontend.tokenizer_threads import TokenizerThreads

T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """One request under way. Call `close` when its client needs no more."""

    validated: ValidatedRequest
    stream: OutputStream
    _driver: RouterDriver

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if not self.stream.ended:
            self._driver.abandon(self.stream)


class GenerationService:
    """Starts requests. One object serves all doors."""

    def __init__(self, driver: RouterDriver, clock: Clock, tokenizing: TokenizerThreads) -> None:
        self.driver = driver
        self.clock = clock
        self._tokenizing = tokenizing
        self._grammars = GrammarChecker(driver.model)

    async def close(self) -> None:
        """End what runs beside the service."""
        await self._grammars.close()

    @property
    def model(self) -> ServedModel:
        return self.driver.model

    async def start(
        self, request: generation_pb2.GenerateRequest, request_id: str, received: float, deadline: float | None = None
    ) -> Generation:
        """Check and submit a request of this task's caller that came at `received`. Times are seconds of the clock.
        Raises BatonError."""
        check = partial(parse_generate_request, request, request_id, self.model, self.driver.draw_seed)
        validated = await self.apart(text_bytes(request), check)
        who = caller.get()
        if who.max_prompt_tokens is not None and len(validated.prompt) > who.max_prompt_tokens:
            raise ContextTooLong(
                f"a prompt of {len(validated.prompt)} tokens exceeds the {who.max_prompt_tokens} that the API key "
                f"{who.name!r} may send"
            )
        if (grammar := validated.sampling.grammar) is not None:
            checked = structs.replace(validated.sampling, grammar=await self._grammars.check(grammar))
            validated = dataclasses.replace(validated, sampling=checked)
        return Generation(validated, self.driver.submit(validated, received, deadline, who.tenant), self.driver)

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes of text: here if that is quick, else on a thread. Raises Overloaded."""
        return await self._tokenizing.run(size, work)


def text_bytes(request: generation_pb2.GenerateRequest | cache_pb2.PinPrefixRequest) -> int:
    """About how many bytes of text there are to tokenize, without a copy of that text."""
    return request.ByteSize() if request.WhichOneof("prompt") == "text" else 0
