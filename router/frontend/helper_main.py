"""The loop of a helper process (`off_loop`): it reads orders from stdin and writes answers to stdout."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from ctypes import CDLL
from typing import Any

_PR_SET_PDEATHSIG = 1
READY = bytes(4)
"""What a helper says once it has imported its libraries, before its first answer."""


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], memory: int) -> None:
    """Answer until stdin ends, or the process that started this one does. The address space is `memory` bytes."""
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(READY)
    answers.flush()
    while len(head := orders.read(4)) == 4:
        order = json.loads(orders.read(int.from_bytes(head, "big")))
        body = json.dumps(answer(order["order"]) | {"number": order["number"]}, ensure_ascii=False)
        encoded = body.encode(errors="replace")
        answers.write(len(encoded).to_bytes(4, "big") + encoded)
        answers.flush()
