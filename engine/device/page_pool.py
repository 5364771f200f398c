"""The bytes of a device's pages, and copying them to and from host memory, one page at a time."""

import torch

from kvstore.checksum import page_checksum


class PagePool:
    """Wraps the pool's tensor, [num_pages, …], of pages of so many KV heads. Host memory is any writable buffer of one
    page.

    On a CPU a copy is one memory move on the calling thread. A tensor's own copy divides itself among threads. Their
    meeting costs more than copying a page, and a hundred times that when another program has their core."""

    def __init__(self, pool: torch.Tensor, page_bytes: int, kv_heads: int) -> None:
        self.page_bytes, self.kv_heads = page_bytes, kv_heads
        self.bytes = pool.view(torch.uint8).view(len(pool), page_bytes)
        """[num_pages, page_bytes]; writing to it writes to the pages."""
        self._view = self.bytes.view(-1).numpy().data if pool.device.type == "cpu" else None

    def copy_out(self, page: int, dest: memoryview) -> None:
        """Copy a device page into `dest`. It has ended when this returns."""
        if self._view is not None:
            dest[:] = self._view[page * self.page_bytes : (page + 1) * self.page_bytes]
        else:
            torch.frombuffer(dest, dtype=torch.uint8).copy_(self.bytes[page])

    def copy_in(self, src: memoryview, page: int) -> None:
        """Copy `src` into a device page. It has ended when this returns."""
        if self._view is not None:
            self._view[page * self.page_bytes : (page + 1) * self.page_bytes] = src
        else:
            self.bytes[page].copy_(torch.frombuffer(src, dtype=torch.uint8))

    def duplicate(self, source: int, dest: int) -> None:
        """Copy one device page to another. It has ended when the next step begins."""
        if self._view is not None:
            size = self.page_bytes
            self._view[dest * size : (dest + 1) * size] = self._view[source * size : (source + 1) * size]
        else:
            self.bytes[dest].copy_(self.bytes[source])

    def copy_in_checked(self, src: memoryview, page: int) -> int:
        """As `copy_in`; returns the checksum of the page's bytes. On a CPU they are read where they have come to lie,
        which the cache still has, so that all of it costs little more than the copy."""
        self.copy_in(src, page)
        if self._view is not None:
            return page_checksum(self._view[page * self.page_bytes : (page + 1) * self.page_bytes], self.kv_heads)
        return page_checksum(src, self.kv_heads)

    def view(self, page: int) -> torch.Tensor:
        """The bytes of one device page, [page_bytes] uint8; writing to it writes to the page."""
        return self.bytes[page]
