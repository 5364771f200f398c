"""Signals that end a command: SIGINT, SIGTERM and SIGHUP raise an exception, or wait until a piece of work is whole.

A command that starts processes nests the two:

    with held():                        # during the teardown below they wait
        try:
            with interruptible():       # here they raise
                ...
        except BaseException:
            ...                         # take down what was started
            raise
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal has asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_status(error: KeyboardInterrupt) -> int:
    """Return the status of a command that a signal has ended, as a shell counts: 130 after Ctrl-C."""
    return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at each of these signals. A second one raises again while the first still propagates."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handled_by(interrupt):
        yield


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep these signals back. The first one is sent again at the end; after an exception, none is."""
    arrived: list[int] = []
    with _handled_by(lambda number, _frame: arrived.append(number)):
        yield
    if arrived:
        signal.raise_signal(arrived[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    # One that is ignored stays so: SIGHUP under `nohup`, SIGINT in a script's background jobs.
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)


def quiet_at_the_edges(running: bool) -> None:
    """Let Ctrl-C raise KeyboardInterrupt while a command is `running`. Before and after, it ends Python at once.

    While modules are imported, and while the interpreter ends, a KeyboardInterrupt would only print a traceback.
    """
    edge, inside = signal.SIG_DFL, signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is (edge if running else inside):
        signal.signal(signal.SIGINT, inside if running else edge)
