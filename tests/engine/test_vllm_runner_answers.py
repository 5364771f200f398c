"""Two steps under way in vLLM's process: one is launched while another runs. Answers come in order."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from engine.vllm_runner import messages
from engine.vllm_runner.child import serve
from engine.vllm_runner.messages import Answer, Copied, Drawn, Failed, Order, RemoveAdapter, Step
from tests.support.eventually import eventually


class Device:
    """A child whose steps end when they are told to. A step's number stands in `gone`; those in `bad` fail."""

    has_ranks = False
    launches_ahead = True

    def __init__(self) -> None:
        self.did: list[int | Order] = []
        self.ends = defaultdict[int, threading.Event](threading.Event)
        self.bad: set[int] = set()

    def launch(self, order: Step) -> Callable[[], Drawn]:
        (number,) = order.gone
        if number in self.bad:
            raise ValueError(f"step {number} is bad")
        self.did.append(number)

        def collect() -> Drawn:
            assert self.ends[number].wait(10.0)
            if -number in self.bad:
                raise ValueError(f"step {number} went wrong")
            return Drawn([()], {}, float(number))

        return collect

    def carry_out(self, order: Order) -> Answer:
        self.did.append(order)
        return Copied()


class Worker:
    def __init__(self, link: Connection) -> None:
        self._link = link

    def order(self, *orders: Order) -> None:
        for order in orders:
            self._link.send_bytes(messages.encode(order))

    def step(self, *numbers: int) -> None:
        self.order(*(Step([], [number]) for number in numbers))

    def hear(self) -> object:
        """The next answer: of a step its number, of another order its kind."""
        assert self._link.poll(10.0)
        answer = messages.decode_answer(self._link.recv_bytes())
        return answer.seconds if isinstance(answer, Drawn) else answer if isinstance(answer, Failed) else type(answer)

    @property
    def hears_nothing(self) -> bool:
        return not self._link.poll(0.0)


@pytest.fixture
def both() -> Iterator[tuple[Worker, Device]]:
    ours, theirs = Pipe()
    device: Any = Device()
    serving = threading.Thread(target=serve, args=(theirs, device))
    serving.start()
    yield Worker(ours), device
    ours.close()
    serving.join(10.0)
    assert not serving.is_alive()


def test_a_step_is_launched_while_another_runs_and_no_third(both: tuple[Worker, Device]) -> None:
    worker, device = both
    worker.step(1, 2, 3)
    eventually(lambda: device.did == [1, 2])
    assert worker.hears_nothing
    device.ends[1].set()
    assert worker.hear() == 1
    eventually(lambda: device.did == [1, 2, 3])
    device.ends[3].set()  # it can't be before the second, and its answer neither
    assert worker.hears_nothing
    device.ends[2].set()
    assert [worker.hear(), worker.hear()] == [2, 3]


def test_other_orders_come_between_steps(both: tuple[Worker, Device]) -> None:
    worker, device = both
    other = RemoveAdapter(1, [])
    worker.step(1, 2)
    worker.order(other)
    worker.step(3)
    eventually(lambda: device.did == [1, 2])
    device.ends[1].set()
    assert worker.hear() == 1
    assert device.did == [1, 2]
    device.ends[2].set()
    assert [worker.hear(), worker.hear()] == [2, Copied]
    eventually(lambda: device.did == [1, 2, other, 3])
    device.ends[3].set()
    assert worker.hear() == 3


def test_a_step_that_fails_is_answered_in_its_turn(both: tuple[Worker, Device]) -> None:
    worker, device = both
    device.bad = {2, -4}
    worker.step(1, 2, 3, 4, 5)
    eventually(lambda: device.did == [1])  # the second can't be launched
    assert worker.hears_nothing
    for number in (1, 3, 4, 5):
        device.ends[number].set()
    assert [worker.hear() for _ in range(5)] == [
        1, Failed("ValueError", "step 2 is bad"), 3, Failed("ValueError", "step 4 went wrong"), 5
    ]  # fmt: skip
