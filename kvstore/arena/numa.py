"""Memory spread over the NUMA nodes of a machine.

The kernel gives a process memory of the socket that it runs on. GPUs of the other socket would reach the arena only
through the link between the sockets, all of them at once.
"""

# pyright: strict

import ctypes
import logging
import platform
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_INTERLEAVE, _DEFAULT = 3, 0  # of linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # number of the system call


def socket_nodes(file: Path = Path("/sys/devices/system/node/has_cpu")) -> frozenset[int]:
    """Return the numbers of the NUMA nodes with processors; none where the kernel does not tell. Others may be the
    memory of a GPU."""
    try:
        ranges = [part.partition("-") for part in file.read_text().strip().split(",")]
        return frozenset(node for first, _, last in ranges for node in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def set_policy(policy: int, mask: int) -> bool:
    """Set from which nodes this thread gets memory. Return whether the kernel did: containers may not."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    bits = ctypes.c_ulong(mask)
    nodes, width = (ctypes.byref(bits), 8 * ctypes.sizeof(bits)) if mask else (None, 0)
    return ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(policy), nodes, ctypes.c_ulong(width)) == 0


def _mask(nodes: Collection[int]) -> int:
    return sum(1 << node for node in nodes)


def may_interleave(nodes: Collection[int]) -> bool:
    """Whether the kernel lets this process spread memory over these nodes."""
    return len(nodes) < 2 or (set_policy(_INTERLEAVE, _mask(nodes)) and set_policy(_DEFAULT, 0))


@contextmanager
def interleaved(nodes: Collection[int], set_policy: Callable[[int, int], bool] = set_policy) -> Generator[None]:
    """Let memory that this thread allocates come from all these nodes in turn. Nothing is done for a single one."""
    spread = len(nodes) > 1 and set_policy(_INTERLEAVE, _mask(nodes))
    if len(nodes) > 1 and not spread:
        log.warning("the arena may lie on one of %d NUMA nodes: the kernel refuses to spread it", len(nodes))
    try:
        yield
    finally:
        if spread:
            set_policy(_DEFAULT, 0)
