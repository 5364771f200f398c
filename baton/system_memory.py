"""How much memory this process may still take: what the machine has left, and what its cgroup allows."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that may still be taken, and what sets that bound, in words."""

    available: int
    bound: str


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> AvailableMemory:
    """The tightest bound found; the arguments are for tests. What can't be read does not bound."""
    rooms = [room for room in (_machine(proc), *_cgroups(proc, cgroup)) if room is not None]
    return min(rooms, key=lambda room: room.available, default=AvailableMemory(2**63 - 1, "nothing that can be read"))


def _machine(proc: Path) -> AvailableMemory | None:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return AvailableMemory(int(value.split()[0]) * 1_024, f"MemAvailable of {proc}/meminfo")
    return None


def _cgroups(proc: Path, root: Path) -> list[AvailableMemory]:
    """The room left in every cgroup from our own up: a limit on a parent binds as well."""
    rooms: list[AvailableMemory] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
            if not (top / "cgroup.controllers").exists():
                top = root / "unified"
        elif "memory" in controllers.split(","):
            top, limit, usage, cache = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = top / path.lstrip("/")
        # In a container the path may be the host's, while only its own group is mounted, at the top.
        for folder in [group, *group.parents] if group.is_dir() else [top]:
            room = _group(folder, limit, usage, cache)
            if room is not None:
                rooms.append(room)
            if folder == top:
                break
    return rooms


def _group(folder: Path, limit: str, usage: str, cache: str) -> AvailableMemory | None:
    allowed, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not allowed.isdigit() or not used.isdigit() or int(allowed) >= 2**60:
        return None  # "max", or version 1's way of saying so
    droppable = 0  # page cache that the kernel gives up before it refuses
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache:
            droppable = int(value)
    return AvailableMemory(max(0, int(allowed) - int(used) + droppable), f"{limit} of {folder}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
