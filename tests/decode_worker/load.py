"""A decode worker's state under load in virtual time: no model, no store, no bytes. Other rules for its admission."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.clock import Tick
from baton.config import DecodeConfig
from baton.membership import SendToRouter
from baton.messages import Cancel, Decode, Refused, SamplingParams, Tokens
from decode_worker.growth_reserve import GrowthOutlook, GrowthReserve
from decode_worker.scheduler import DecodeCommand, DecodeScheduler
from engine.batch import Sampled
from engine.step import ScheduledBatch, StepDone
from kvstore.keys import pack_tokens
from tests.support.turns import Turns

PAGE = 16
STOP = 1
STEP = 0.010  # seconds for a step,
ROW = 0.0002  # each sequence in it that decodes,
TOKEN = 0.0002  # and each token of a prompt


class OnePageEach:
    """Keeps one page for each sequence."""

    def ended(self, begun: int, generated: int, cut: bool) -> None:
        pass

    def pages_to_keep(self, holders: Sequence[GrowthOutlook], page_size: int) -> int:
        return len(holders)


class AllThatIsAllowed:
    """Reserves growth up to max_tokens, so no sequence is ever preempted."""

    def ended(self, begun: int, generated: int, cut: bool) -> None:
        pass

    def pages_to_keep(self, holders: Sequence[GrowthOutlook], page_size: int) -> int:
        return sum(-(-(holder.known + holder.left) // page_size) - holder.pages for holder in holders)


@dataclass(frozen=True)
class Wanted:
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
) -> list[Wanted]:
    """Prompts of up to `prompt` tokens, outputs by `length` as far as `max_tokens` allows."""
    rng = random.Random(seed)
    return [
        Wanted(f"r{i}", rng.randrange(16, prompt), max(1, min(max_tokens, length(rng))), max_tokens)
        for i in range(count)
    ]


def run(wanted: Sequence[Wanted], clients: int, num_pages: int, headroom: GrowthReserve | None = None) -> Outcome:
    """So many clients send one request after the other; what is refused is sent again at the next step, oldest first.
    The first half of the load warms up and is not counted."""
    state = DecodeScheduler(DecodeConfig(ageing_ms=10_000), PAGE, num_pages, headroom=headroom)
    rng = random.Random(1)
    queue = deque(wanted)
    asking: deque[Wanted] = deque()
    outputs = {each.name: each for each in wanted}
    ended = 0
    now = began = used = 0.0
    before = computed_before = 0

    def step(plan: ScheduledBatch) -> StepDone:
        nonlocal now, used
        prompts = sum(len(chunk.tokens) for chunk in plan.values() if len(chunk.tokens) > 1)
        took = STEP + ROW * len(plan) + TOKEN * prompts
        now += took
        used += took * (1 - state.stats().pages_free / num_pages)
        sampled = [
            Sampled(_token(outputs[name.request], chunk.end)) if chunk.sample else None for name, chunk in plan.items()
        ]
        return StepDone(plan, sampled)

    def do(commands: Iterable[DecodeCommand]) -> None:
        nonlocal ended, began, used, before, computed_before
        for command in commands:
            if isinstance(command, SendToRouter) and isinstance(command.message, Tokens):
                for delta in command.message.deltas:
                    if delta.finish:
                        ended += 1
                        state.handle(Cancel(delta.request, 1), now)
                        if ended == len(wanted) // 2:
                            began, used, before = now, 0.0, state.stats().preemptions
                            computed_before = state.stats().prompt_tokens_computed

    turns = Turns(state, "decode", clock=lambda: now, do=do, done=step, arrived=lambda: [Tick()])
    while queue or asking or ended < len(wanted):
        while queue and len(wanted) - len(queue) - ended < clients:
            asking.append(queue.popleft())
        while asking:
            each = asking[0]
            tokens = [rng.randrange(2, 30_000) for _ in range(each.prompt)]
            order = Decode(
                each.name, 1, b"r" * 16, pack_tokens(tokens), each.prompt, each.max_tokens,
                SamplingParams(temperature=0),
                (STOP,),
            )  # fmt: skip
            if _refused(state.handle(order, now)):
                break
            asking.popleft()
        assert turns.make(), "a request waits for ever"
    stats = state.stats()
    return Outcome(
        now - began, stats.preemptions - before, used / (now - began), stats.prompt_tokens_computed - computed_before
    )


def _token(each: Wanted, known: int) -> int:
    """The token after `known` ones: it stops where its output ends."""
    return STOP if known + 1 - each.prompt == each.output < each.max_tokens else 2


def _refused(commands: Sequence[DecodeCommand]) -> bool:
    return any(isinstance(command, SendToRouter) and isinstance(command.message, Refused) for command in commands)
