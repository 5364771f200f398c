"""A worker's turn for tests: the effects of `worker.turn`, executed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from baton.messages import WorkerRole
from engine.step import ScheduledBatch, StepDone
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy
from worker.turn import AwaitStore, CopyPages, Publish, Receive, RunStep, turn


class Scheduler(Protocol):
    patience: float

    def handle(self, event: Any, now: float, /) -> Iterable[Any]: ...
    def prepare(self, now: float, /) -> Iterable[Any]: ...
    def take_copies(self) -> Sequence[Copy]: ...
    def schedule(self, now: float, /) -> ScheduledBatch: ...


class Turns:
    """Turns of a scheduler. `do` carries out its commands, `arrived` gives what has come in since, `copied` makes
    copies, and `done` runs a step."""

    patience = 0.0

    def __init__(
        self,
        scheduler: Scheduler,
        role: WorkerRole,
        *,
        clock: Callable[[], float],
        do: Callable[[Iterable[Any]], None],
        done: Callable[[ScheduledBatch], StepDone],
        arrived: Callable[[], Iterable[Any]] = tuple,
        copied: Callable[[Sequence[Copy]], CopiedIn | CopiedOut] | None = None,
    ) -> None:
        self._scheduler, self._role = scheduler, role
        self.now, self._do, self._done, self._arrived, self._copied = clock, do, done, arrived, copied

    def make(self) -> bool:
        """Make one turn, and return whether it had a step."""
        effects, result, stepped = turn(self, self._role), None, False
        try:
            while True:
                match effects.send(result):
                    case Receive() | AwaitStore():
                        result = self._arrived()
                    case CopyPages(copies=copies):
                        assert self._copied, "a worker without a store has copies to make"
                        result = self._copied(copies)
                    case RunStep(plan=plan):
                        result, stepped = self._done(plan), True
                    case Publish():
                        result = None
        except StopIteration:
            return stepped

    # --- for `worker.turn` ------------------------------------------------------------------------------------------

    @property
    def store_connected(self) -> bool:
        return self._copied is not None

    def handle(self, event: Any) -> None:
        self._do(self._scheduler.handle(event, self.now()))

    def prepare(self) -> None:
        self._do(self._scheduler.prepare(self.now()))

    def take_copies(self) -> Sequence[Copy]:
        return self._scheduler.take_copies()

    def schedule(self) -> ScheduledBatch:
        return self._scheduler.schedule(self.now())
