"""The processes that a model is divided among, as the child orders them about. For the child alone.

vLLM's executor starts them: each holds some of the heads of all layers, or of those of its pipeline stage, and copies
its own part of each page. They are numbered stage by stage. One rank runs in the child itself. Several are children of
the child. The kernel kills them when it ends.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Listener
from typing import Any

from msgspec import msgpack

from kvstore.checksum import join_checksums

_PR_SET_PDEATHSIG = 1


class RankLost(Exception):
    """A rank failed, gave no answer in time, or did otherwise than the others. None can be used any more: what others
    have answered can't be told from later answers."""


class Ranks:
    """All ranks of an executor, in so many stages. `deadline`: seconds that an order may take."""

    def __init__(self, executor: Any, size: int, deadline: float, stages: int = 1) -> None:
        self.size, self.stages = size, stages
        self._executor, self._deadline = executor, deadline

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks besides this process."""
        return [worker.proc.pid for worker in self._executor.workers] if self.size > 1 else []

    def call(self, method: str, *args: Any) -> list[Any]:
        """Have each rank run a method of its worker, and return what each returned, once all have. Raises RankLost, or
        with one rank whatever it raises."""
        with self._failures(method):
            return self._executor.collective_rpc(method, timeout=self._deadline, args=args)

    def start(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """As `call`, but return what waits for the ranks: another thread may do so while the next call is started. What
        a single rank raises before the device goes on by itself is raised here."""
        with self._failures(method):
            future = self._executor.collective_rpc(method, timeout=self._deadline, args=args, non_block=True)
            if self.size == 1 and future.done():
                future.result()

        def wait() -> list[Any]:
            with self._failures(method):
                return future.result()

        return wait

    @contextlib.contextmanager
    def _failures(self, method: str) -> Iterator[None]:
        """With several ranks, none can be used after one has failed."""
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            raise RankLost(f"{method}: {type(error).__name__}: {error}") from error

    @property
    def executor(self) -> Any:
        """vLLM's."""
        return self._executor

    def checksums(self, method: str, *args: Any) -> list[int]:
        """Call a method that returns, of each page, the checksums of a rank's heads. Return those of the pages."""
        parts: Sequence[Sequence[Sequence[int]]] = self.call(method, *args)
        return [join_checksums([head for part in page for head in part]) for page in zip(*parts, strict=True)]

    def agreed(self, answers: Sequence[Any], of: Callable[[Any], object]) -> Any:
        """Return the answer of the last stage's first rank: no other stage has logits. Raises RankLost where `of` it
        differs between the ranks of that stage."""
        first, *others = answers[-(self.size // self.stages) :]
        if any(of(answer) != of(first) for answer in others):
            raise RankLost("the ranks have drawn different tokens")
        return first


class CopyingRanks(Ranks):
    """The same ranks, on threads beside those of their steps. Each has a connection to this process."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks._executor, ranks.size, ranks._deadline, ranks.stages)
        with Listener(family="AF_UNIX", backlog=ranks.size) as listener:
            ranks.call("baton_serve_beside", listener.address)
            links = [listener.accept() for _ in range(ranks.size)]
        self._links = [link for _, link in sorted((int(link.recv_bytes()), link) for link in links)]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Have each rank run a method, and return what each returned, once all have. Raises RankLost."""
        until = time.monotonic() + self._deadline
        answers: list[Any] = []
        try:
            for link in self._links:
                link.send_bytes(msgpack.encode((method, args)))
            for rank, link in enumerate(self._links):
                if not link.poll(max(0.0, until - time.monotonic())):
                    raise RankLost(f"{method}: rank {rank} has not answered within {self._deadline:.0f} s")
                answers.append(msgpack.decode(link.recv_bytes()))
        except (EOFError, OSError) as error:
            raise RankLost(f"{method}: a rank has failed or gone; its log says more") from error
        return answers


def serve_beside(worker: object, rank: int, address: str) -> None:
    """Run methods of a rank's worker on a thread, as they are ordered from `address`."""
    link = Client(address, "AF_UNIX")
    link.send_bytes(str(rank).encode())

    def run() -> None:
        with link, contextlib.suppress(EOFError, ConnectionError):
            while True:
                method, args = msgpack.decode(link.recv_bytes())
                link.send_bytes(msgpack.encode(getattr(worker, method)(*args)))

    threading.Thread(target=run, name="copies", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_ranks() -> None:
    """Have vLLM fork its processes from this one, which has imported what they need and has not computed anything yet.
    Each dies with this process from its start."""
    parent = os.getpid()

    def forked() -> None:
        die_with_parent()
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(1)

    os.register_at_fork(after_in_child=forked)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
