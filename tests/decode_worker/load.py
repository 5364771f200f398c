"""A decode worker's state under load in virtual time: no model, no store, no bytes. Other rules for its admission."""

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from baton.clock import Tick
from baton.config import DecodeConfig
from baton.membership import SendToRouter
from baton.messages import Cancel, Decode, Message, Refused, SamplingParams, Tokens
from decode_worker.growth_reserve import GrowthOutlook, GrowthReserve
from decode_worker.scheduler import DecodeCommand, DecodeScheduler
from engine.step.batch import Sampled
from engine.step.outcome import ScheduledBatch, StepDone
from kvstore.keys import pack_tokens
from simulator.worker_shell import WorkerShell, at_once

PAGE = 16
STOP = 1
STEP = 0.010  # seconds for a step,
ROW = 0.0002  # each sequence in it that decodes,
TOKEN = 0.0002  # and each token of a prompt


class OnePageEach:
    """Keeps one page for each sequence."""

    def output_ended(self, begun: int, generated: int, cut: bool) -> None:
        pass

    def pages_to_keep(self, holders: Sequence[GrowthOutlook], page_size: int) -> int:
        return len(holders)


class AllThatIsAllowed:
    """Reserves growth up to max_tokens, so no sequence is ever preempted."""

    def output_ended(self, begun: int, generated: int, cut: bool) -> None:
        pass

    def pages_to_keep(self, holders: Sequence[GrowthOutlook], page_size: int) -> int:
        return sum(-(-(holder.known + holder.left) // page_size) - holder.pages for holder in holders)


@dataclass(frozen=True)
class Request:
    """A request, and how long its output is going to be."""

    name: str
    prompt: int
    output: int
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """Of a whole load. `utilisation`: share of the pool, over time, in pages that sequences held."""

    seconds: float
    preemptions: int
    utilisation: float
    computed: int  # prompt and other known tokens that were computed

    @property
    def summary(self) -> str:
        return f"{self.seconds:.1f} s, {self.preemptions} preemptions, {self.utilisation:.2f} used"


def requests(
    count: int, prompt: int, length: Callable[[random.Random], int], max_tokens: int, seed: int = 0
) -> list[Request]:
    """Prompts of up to `prompt` tokens, outputs by `length` as far as `max_tokens` allows."""
    rng = random.Random(seed)
    return [
        Request(f"r{i}", rng.randrange(16, prompt), max(1, min(max_tokens, length(rng))), max_tokens)
        for i in range(count)
    ]


def run(load: Sequence[Request], clients: int, num_pages: int, growth_reserve: GrowthReserve | None = None) -> Outcome:
    """So many clients send one request after the other; what is refused is sent again at the next step, oldest first.
    The first half of the load warms up and is not counted."""
    worker = _Loaded(load, num_pages, growth_reserve)
    rng = random.Random(1)
    queue = deque(load)
    asking: deque[Request] = deque()
    while queue or asking or worker.ended < len(load):
        while queue and len(load) - len(queue) - worker.ended < clients:
            asking.append(queue.popleft())
        while asking:
            each = asking[0]
            tokens = [rng.randrange(2, 30_000) for _ in range(each.prompt)]
            order = Decode(
                each.name, 1, b"r" * 16, pack_tokens(tokens), each.prompt, each.max_tokens,
                SamplingParams(temperature=0),
                (STOP,),
            )  # fmt: skip
            if _refused(worker.state.handle(order, worker.time)):
                break
            asking.popleft()
        steps = worker.steps
        at_once(worker.make_turn())
        assert worker.steps > steps, "a request waits for ever"
    return worker.outcome()


class _Loaded(WorkerShell):
    """The worker. It counts from the end of the first half of its load."""

    role = "decode"
    patience = 0.0
    store_connected = False

    def __init__(self, load: Sequence[Request], num_pages: int, growth_reserve: GrowthReserve | None) -> None:
        self.state = DecodeScheduler(DecodeConfig(ageing_ms=10_000), PAGE, num_pages, growth_reserve=growth_reserve)
        self.ended = self.steps = 0
        self.time = 0.0
        self._num_pages = num_pages
        self._outputs = {each.name: each for each in load}
        self._began = self._used = 0.0
        self._before = self._computed_before = 0

    def now(self) -> float:
        return self.time

    def events(self) -> list[Tick]:
        return [Tick()]

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, StepDone]:
        yield from ()
        prompts = sum(len(chunk.tokens) for chunk in plan.values() if len(chunk.tokens) > 1)
        took = STEP + ROW * len(plan) + TOKEN * prompts
        self.steps += 1
        self.time += took
        self._used += took * (1 - self.state.stats().pages_free / self._num_pages)
        outputs = [self._outputs[name.request] for name in plan]
        chunks = zip(outputs, plan.values(), strict=True)
        return StepDone(plan, [Sampled(_token(each, chunk.end)) if chunk.sample else None for each, chunk in chunks])

    def tell_router(self, message: Message, router: str) -> None:
        for delta in message.deltas if isinstance(message, Tokens) else ():
            if not delta.finish:
                continue
            self.ended += 1
            self.state.handle(Cancel(delta.request, 1), self.time)
            if self.ended == len(self._outputs) // 2:
                stats = self.state.stats()
                self._began, self._used = self.time, 0.0
                self._before, self._computed_before = stats.preemptions, stats.prompt_tokens_computed

    def outcome(self) -> Outcome:
        stats, seconds = self.state.stats(), self.time - self._began
        return Outcome(
            seconds, stats.preemptions - self._before, self._used / seconds,
            stats.prompt_tokens_computed - self._computed_before,
        )  # fmt: skip


def _token(each: Request, known: int) -> int:
    """The token after `known` ones: it stops where its output ends."""
    return STOP if known + 1 - each.prompt == each.output < each.max_tokens else 2


def _refused(commands: Sequence[DecodeCommand]) -> bool:
    return any(isinstance(command, SendToRouter) and isinstance(command.message, Refused) for command in commands)
