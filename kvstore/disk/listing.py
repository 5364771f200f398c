"""Which pages a namespace's folder holds, by the names of its files. No file is opened.

Spare files are deleted. Files that can't be used are deleted and counted: torn ones, whose writing was cut off, damaged
names, duplicates, and orphans, whose parents are not there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.disk.file_names import SPARE, UNFINISHED, FileNames, PageFile, footprint
from kvstore.disk.files import page_files, remove
from kvstore.keys import START


@dataclass
class Listing:
    """What was found. `pages` come parents first, otherwise in the order in which they were written."""

    pages: list[PageFile] = field(default_factory=list[PageFile])
    stray_bytes: int = 0  # of useless files that could not be deleted
    torn: int = 0
    corrupt: int = 0
    orphans: int = 0
    duplicates: int = 0


def list_pages(folder: Path, names: FileNames, abandoned: Callable[[], bool]) -> Listing | None:
    """List a namespace's folder. None when `abandoned` became true meanwhile. Raises OSError where it can't."""
    result = Listing()
    entries: list[tuple[int, PageFile]] = []
    useless: list[tuple[str, int]] = []  # path, bytes
    for entry in page_files(folder):
        if abandoned():
            return None
        try:
            info = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if entry.name.endswith(SPARE):
            useless.append((entry.path, info.st_size))
            continue
        spread, name = entry.path.rsplit("/", 2)[1:]
        try:
            page = names.parse(spread, name.removesuffix(UNFINISHED))
        except ValueError:
            result.corrupt += 1
        else:
            if info.st_size == names.page_bytes and not name.endswith(UNFINISHED):
                entries.append((info.st_mtime_ns, page))
                continue
            result.torn += 1
        useless.append((entry.path, info.st_size))
    entries.sort()
    latest = {page.key: page for _, page in entries}
    result.pages = _linked(latest)
    result.duplicates = len(entries) - len(latest)
    result.orphans = len(latest) - len(result.pages)
    used = set(result.pages)
    useless += [(f"{folder}/{names.name(page)}", names.page_bytes) for _, page in entries if page not in used]
    for path, size in useless:
        try:
            remove(path)
        except OSError:
            result.stray_bytes += footprint(size)
    return result


def _linked(pages: dict[bytes, PageFile]) -> list[PageFile]:
    """Those that hang, page by page, from the start of a chain; parents first, otherwise in the order given."""
    linked: dict[bytes, PageFile] = {}
    waiting: dict[bytes, list[PageFile]] = {}  # by the parent they wait for, which was written later
    for page in pages.values():
        if page.parent != START and page.parent not in linked:
            waiting.setdefault(page.parent, []).append(page)
            continue
        ready = [page]
        while ready:
            each = ready.pop()
            linked[each.key] = each
            ready += waiting.pop(each.key, ())
    return list(linked.values())
