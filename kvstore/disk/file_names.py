"""What a page's file is called. The name says all that the index must know, so a restart lists names and reads no data.

    <key, 32 digits>-<parent, 32 digits, or "start">-<page checksum, 16>-<check, 16>.kv          at most 102 bytes

Digits are lower-case hexadecimal. The check is XXH3-64 over the namespace, the page's size and the three fields before
it. So a name that was damaged, or moved here from another namespace, is none. A page's content is compared with the
page checksum whenever it is read.
"""

# pyright: strict

import re
from typing import Final, NamedTuple

from kvstore.checksum import checksum
from kvstore.keys import START

BLOCK: Final = 4_096  # what direct I/O aligns to, and a file's size is rounded up to
MAX_NAMESPACE: Final = 64  # bytes of a namespace's digest: its folder's name has to fit into 255
UNFINISHED: Final = ".tmp"
"""What a name ends in while its file is written."""
SPARE: Final = ".old"
"""What the name of an evicted page ends in while its file waits for another page."""

PAGE_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32}|start)-([0-9a-f]{16})-([0-9a-f]{16})\.kv")


class PageFile(NamedTuple):
    """A page on the disk, as its file's name describes it."""

    key: bytes
    parent: bytes  # START at a chain's start
    checksum: int


class FileNames:
    """The names of one namespace's files. `page_bytes` is the size of each."""

    def __init__(self, namespace: bytes, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._checked = namespace + page_bytes.to_bytes(8, "little")

    def name(self, page: PageFile) -> str:
        """Return the file's name below the namespace's folder. Files are spread over 256 folders by their keys."""
        key, parent, content = page
        return f"{key[-1]:02x}/{key.hex()}-{parent.hex() or 'start'}-{content:016x}-{self._check(page):016x}.kv"

    def parse(self, folder: str, name: str) -> PageFile:
        """Return what the name of a file in one of the 256 folders says. Raises ValueError for any other name."""
        match = PAGE_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} is not the name of a page's file")
        key, parent, content, check = match.groups()
        page = PageFile(bytes.fromhex(key), START if parent == "start" else bytes.fromhex(parent), int(content, 16))
        if int(check, 16) != self._check(page) or folder != key[-2:]:
            raise ValueError(f"{folder}/{name} is damaged, or the name of another namespace's file")
        return page

    def _check(self, page: PageFile) -> int:
        return checksum(self._checked + page.key + page.parent + page.checksum.to_bytes(8, "little"))


def footprint(page_bytes: int) -> int:
    """Return the bytes that a page's file takes on a disk."""
    return -(-page_bytes // BLOCK) * BLOCK
