"""The worker's end of the link to vLLM's process: orders go out, and each order's answer ends a wait."""

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import NamedTuple

from baton.errors import DeviceLost
from engine.vllm_runner import messages
from engine.vllm_runner.messages import Answer, Order

_PATIENCE = 600.0  # seconds for an order


class Pending:
    """An order that awaits its answer."""

    def __init__(self) -> None:
        self._answered = threading.Event()
        self._answer: Answer | None = None
        self._lost = ""

    def answer(self, answer: Answer) -> None:
        self._answer = answer
        self._answered.set()

    def lose(self, why: str) -> None:
        self._lost = why
        self._answered.set()

    @property
    def done(self) -> bool:
        return self._answered.is_set()

    def ended(self, seconds: float) -> bool:
        """Wait until the order was carried out or the child has gone; return whether either has come."""
        return self._answered.wait(seconds)

    def wait(self, seconds: float = _PATIENCE) -> Answer:
        """Raises DeviceLost when the child has gone, or does not answer in time."""
        if not self._answered.wait(seconds):
            raise DeviceLost(f"no answer from vLLM within {seconds:.0f} s")
        if self._answer is None:
            raise DeviceLost(self._lost)
        return self._answer


class _Outgoing(NamedTuple):
    """An order to send: `make` returns it, `fd` follows it, and `pending` awaits its answer, if it has one."""

    make: Callable[[], Order]
    fd: int | None
    pending: Pending | None


class ChildLink:
    """Orders out and answers in. A thread sends, since an order may wait for masks, and one receives. Whatever ends
    either of them is told to all that wait: the child is lost then."""

    def __init__(self, link: Connection) -> None:
        self.alarm: Callable[[], None] = lambda: None
        self._link = link
        self._awaited: deque[Pending] = deque()
        self._lost = ""
        self._orders: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        for name, run in (("vllm-orders", self._send), ("vllm-answers", self._receive)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def order(self, make: Callable[[], Order], fd: int | None = None) -> Pending:
        """Send what `make` returns once all earlier orders have been sent. It is called on another thread. Takes over
        `fd`. Raises DeviceLost."""
        pending = Pending()
        self._put(_Outgoing(make, fd, pending))
        return pending

    def tell(self, order: Order) -> None:
        """Send an order that has no answer. Raises DeviceLost."""
        self._put(_Outgoing(lambda: order, None, None))

    def check_alive(self) -> None:
        """Raises DeviceLost."""
        if self._lost:
            raise DeviceLost(self._lost)

    def close(self) -> None:
        self._orders.put(None)

    def _put(self, outgoing: _Outgoing) -> None:
        try:
            self.check_alive()
        except DeviceLost:
            if outgoing.fd is not None:
                os.close(outgoing.fd)
            raise
        self._orders.put(outgoing)

    def _send(self) -> None:
        while (outgoing := self._orders.get()) is not None:
            try:
                content = messages.encode(outgoing.make())
                if self._expect(outgoing.pending):
                    self._link.send_bytes(content)
                    if outgoing.fd is not None:
                        send_handle(self._link, outgoing.fd, 0)
            except Exception as error:  # noqa: BLE001 - the thread must not end without a word: others wait for it
                self.lose(f"vLLM's process can't be told anything more: {type(error).__name__}: {error}")
                if outgoing.pending is not None:
                    outgoing.pending.lose(self._lost)
            finally:
                if outgoing.fd is not None:
                    os.close(outgoing.fd)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as ending:
            ending.shutdown(socket.SHUT_RDWR)  # what the other thread reads has an end, and so has the child's

    def _expect(self, pending: Pending | None) -> bool:
        """Await the answer. Return whether there is still a child to give it."""
        with self._lock:
            if self._lost:
                if pending is not None:
                    pending.lose(self._lost)
                return False
            if pending is not None:
                self._awaited.append(pending)
            return True

    def _receive(self) -> None:
        try:
            while True:
                answer = messages.decode_answer(self._link.recv_bytes())
                self._awaited.popleft().answer(answer)
                self.alarm()
        except Exception as error:  # noqa: BLE001 - as in `_send`
            self.lose(f"vLLM's process has gone: {type(error).__name__}: {error}")
        finally:
            self._link.close()

    def lose(self, why: str) -> None:
        """Tell all that wait, and all later orders, that the child is lost."""
        with self._lock:
            self._lost = self._lost or why
            lost = list(self._awaited)
            self._awaited.clear()
        for pending in lost:
            pending.lose(self._lost)
        self.alarm()
