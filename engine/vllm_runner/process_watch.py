"""Tells of the end of any of vLLM's processes, on a thread, as soon as the kernel knows it."""

import os
import select
import threading
from collections.abc import Callable, Mapping

from baton.unix import is_pidfd, readable


class ProcessWatch:
    """Watches processes by pidfds. `lost` is called once, on another thread, with the name of the first that ends."""

    def __init__(self, processes: Mapping[str, int], lost: Callable[[str], None]) -> None:
        """`processes`: process ids by name. Raises ProcessLookupError when one has ended already."""
        self.pidfds: list[int] = []
        try:
            for pid in processes.values():
                self.pidfds.append(os.pidfd_open(pid))
        except OSError:
            self._close()
            raise
        assert all(map(is_pidfd, self.pidfds))
        self._names = dict(zip(self.pidfds, processes, strict=True))
        self._lost = lost
        self._ending, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="vllm-processes", daemon=True)
        self._thread.start()

    def await_ends(self, seconds: float) -> None:
        """Wait until all processes have ended, for at most so long each."""
        for fd in self.pidfds:
            readable(fd, seconds)

    def close(self) -> None:
        """Watch no longer. The descriptors stay valid until this returns."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ending)
        self._close()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self.pidfds, self._ending):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        ready = [fd for fd, _ in poll.poll()]
        if self._ending not in ready:
            self._lost(self._names[ready[0]])

    def _close(self) -> None:
        for fd in self.pidfds:
            os.close(fd)
