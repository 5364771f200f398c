"""A shell around a worker's real scheduler, without sockets and without an engine: `worker.loop`.

What a message, a call, a copy and a step are, a subclass says. The simulator's take time. The tests' are carried out
at once, on devices that notice a wrong page.
"""

# pyright: strict

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

from baton.membership import SendToRouter
from baton.messages import Message, WorkerRole
from engine.step.outcome import ScheduledBatch
from engine.step.recomputation import ComparePages, PagesCompared
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.device_block_manager import DeviceBlockManager, DuplicatePage
from kvstore.client.transfer import CallStore, CopiedIn, CopiedOut, Copy, CopyOut
from prefill_worker.scheduler import PrefillCommand
from simulator.clock import Body
from worker.turn import AwaitStore, CollectStep, CopyPages, Publish, Receive, RunStep, StepUnderWay, turn

T = TypeVar("T")


class WorkerShell:
    """A worker process, but for what its subclass says."""

    role: WorkerRole
    state: Any  # the scheduler of that role
    most_steps = 1

    @property
    def under_way(self) -> deque[StepUnderWay]:
        return self.__dict__.setdefault("_under_way", deque())

    def make_turn(self) -> Generator[float, None, bool]:
        """Make a turn. Yield the times until which it sleeps, and return whether anything was copied or computed."""
        effects, result = turn(self, self.role), None
        while True:
            try:
                effect = effects.send(result)
            except StopIteration as ended:
                return ended.value
            match effect:
                case Receive(step_runs=step_runs):
                    if step_runs:
                        yield from self.await_step()
                    result = self.events()
                case AwaitStore(until=until):
                    yield from self.await_store(until)
                    result = self.replies()
                case CopyPages(copies=copies, epoch=epoch):
                    result = yield from self.launch_copies(copies, epoch)
                case RunStep(plan=plan):
                    result = yield from self.run_step(plan)
                case CollectStep():
                    result = self.collect_step()
                case Publish():
                    result = self.publish()

    # --- for `worker.turn` ------------------------------------------------------------------------------------------

    @property
    def store_connected(self) -> bool:
        return True

    @property
    def patience(self) -> float:
        return self.state.patience

    @property
    def blocks(self) -> DeviceBlockManager:
        return self.state.blocks

    def now(self) -> float:
        raise NotImplementedError

    def handle(self, event: Any, router: str = "") -> None:
        self.carry_out(self.state.handle(event, self.now(), router))

    def prepare(self) -> None:
        self.carry_out(self.state.prepare(self.now()))

    def take_copies(self) -> Sequence[Copy]:
        return self.state.take_copies() if self.store_connected else ()

    def schedule(self) -> ScheduledBatch:
        return self.state.schedule(self.now())

    # --- out --------------------------------------------------------------------------------------------------------

    def carry_out(self, commands: Iterable[PrefillCommand]) -> None:
        for command in commands:
            match command:
                case SendToRouter(message=message, router=router):
                    self.tell_router(message, router)
                case CallStore(call=call):
                    self.call_store(call)
                case DuplicatePage():
                    self.duplicate_page(command)
                case LeaveRing():
                    self.leave_ring(command)
                case ComparePages():
                    self.handle(PagesCompared(self.same_contents(command)))

    # --- what a subclass says ---------------------------------------------------------------------------------------

    def events(self) -> Iterable[Any]:
        """Return everything that has arrived; the last is a Tick."""
        raise NotImplementedError

    def replies(self) -> Iterable[Any]:
        """Return what the store has said."""
        return ()

    def await_store(self, until: float) -> Body:
        """Sleep until the store has said something, or until that time."""
        yield from ()

    def copy_pages(self, copies: Sequence[Copy]) -> Body:
        """Copy these pages, of one lease and in one direction."""
        yield from ()

    def launch_copies(self, copies: Sequence[Copy], epoch: int) -> Generator[float, None, CopiedIn | CopiedOut | None]:
        """Copy these pages and return what came of it; or none, and a CopyEnded with that epoch among later events."""
        yield from self.copy_pages(copies)
        return copied(copies)

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, Any]:
        """Run a step, and return what becomes of it; or none, if `collect_step` is to return that."""
        raise NotImplementedError

    def await_step(self) -> Body:
        """Sleep until the step that runs has ended, or there is something to hear."""
        raise NotImplementedError

    def collect_step(self) -> Any:
        """Return what became of the oldest step that runs; none while it does."""
        raise NotImplementedError

    def publish(self) -> None:
        """Publish KV events."""

    def tell_router(self, message: Message, router: str) -> None:
        raise NotImplementedError

    def call_store(self, call: Any) -> None:
        raise NotImplementedError

    def same_contents(self, order: ComparePages) -> bool:
        """Return whether two device pages have the same bytes."""
        return True

    def leave_ring(self, left: LeaveRing) -> None:
        """Mark that a ring has been left."""

    def duplicate_page(self, order: DuplicatePage) -> None:
        """Copy a page on the device. It takes no time that would show."""


def copied(copies: Sequence[Copy]) -> CopiedIn | CopiedOut:
    """Return the event for copies that went well. They have no checksums."""
    first = copies[0]
    if isinstance(first, CopyOut):
        return CopiedOut(first.lease, first.index, (0,) * len(copies))
    return CopiedIn(first.lease, tuple(copy.index for copy in copies))


def at_once(body: Generator[float, None, T]) -> T:
    """Run what must not sleep, and return its result."""
    try:
        until = next(body)
    except StopIteration as ended:
        return ended.value
    raise AssertionError(f"it sleeps until {until}")
