"""Threads of the host of which one goes on at a time, so that a random number generator decides on their order."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

Clock = dict[object, int]
"""What comes before something: for each thread and stream, how much of what it has done."""


def join(clock: Clock, other: Clock) -> None:
    """Put what `other` comes after before `clock`, too."""
    for agent, moment in other.items():
        clock[agent] = max(moment, clock.get(agent, 0))


class Host(Protocol):
    """What threads are steered by."""

    @property
    def clock(self) -> Clock:
        """That of the current thread."""
        ...

    def drive(self, until: Callable[[], bool]) -> None:
        """Let threads and the device go on until something holds. For the test's own thread."""
        ...


class Stopped(BaseException):
    """The test is over."""


class HostThread(threading.Thread):
    """A thread that goes on only while another one waits in `resume`."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until: Callable[[], bool] = lambda: True
        self._stopped = self._over = False
        self.start()

    @property
    def ready(self) -> bool:
        return not self._over and self._until()

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self._stopped:
                self._work()
        except Stopped:
            pass
        finally:
            self._over = True
            self._back.release()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let others go on until something holds and it is this thread's turn."""
        self._until = until
        self._back.release()
        self._go.acquire()
        if self._stopped:
            raise Stopped

    def resume(self) -> None:
        """Let it go on until it pauses or ends."""
        self._go.release()
        self._back.acquire()

    def stop(self) -> None:
        self._stopped = True
        if not self._over:
            self.resume()
        self.join()


class HostThreads:
    def __init__(self, host: Host) -> None:
        self.host = host
        self._threads: list[HostThread] = []

    def step(self, rng: random.Random) -> bool:
        """Let one go on for a while; false if none can."""
        ready = [thread for thread in self._threads if thread.ready]
        if ready:
            rng.choice(ready).resume()
        return bool(ready)

    def start(self, name: str, work: Callable[[], None]) -> None:
        self._threads.append(HostThread(name, work))

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()

    def executor(self, count: int, name: str) -> Executor:
        """Stands for `ThreadPoolExecutor`."""
        return Executor(self, count, name)


class OrderedFuture(Future[Any]):
    """A future. Whatever sees its end comes after all that led to it."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host
        self.clock: Clock = {}

    def done(self) -> bool:
        if ended := super().done():
            join(self._host.clock, self.clock)
        return ended

    def result(self, timeout: float | None = None) -> Any:
        self._host.drive(self.done)
        return super().result(timeout)


class Executor:
    """`ThreadPoolExecutor` of such threads."""

    def __init__(self, threads: HostThreads, count: int, name: str) -> None:
        self._host = threads.host
        self._tasks: deque[tuple[OrderedFuture, Clock, Callable[[], Any]]] = deque()
        for number in range(count):
            threads.start(f"{name} {number}", self._work)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future = OrderedFuture(self._host)
        self._tasks.append((future, dict(self._host.clock), lambda: call(*args)))
        return future

    def shutdown(self, *, wait: bool) -> None:
        assert not wait

    def _work(self) -> None:
        thread = threading.current_thread()
        assert isinstance(thread, HostThread)
        while True:
            thread.pause(lambda: bool(self._tasks))
            future, clock, call = self._tasks.popleft()
            join(self._host.clock, clock)
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - the future has it
                future.clock = dict(self._host.clock)
                future.set_exception(error)
            else:
                future.clock = dict(self._host.clock)
                future.set_result(result)


class Condition:
    """`threading.Condition` of such threads: none is interrupted, so it locks nothing."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._clock: Clock = {}

    def __enter__(self) -> None:
        join(self._host.clock, self._clock)

    def __exit__(self, *error: object) -> None:
        join(self._clock, self._host.clock)

    def notify_all(self) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], _timeout: float) -> bool:
        thread = threading.current_thread()
        assert isinstance(thread, HostThread)
        if not predicate():
            thread.pause(predicate)
        join(self._host.clock, self._clock)
        return True
