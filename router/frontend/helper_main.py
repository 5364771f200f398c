"""The loop of a helper process (`off_loop`): it reads orders from stdin and writes answers to stdout."""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import signal
import sys
from collections.abc import Callable
from ctypes import CDLL
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1
_PIPE_BYTES = 2**20  # as many as Linux lets any user have; a long order or answer passes in one piece
READY = bytes(4)
"""What a helper says once it has imported its libraries, before its first answer."""


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], memory: int) -> None:
    """Answer until stdin ends, or the process that started this one does. The address space is `memory` bytes."""
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    for pipe in (orders, answers):
        with contextlib.suppress(OSError):  # the user's pipes have too many bytes together
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    answers.write(READY)
    answers.flush()
    while len(head := orders.read(4)) == 4:
        order = msgspec.json.decode(orders.read(int.from_bytes(head, "big")))
        body = answer(order["order"]) | {"number": order["number"]}
        try:
            encoded = msgspec.json.encode(body)
        except UnicodeEncodeError:  # half a surrogate pair in an error's text
            encoded = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        answers.write(len(encoded).to_bytes(4, "big") + encoded)
        answers.flush()
