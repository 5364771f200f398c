"""A prefill worker in virtual time: a state, a store that grants everything, and a machine whose steps take as long as
a formula says. Thousands of tokens a millisecond, so whole loads can be looked at step by step.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from baton.clock import Tick
from baton.config import PrefillConfig
from baton.messages import AttemptFailed, Message, Prefill, Prefilled
from baton.step_cost_model import pairs
from baton.store_protocol import Acquire, PagesUnavailable, Reserve, Reserved, Seal, Sealed, StoreCall, StoreReply
from engine.step.outcome import ScheduledBatch, StepDone
from kvstore.client.transfer import StoreUp
from kvstore.keys import pack_tokens
from prefill_worker.scheduler import PrefillScheduler
from simulator.worker_shell import WorkerShell, at_once

PAGE = 16
ROOT = b"r" * 16


def machine(tokens: int, attended: int) -> float:
    """Seconds of a step: two cores, a hundred million parameters."""
    return 0.003 + 180e-6 * tokens + 30e-9 * attended


@dataclass
class Timed(WorkerShell):
    """The worker, what it said and when, and the steps that it ran."""

    role = "prefill"
    patience = 0.0
    config: PrefillConfig = field(default_factory=lambda: PrefillConfig(max_num_seqs=64))
    pages: int = 8_000
    overlap: bool = False  # copies are made beside steps
    time: float = 0.0
    ended: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # when each request was Prefilled or AttemptFailed
    messages: dict[str, Message] = field(default_factory=dict[str, Message])
    steps: list[tuple[float, ScheduledBatch]] = field(
        default_factory=list[tuple[float, ScheduledBatch]]
    )  # when each began
    sealed: set[bytes] = field(default_factory=set[bytes])

    def __post_init__(self) -> None:
        self.state = PrefillScheduler(self.config, PAGE, self.pages, copies_overlap=self.overlap)
        self._keys: dict[int, list[bytes]] = {}  # of each write, by lease
        self._slots = itertools.count()
        self.handle(StoreUp(10**6, 1))

    def order(self, request: str, tokens: Sequence[int], priority: int = 0) -> None:
        self.handle(Prefill(request, 1, ROOT, pack_tokens(tokens), priority=priority))

    def now(self) -> float:
        return self.time

    def events(self) -> list[Tick]:
        return [Tick()]

    def call_store(self, call: StoreCall) -> None:
        for reply in self._store(call):
            self.handle(reply)

    def tell_router(self, message: Message, router: str) -> None:
        if isinstance(message, Prefilled | AttemptFailed):
            self.ended[message.request] = self.time
            self.messages[message.request] = message

    def turn(self) -> bool:
        before = len(self.steps)
        at_once(self.make_turn())
        return len(self.steps) > before

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, StepDone]:
        yield from ()
        self.steps.append((self.time, plan))
        chunks = [(len(chunk.tokens), chunk.start) for chunk in plan.values()]
        self.time += machine(sum(count for count, _ in chunks), sum(itertools.starmap(pairs, chunks)))
        return StepDone(plan, [None] * len(plan))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run iterations until that holds, or until no work is left."""
        while not until() and (self.turn() or self.state.busy):
            pass
        self.state.validate()

    def tokens(self, request: str) -> int:
        return sum(
            len(chunk.tokens) for _, plan in self.steps for name, chunk in plan.items() if name.request == request
        )

    def served(self, request: str) -> list[int]:
        """The steps, counted from 0, in which it had a part."""
        return [i for i, (_, plan) in enumerate(self.steps) if any(name.request == request for name in plan)]

    def _store(self, call: StoreCall) -> list[StoreReply]:
        match call:
            case Acquire(lease=lease):
                return [
                    PagesUnavailable(lease, 0)
                ]  # its lookups find nothing: prompts of before are of no concern here
            case Reserve(lease=lease, keys=keys):
                parts = [keys[at : at + 16] for at in range(0, len(keys), 16)]
                self._keys[lease] = parts
                slots = tuple(None if key in self.sealed else next(self._slots) for key in parts)
                return [Reserved(lease, slots)]
            case Seal(lease=lease, first=first, checksums=checksums):
                self.sealed.update(self._keys[lease][first : first + len(checksums)])
                return [Sealed(lease, first, len(checksums))]
            case _:
                return []
