"""One turn of a worker, prefill or decode, as a generator of effects.

    receive ──▶ copy ──▶ hear the store ──▶ prepare ──▶ schedule ──▶ step ──▶ publish

The pages of a step are copied at the start of the next turn, which follows at once. The order of a turn stands here and
nowhere else. A driver executes each effect and sends its result back: `worker.loop` with sockets, a clock and an
engine, `simulator.worker` with durations, and the tests with devices that notice a wrong page. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from baton.messages import WorkerRole
from engine.step import ScheduledBatch
from kvstore.client.transfer import Copy, batches

COPIES_PER_MESSAGE = 64  # pages that one message to the store reports; their readers wait for the message


class Receive(Struct, frozen=True):
    """Wait until there is work, then send back the events that have come in. The last one is a Tick."""


class AwaitStore(Struct, frozen=True):
    """Wait for the store until that time, in seconds. Send back its replies."""

    until: float


class CopyPages(Struct, frozen=True):
    """Copy these pages between device and arena. Send back CopiedIn or CopiedOut."""

    copies: Sequence[Copy]


class RunStep(Struct, frozen=True):
    """Run one step of the engine. Send back StepDone or StepFailed."""

    plan: ScheduledBatch


class Publish(Struct, frozen=True):
    """Publish the heartbeat's snapshot, KV events and metrics."""


Effect: TypeAlias = Receive | AwaitStore | CopyPages | RunStep | Publish
Turn: TypeAlias = Generator[Effect, Any, bool]


class TurnDriver(Protocol):
    """The parts of a turn that take no time."""

    @property
    def store_connected(self) -> bool: ...

    @property
    def patience(self) -> float:
        """Seconds for which the scheduler wants to wait for the store before it plans a step."""
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
    for event in (yield Receive()):
        driver.handle(event)
    worked = yield from _copy(driver)
    worked |= yield from _hear_store(driver, copying=role == "prefill")
    driver.prepare()
    if plan := driver.schedule():
        driver.handle((yield RunStep(plan)))
        worked = True
    yield Publish()
    return worked


def _copy(driver: TurnDriver) -> Turn:
    """Make the copies that are due. A copy leads to a message, and its handling may make more copies due."""
    copies = driver.take_copies()
    for batch in batches(copies, COPIES_PER_MESSAGE):
        driver.handle((yield CopyPages(batch)))
    return bool(copies)


def _hear_store(driver: TurnDriver, *, copying: bool) -> Turn:
    """Before a step is planned, hear the store for as long as the scheduler has patience: a round trip to the store is
    much shorter than a step. `copying`: make the copies that follow at once."""
    copied = False
    until = driver.now() + driver.patience
    while driver.store_connected and driver.patience and driver.now() < until:
        for event in (yield AwaitStore(until)):
            driver.handle(event)
        if copying:
            copied |= yield from _copy(driver)
    return copied
