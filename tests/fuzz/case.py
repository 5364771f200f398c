"""One exchange of a fuzzer, and one after another.

A case draws all it does from (seed, target, number), so a number names it.
"""

import json
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

_PIECE_BYTES = 64 * 2**10  # bytes of each piece that a finding shows
_PIECES = 32  # the last pieces that a finding shows
_FINDINGS = 6  # after which a target is fuzzed no more


@dataclass
class Case:
    """What one exchange draws from, and what it has sent."""

    seed: int
    target: str
    number: int
    rng: random.Random = field(init=False)
    sent: list[bytes] = field(default_factory=list[bytes])
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}/{self.target}/{self.number}")

    def sending(self, piece: bytes) -> bytes:
        """Note a piece that is about to be sent; return it."""
        self.sent.append(piece[:_PIECE_BYTES])
        del self.sent[:-_PIECES]
        return piece


class Target(Protocol):
    """One socket, or one kind of peer."""

    threads: int  # that make cases at the same time

    def run(self, case: Case) -> str:
        """Make the case; return its kind, to be counted. Raises AssertionError for a finding."""
        ...


@runtime_checkable
class SlowStarter(Protocol):
    """A target that can't make a case at once."""

    def start(self) -> None:
        """Wait until a case can be made. Raises AssertionError if none ever can."""
        ...


@dataclass(frozen=True)
class Summary:
    """What a fuzzing process says at its end."""

    counts: Mapping[str, int]
    findings: Sequence[Mapping[str, Any]]


def parse_summary(line: bytes) -> Summary:
    read = json.loads(line)
    return Summary(read["counts"], read["findings"])


def fuzz(name: str, target: Target, seed: int, first: int, most: int, going_on: Callable[[], bool]) -> Summary:
    """Make cases from number `first` on, at most `most` of them, until some have found something."""
    numbers = iter(range(first, first + most))
    counts: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    lock = threading.Lock()

    def work() -> None:
        while len(findings) < _FINDINGS and going_on():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            case = Case(seed, name, number)
            try:
                kind = target.run(case)
            except BaseException as error:  # noqa: BLE001 the finding says what it is
                finding = _finding(case, error)
                with lock:
                    findings.append(finding)
                continue
            with lock:
                counts[kind] += 1

    threads = [threading.Thread(target=work, name=f"{name}-{index}", daemon=True) for index in range(target.threads)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and going_on():
        time.sleep(0.05)
    until = time.monotonic() + 240.0  # what runs may end; every exchange has a deadline of its own
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        findings.append({"target": name, "seed": seed, "case": -1, "why": "an exchange had no end", "sent": []})
    return Summary(counts, findings)


def _finding(case: Case, error: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(error) if not isinstance(error, AssertionError) else [str(error)]
    return {
        "target": case.target,
        "seed": case.seed,
        "case": case.number,
        "why": "".join(lines)[-4_000:],
        "notes": case.notes[-10:],
        "sent": [repr(piece) for piece in case.sent],
    }
