"""A slow disk: `python -m bench.throttled BYTES_PER_SECOND LATENCY_SECONDS COMMAND…` runs a store's command, and reads
from its disk tier take as long as they would on such a disk. Nothing else about it is changed.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time

from kvstore.disk.file_names import PageFile
from kvstore.disk.files import PageFiles


def slow_down(bytes_per_second: float, latency: float) -> None:
    """From now on reads of pages in this process take that long; one is under way at a time."""
    read = PageFiles.read_page
    device = threading.Lock()

    def slowly(self: PageFiles, page: PageFile, room: memoryview) -> int:
        with device:
            began = time.monotonic()
            size = read(self, page, room)
            time.sleep(max(0.0, began + latency + size / bytes_per_second - time.monotonic()))
            return size

    PageFiles.read_page = slowly


def main() -> None:
    rate, latency, _python, _dash_m, module, *arguments = sys.argv[1:]
    slow_down(float(rate), float(latency))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
