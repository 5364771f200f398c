"""One turn of a worker, prefill or decode, as a generator of effects.

    receive ──▶ copy ──▶ hear the store ──▶ prepare ──▶ schedule ──▶ launch ──▶ collect ──▶ publish
                                               ▲─────────────────────────┘        │ while the step runs:
                                               one step ahead                     └── receive ──▶ copy ──┐
                                                                                         ▲───────────────┘

The pages of a step are copied at the start of the next turn, which follows at once. The order of a turn stands here and
nowhere else. A driver executes each effect and sends its result back: `worker.loop` with sockets, a clock and a
runner, `simulator.worker` with durations, and the tests with devices that notice a wrong page.

A step and a copy may end at once, as on a CPU, or run on beside the turn. Each has an epoch of the device block
manager, from its launch to its end. Where a step may be launched ahead, a turn launches the next one, collects the one
before, and leaves the next one running for the turn that follows. Pure.
"""

# pyright: strict

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from baton.messages import WorkerRole
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepLaunched, StepOutOfMemory
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy, batches

COPIES_PER_MESSAGE = 64  # pages that one message to the store reports; their readers wait for the message


class Receive(Struct, frozen=True):
    """Wait until there is work, then send back the events that have come in. The last one is a Tick. While a step runs
    (`step_runs`), its end is what there is to wait for."""

    step_runs: bool = False


class AwaitStore(Struct, frozen=True):
    """Wait for the store until that time, in seconds. Send back its replies."""

    until: float


class CopyPages(Struct, frozen=True):
    """Copy these pages between device and arena. Send back CopiedIn or CopiedOut if that has ended at once. Else send
    back None, and a `CopyEnded` among the events received later."""

    copies: Sequence[Copy]
    epoch: int


class CopyEnded(Struct, frozen=True):
    """An event received: the copies launched under `epoch` have ended."""

    epoch: int
    copied: CopiedIn | CopiedOut


class RunStep(Struct, frozen=True):
    """Launch one step of the engine. Send back StepDone, StepOutOfMemory or StepFailed if it has ended at once. Else
    send back None. While another step runs, it can only fail at once."""

    plan: ScheduledBatch


class CollectStep(Struct, frozen=True):
    """Send back StepDone, StepOutOfMemory or StepFailed if the oldest step that runs has ended, else None."""


class Publish(Struct, frozen=True):
    """Publish the heartbeat's snapshot, KV events and metrics."""


StepOutcome: TypeAlias = StepDone | StepOutOfMemory | StepFailed


@dataclass
class StepUnderWay:
    """A step that was launched, until its outcome has been handled."""

    epoch: int
    outcome: StepOutcome | None = None  # known, and not handled before those of older steps


Effect: TypeAlias = Receive | AwaitStore | CopyPages | RunStep | CollectStep | Publish
Turn: TypeAlias = Generator[Effect, Any, bool]


class TurnDriver(Protocol):
    """The parts of a turn that take no time."""

    @property
    def store_connected(self) -> bool: ...

    @property
    def patience(self) -> float:
        """Seconds for which the scheduler wants to wait for the store before it plans a step."""
        ...

    @property
    def blocks(self) -> DeviceBlockManager:
        """The scheduler's, to be told of epochs."""
        ...

    @property
    def under_way(self) -> deque[StepUnderWay]:
        """The steps under way, oldest first: the turns' own, from one to the next."""
        ...

    @property
    def most_steps(self) -> int:
        """How many may be under way: 1, or 2 where a step may be launched ahead."""
        ...

    def now(self) -> float: ...

    def handle(self, event: Any) -> None:
        """Tell the scheduler, and carry out its commands."""
        ...

    def prepare(self) -> None:
        """Let the scheduler prepare the next step, and carry out its commands."""
        ...

    def take_copies(self) -> Sequence[Copy]:
        """Return the copies that are due; none without a store."""
        ...

    def schedule(self) -> ScheduledBatch: ...


def turn(driver: TurnDriver, role: WorkerRole) -> Turn:
    """Yield the effects of one turn in order. Return whether anything was copied or computed."""
    _handle(driver, (yield Receive()))
    worked = yield from _copy(driver)
    if not driver.under_way:
        worked |= yield from _hear_store(driver, copying=role == "prefill")
    yield from _launch(driver)
    if driver.under_way:
        yield from _collect(driver)
        worked = True
    yield Publish()
    return worked


def _handle(driver: TurnDriver, events: Iterable[Any]) -> None:
    for event in events:
        if isinstance(event, CopyEnded):
            driver.blocks.end(event.epoch)
            driver.handle(event.copied)
        else:
            driver.handle(event)


def _launch(driver: TurnDriver) -> Generator[Effect, Any, None]:
    """Launch steps until as many are under way as may be."""
    while len(driver.under_way) < driver.most_steps:
        driver.prepare()
        if not (plan := driver.schedule()):
            return
        step = StepUnderWay(driver.blocks.begin())
        driver.under_way.append(step)
        step.outcome = yield RunStep(plan)
        if step.outcome is not None:
            return
        if driver.most_steps > 1:
            driver.handle(StepLaunched(plan))


def _collect(driver: TurnDriver) -> Generator[Effect, Any, None]:
    """Wait for the oldest step. Meanwhile take what comes in and make the copies that are due."""
    steps = driver.under_way
    oldest = steps[0]
    while oldest.outcome is None:
        oldest.outcome = yield CollectStep()
        if oldest.outcome is None:
            _handle(driver, (yield Receive(step_runs=True)))
            yield from _copy(driver)
    while steps and (outcome := steps[0].outcome) is not None:
        driver.blocks.end(steps.popleft().epoch)
        driver.handle(outcome)


def _copy(driver: TurnDriver) -> Turn:
    """Make the copies that are due. A copy leads to a message, and its handling may make more copies due."""
    copies = driver.take_copies()
    for batch in batches(copies, COPIES_PER_MESSAGE):
        epoch = driver.blocks.begin()
        copied = yield CopyPages(batch, epoch)
        if copied is not None:
            _handle(driver, [CopyEnded(epoch, copied)])
    return bool(copies)


def _hear_store(driver: TurnDriver, *, copying: bool) -> Turn:
    """Before a step is planned, hear the store for as long as the scheduler has patience: a round trip to the store is
    much shorter than a step. `copying`: make the copies that follow at once."""
    copied = False
    until = driver.now() + driver.patience
    while driver.store_connected and driver.patience and driver.now() < until:
        _handle(driver, (yield AwaitStore(until)))
        if copying:
            copied |= yield from _copy(driver)
    return copied
