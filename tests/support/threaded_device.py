"""A CPU that behaves as a GPU does: steps and copies run on threads, late and in an order of their own."""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from msgspec import structs

from engine.cuda.launcher import StepLauncher
from engine.cuda.mover import OverlappedMover
from engine.cuda.steps import LaunchedStep
from engine.cuda.streams import Event
from engine.device.page_pool import PagePool
from engine.engine import Engine
from engine.runner import StepResults
from engine.sampling.mask_threads import MasksUnderWay
from engine.step.batch import Batch, Chunk

_SLOWEST = 0.004  # seconds that a step or a copy waits before it begins


class ThreadedCopies:
    """`engine.cuda.mover.DeviceCopies` over the pages of a CPU. It pins so many pieces and refuses the next."""

    def __init__(self, pool: PagePool, pieces: int = 1_000, slowest: float = 0.0) -> None:
        self.pool, self._pieces, self._slowest = pool, pieces, slowest
        self.pinned: list[memoryview] = []
        self.staged = 0  # pages that went through buffers
        self._buffers: list[memoryview] = []
        self._queues = {inward: ThreadPoolExecutor(1) for inward in (True, False)}
        self._mine = threading.local()
        self.duplicated: Future[None] | None = None  # copies in wait for it

    def pin(self, memory: memoryview) -> bool:
        if len(self.pinned) == self._pieces:
            return False
        self.pinned.append(memory)
        return True

    def unpin(self, memory: memoryview) -> None:
        self.pinned.remove(memory)

    def staging(self, count: int) -> Sequence[memoryview]:
        buffers = [memoryview(bytearray(self.pool.page_bytes)) for _ in range(count)]
        self._buffers += buffers
        return buffers

    def copy_in(self, source: memoryview, page: int) -> None:
        duplicated = self.duplicated

        def copy() -> None:
            if duplicated is not None:
                wait([duplicated])
            self._pause()
            self.pool.copy_in(source, page)

        self._queue(True, source, copy)

    def copy_out(self, page: int, dest: memoryview) -> None:
        def copy() -> None:
            self._pause()
            self.pool.copy_out(page, dest)

        self._queue(False, dest, copy)

    def finish(self, *, inward: bool) -> None:
        for future in getattr(self._mine, "queued", []):
            future.result()
        self._mine.queued = []

    def _queue(self, inward: bool, memory: memoryview, copy: Callable[[], None]) -> None:
        self.staged += any(memory.obj is buffer.obj for buffer in self._buffers)
        self._mine.queued = [*getattr(self._mine, "queued", []), self._queues[inward].submit(copy)]

    def _pause(self) -> None:
        if self._slowest:
            time.sleep(random.uniform(0, self._slowest))


class _Step:
    def __init__(self, future: Future[StepResults]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> StepResults:
        return self._future.result()


class Ended:
    """An event of a device whose queue is empty."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        return 0.0


class EmptyStreams:
    """Streams of a device that has done everything at once."""

    def mark(self) -> Ended:
        return Ended()

    def beside(self, event: Event) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class ThreadedEngine(Engine):
    """The engine as a runner that overlaps and takes steps ahead, as on a GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.overlaps = self.copies_overlap = self.launches_ahead = True

    @property
    def queued(self) -> deque[Future[StepResults]]:
        """Steps that were launched and that the device has not begun."""
        return self.__dict__.setdefault("queued_steps", deque())

    @property
    def _steps(self) -> ThreadPoolExecutor:
        return self.__dict__.setdefault("steps", ThreadPoolExecutor(1))

    @property
    def _step_launcher(self) -> StepLauncher:
        return self.__dict__.setdefault("step_launcher", self._launcher(EmptyStreams()))

    @property
    def _copies(self) -> ThreadedCopies:
        return self.__dict__.setdefault("copies", ThreadedCopies(self.pages, pieces=1, slowest=_SLOWEST))

    @property
    def _uncollected(self) -> deque[tuple[LaunchedStep, Future[StepResults], float]]:
        """Steps in the device's stream, with what becomes of them and the seconds that they took. For its thread."""
        return self.__dict__.setdefault("uncollected", deque())

    def launch(self, chunks: Sequence[Chunk]) -> _Step:
        batch, masks = self._flatten(chunks), self._start_masks(chunks)
        future: Future[StepResults] = Future()
        future.add_done_callback(lambda _: self._alarm())
        self.queued.append(future)
        self._steps.submit(self._run, chunks, batch, masks, future)
        return _Step(future)

    def _run(
        self, chunks: Sequence[Chunk], batch: Batch, masks: MasksUnderWay | None, future: Future[StepResults]
    ) -> None:
        """Run a step. It is collected before the next one is launched or, as often as not, after that."""
        time.sleep(random.uniform(0, _SLOWEST))
        began = time.perf_counter()
        self.queued.popleft()
        try:
            step, _ = self._step_launcher.launch(chunks, batch, masks)
            self._uncollected.append((step, future, time.perf_counter() - began))
        except Exception as error:  # noqa: BLE001 - `wait` of the step raises it
            future.set_exception(error)
        if not self.queued or random.random() < 0.5:
            self._collect()

    def _collect(self) -> None:
        while self._uncollected:
            step, future, seconds = self._uncollected.popleft()
            began = time.perf_counter()
            try:
                finished = step.wait()
                future.set_result(structs.replace(finished, seconds=seconds + time.perf_counter() - began))
            except Exception as error:  # noqa: BLE001 - as above
                future.set_exception(error)

    def duplicate(self, source: int, dest: int) -> None:
        self._copies.duplicated = self._steps.submit(self.pages.duplicate, source, dest)

    def mover(self, *, verify: bool) -> OverlappedMover:
        return OverlappedMover(
            self._copies, lambda: self._alarm(), self.layout.num_kv_heads, verify=verify, piece=2**20
        )
