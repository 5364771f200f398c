"""What can be read off the disk tier."""

# pyright: strict

from dataclasses import dataclass


@dataclass(slots=True)
class DiskCounters:
    """What has happened since the start."""

    written: int = 0  # pages
    read: int = 0  # pages
    evictions: int = 0
    dropped_writes: int = 0  # pages not taken: no room, no time, no disk
    torn: int = 0  # files whose writing was cut off
    corrupt: int = 0  # files that did not match their checksum, or whose name did not
    orphans: int = 0  # pages found without those before them
    duplicates: int = 0  # pages found twice
    damaged: int = 0  # pages that did not match their checksum in the arena
    errors: int = 0  # orders that failed


@dataclass(slots=True, kw_only=True)
class DiskStats(DiskCounters):
    """A snapshot of the disk tier: what is so now, beside what has happened."""

    state: str  # "off", "opening", "on", "failed: reason"
    pages: int  # readable
    bytes: int  # of all files that are ours, those on their way included
    reading: int  # pages
    writing: int  # pages
