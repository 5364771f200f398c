"""How much memory a process takes, by the kernel's count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes: the most that it ever had at a time, and what it has now."""

    peak: int  # VmHWM
    anonymous: int  # RssAnon: its own
    files: int  # RssFile: libraries, and what else of files it has mapped
    shared: int  # RssShmem: what it has touched of the arena

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Raises FileNotFoundError when there is no such process."""
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1_024 for words in lines if words[-1:] == ["kB"]}
        return cls(*(sizes[f"{name}:"] for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")))
