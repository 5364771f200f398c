"""The host tier's memory: one memfd, shared by a node's store and its workers, divided into slots of one page.

A memfd has no name, so nothing is left behind however a process dies, and each process keeps its own mapping. It is
allocated when it is made, not when it is touched, and sealed against changing its size. So no process can make
another's mapping fault. `kvstore.server.state` says which process may touch which slot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from baton.config import ArenaBytes, Config
from baton.errors import NotEnoughMemory
from baton.system_memory import AvailableMemory, available_memory
from kvstore.arena.numa import interleaved, socket_nodes

_POPULATED = 16 * 2**30  # bytes; mapping them takes about half a second
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def arena_bytes(config: Config, room: AvailableMemory, dev: Path = Path("/dev")) -> ArenaBytes:
    """Return the size of the arena on this machine. `dev`, for tests, has a file for each NVIDIA GPU."""
    on_gpus = {config.device_of("prefill"), config.device_of("decode")} != {"cpu"}
    gpus = sum(1 for _ in dev.glob("nvidia[0-9]*")) if on_gpus else 0
    return config.store.host_cache_bytes.on_node(gpus, room.available)


class Arena:
    """A mapping of the shared memory. The store creates it without slots; workers attach with them."""

    def __init__(self, fd: int, size: int, slots: int, page_bytes: int) -> None:
        """Use `create` or `attach`. Takes over `fd`."""
        self.fd = fd
        self.size = size  # bytes
        self.slots = slots
        self.page_bytes = page_bytes
        self.view = _map(fd, slots * page_bytes)  # the bytes of all slots

    @classmethod
    def create(cls, size: int, room: AvailableMemory | None = None) -> Arena:
        """Allocate `size` bytes. Raises NotEnoughMemory, before taking any, when the machine or the cgroup has not
        that much left. `room` is for tests."""
        room = room or available_memory()
        if size > room.available:
            raise NotEnoughMemory(
                f"the arena of {size} bytes does not fit: {room.bound} leaves {room.available}; "
                "lower store.host_cache_bytes, or free memory on this machine"
            )
        fd = os.memfd_create("baton-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with interleaved(socket_nodes()):
                os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            raise NotEnoughMemory(
                f"the kernel did not give {size} bytes for the arena ({error.strerror}) although {room.bound} "
                f"leaves {room.available}; lower store.host_cache_bytes"
            ) from None
        return cls(fd, size, 0, 0)

    @classmethod
    def attach(cls, fd: int, slots: int, page_bytes: int) -> Arena:
        """Map the arena behind `fd`, which this takes over. Raises ValueError when it is no arena of that size, so
        that nothing that was mapped can ever be out of bounds."""
        try:
            size = os.fstat(fd).st_size
            if slots < 1 or page_bytes < 1 or slots * page_bytes > size:
                raise ValueError(f"{slots} slots of {page_bytes} bytes are not within an arena of {size}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the arena's size is not sealed; whoever made it could make our mapping fault")
            return cls(fd, size, slots, page_bytes)
        except (OSError, OverflowError, ValueError) as error:  # of the mapping, too: it may be too large, or read only
            os.close(fd)
            raise ValueError(str(error)) from None

    def divide(self, page_bytes: int) -> None:
        """Cut the arena into slots of that size, and map it. The store does, once it knows what its workers store."""
        self.view.release()
        self.slots, self.page_bytes = self.size // page_bytes, page_bytes
        self.view = _map(self.fd, self.slots * page_bytes)

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable. Keeps the mapping alive for as long as it is referred to."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} is not one of {self.slots}")
        return self.view[index * self.page_bytes : (index + 1) * self.page_bytes]

    def close(self) -> None:
        """Give up the arena. Views and tensors over its slots stay valid: the memory is unmapped with the last."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.view.release()
        self.slots = 0


def _map(fd: int, size: int) -> memoryview:
    """Map the memory, and enter its pages at once: faults on first touch would make the first hand-offs slow."""
    if not size:
        return memoryview(b"")
    populate = mmap.MAP_POPULATE if size <= _POPULATED else 0
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | populate))
