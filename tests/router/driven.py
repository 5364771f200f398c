"""A router without sockets, and decode workers that say what a test lets them say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from baton import messages as msg
from baton.clock import Tick
from baton.metrics import Metrics
from baton.v1 import generation_pb2 as pb
from router.events import MessageReceived, RequestEnded
from router.frontend.generation import Generation, GenerationService, message_fields
from router.frontend.off_loop import TokenizerThreads
from router.frontend.router_driver import RouterDriver
from router.frontend.served_model import ServedModel
from router.queueing.admission import ModelLimits
from tests.router.model import CONFIG, CONTEXT, EOS, ROUTER, VOCAB, card, load_of

PROMPT = list(range(20, 60))


class Bench:
    """The router's driver, and its only clock and sockets."""

    now_ = 100.0

    def __init__(self, workers: int = 2) -> None:
        model = ServedModel("m", None, ModelLimits(VOCAB, CONTEXT), (EOS,), msg.SamplingParams(temperature=0))
        self.driver = RouterDriver(ROUTER, CONFIG, model, self, self, Metrics())
        self.sent: list[tuple[str, msg.Message]] = []
        self.tokenizing = TokenizerThreads()
        self.service = GenerationService(self.driver, self, self.tokenizing)
        for number in range(workers):
            peer = msg.Peer("decode", f"decode-{number}", "a", f"decode-{number}.1", 7)
            self.say(peer.incarnation, msg.Hello(peer, model=card()), "")
            self.say(peer.incarnation, msg.Heartbeat(1, load_of(peer)))

    # --- as the router's clock and sockets ---

    def now(self) -> float:
        return self.now_

    def send(self, incarnation: str, message: msg.Message) -> None:
        self.sent.append((incarnation, message))

    def forget(self, incarnation: str) -> None: ...
    def subscribe(self, incarnation: str, endpoint: str, replay: str) -> None: ...
    def ask(self, incarnation: str) -> None: ...
    def unsubscribe(self, incarnation: str) -> None: ...

    # --- as a client and as workers ---

    async def start(self, *, further: bool = False, **fields: Any) -> list[Generation]:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=4, **fields)
        read = partial(message_fields, request)
        return await self.service.start("r", self.now_, request.ByteSize(), read, further=further)

    def say(self, sender: str, message: Any, addressee: str = ROUTER.incarnation) -> None:
        self.driver.handle(MessageReceived(msg.Envelope(sender, addressee, 1, message)))

    @property
    def orders(self) -> list[tuple[str, msg.Decode]]:
        return [(to, message) for to, message in self.sent if isinstance(message, msg.Decode)]

    def answer(
        self,
        order: tuple[str, msg.Decode],
        *tokens: int,
        finish: Any = None,
        at: int = len(PROMPT),
        logprobs: tuple[msg.TokenLogprob, ...] = (),
    ) -> None:
        """The worker accepts, if it has not yet, and sends tokens from position `at`."""
        to, decode = order
        self.say(to, msg.Accepted(decode.request, decode.attempt))
        delta = msg.Delta(decode.request, decode.attempt, at, tokens, logprobs, finish=finish)
        self.say(to, msg.Tokens(1, (delta,)))

    async def settle(self) -> None:
        """Let the other samples of a prompt begin, each in a turn of the loop."""
        for _ in range(20):
            await asyncio.sleep(0)

    def beat(self, worker: str) -> None:
        """A worker lives and has nothing."""
        peer = msg.Peer("decode", worker, "a", f"{worker}.1", 7)
        self.say(peer.incarnation, msg.Heartbeat(2, load_of(peer)))

    def tick(self) -> None:
        """The router looks at the time."""
        self.driver.handle(Tick())


@contextlib.asynccontextmanager
async def driven(workers: int = 2) -> AsyncIterator[Bench]:
    bench = Bench(workers)
    try:
        yield bench
    finally:
        await bench.service.close()
        bench.tokenizing.close()


async def read_end(generation: Generation) -> RequestEnded:
    while True:
        if isinstance(news := await generation.stream.read(), RequestEnded):
            return news
