"""The loop of a helper process (`helper_process`): it reads orders from stdin and writes answers to stdout."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from ctypes import CDLL
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], memory: int) -> None:
    """Answer until stdin ends, or the process that started this one does. The address space is `memory` bytes."""
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    while len(head := given.read(4)) == 4:
        order = json.loads(given.read(int.from_bytes(head, "big")))
        said = json.dumps(answer(order["order"]) | {"number": order["number"]}).encode()
        taken.write(len(said).to_bytes(4, "big") + said)
        taken.flush()
