"""The arena's memory: limits before it is taken, its size sealed, and mappings that outlive it."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.config import load
from baton.errors import NotEnoughMemory
from baton.system_memory import AvailableMemory, available_memory
from kvstore.arena import numa
from kvstore.arena.memory import Arena, arena_bytes

PAGE = 4_096
MiB = 2**20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(64 * PAGE)
    yield arena
    arena.close()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-arena")


def test_two_mappings_are_one_memory(arena: Arena) -> None:
    one, other = (Arena.attach(os.dup(arena.fd), 16, 4 * PAGE) for _ in range(2))
    one.slot(3)[:5] = b"hello"
    assert bytes(other.slot(3)[:5]) == b"hello"
    assert bytes(other.slot(2)) == bytes(4 * PAGE)
    assert len(one.slot(15)) == 4 * PAGE
    one.close()
    other.close()


def test_the_size_is_sealed_and_the_seals_too(arena: Arena) -> None:
    for size in (0, 1_000 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_its_memory_is_taken_at_once(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_blocks * 512 == 64 * PAGE


def test_an_arena_that_does_not_fit_is_refused_with_figures() -> None:
    with pytest.raises(NotEnoughMemory, match=r"1048576 bytes does not fit: memory\.max of x leaves 1000; lower"):
        Arena.create(MiB, AvailableMemory(1_000, "memory.max of x"))
    with pytest.raises(NotEnoughMemory, match="does not fit"):
        Arena.create(2**50)


def test_the_arena_of_a_machine_with_gpus_is_a_part_of_its_memory(tmp_path: Path) -> None:
    """512 MiB are 256 pages of a model with eight billion weights: fewer than one prompt of 4,096 tokens needs."""
    room, config = AvailableMemory(400 * 2**30, "a test"), load()
    assert arena_bytes(config, room, tmp_path) == 512 * MiB
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert arena_bytes(config, room, tmp_path) == 64 * 2**30, "at most so much for each GPU"
    assert arena_bytes(config, AvailableMemory(40 * 2**30, "a test"), tmp_path) == 10 * 2**30
    assert arena_bytes(config, AvailableMemory(MiB, "a test"), tmp_path) == 512 * MiB
    assert arena_bytes(load(overrides={"model.device": "cpu"}), room, tmp_path) == 512 * MiB
    assert arena_bytes(load(overrides={"store.host_cache_bytes": "3GiB"}), room, tmp_path) == 3 * 2**30


def test_the_arena_is_spread_over_numa_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it is allocated, and not longer: what the process takes later lies where it runs."""
    calls: list[object] = []

    def policy(mode: int, mask: int) -> bool:
        calls.append((mode, mask))
        return len(calls) < 4

    def spread() -> None:
        with numa.interleaved({0, 2}, policy):
            calls.append("allocated")

    spread()
    assert calls == [(3, 0b101), "allocated", (0, 0)]
    spread()  # refused, as in a container
    assert calls[3:] == [(3, 0b101), "allocated"]
    with numa.interleaved({0}, policy):
        pass
    assert len(calls) == 5
    (tmp_path / "has_cpu").write_text("0-1,4\n")
    assert numa.socket_nodes(tmp_path / "has_cpu") == {0, 1, 4}
    assert numa.socket_nodes(tmp_path / "none") == frozenset()
    during: list[bool] = []
    allocate = os.posix_fallocate
    monkeypatch.setattr("kvstore.arena.memory.socket_nodes", lambda: {0, 1})
    monkeypatch.setattr("kvstore.arena.memory.interleaved", lambda nodes: numa.interleaved(nodes, policy))
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: during.append(calls[-1] == (3, 3)) or allocate(*args))
    Arena.create(PAGE).close()
    assert during == [True]


def test_the_kernel_takes_the_policy() -> None:
    """For the nodes that are here. A container may be refused it."""
    nodes = numa.socket_nodes()
    if numa.set_policy(3, sum(1 << node for node in nodes)):
        assert numa.set_policy(0, 0)
        assert numa.may_interleave(nodes)


def test_what_the_kernel_refuses_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not tried for real: a kernel may first take all the memory there is."""

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = descriptors()
    with pytest.raises(NotEnoughMemory, match="the kernel did not give 4096 bytes"):
        Arena.create(PAGE)
    assert descriptors() == before


def test_views_outlive_the_arena(arena: Arena) -> None:
    before = mappings()
    attached = Arena.attach(os.dup(arena.fd), 16, 4 * PAGE)
    array = np.frombuffer(attached.slot(0), dtype=np.uint8)
    attached.close()
    array[0] = 7
    with pytest.raises(IndexError):
        attached.slot(0)
    assert mappings() == before + 1
    del array
    assert mappings() == before


def test_what_is_no_arena_is_not_mapped(arena: Arena) -> None:
    with pytest.raises(ValueError, match="not within an arena of"):
        Arena.attach(os.dup(arena.fd), 65, PAGE)
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ValueError, match="not sealed"):
        Arena.attach(unsealed, 1, PAGE)
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ValueError, match="within an arena"):
        Arena.attach(reading, 1, PAGE)
    unwritable = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unwritable, PAGE)
    fcntl.fcntl(unwritable, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    with pytest.raises(ValueError, match="not permitted"):
        Arena.attach(unwritable, 1, PAGE)
    endless = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(endless, 2**62)
    fcntl.fcntl(endless, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(ValueError, match="memory"):
        Arena.attach(endless, 2**62 // PAGE, PAGE)
    for fd in (unsealed, reading, unwritable, endless):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_no_slot_beyond_the_last(arena: Arena) -> None:
    attached = Arena.attach(os.dup(arena.fd), 16, PAGE)
    for index in (-1, 16):
        with pytest.raises(IndexError):
            attached.slot(index)
    attached.close()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, available_kib: int, cgroup: str) -> tuple[Path, Path]:
    write(root / "proc" / "meminfo", f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    write(root / "proc" / "self" / "cgroup", cgroup)
    return root / "proc", root / "cgroup"


def test_the_machine_bounds_where_no_cgroup_does(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 1_024, "0::/\n")
    assert available_memory(proc, cgroup) == AvailableMemory(MiB, f"MemAvailable of {proc}/meminfo")


def test_a_cgroup_of_version_2_and_its_parents_bound(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 10_240, "0::/pod/container\n")
    write(cgroup / "cgroup.controllers", "memory")
    container = cgroup / "pod" / "container"
    write(container / "memory.max", "max\n")
    write(container / "memory.current", "1\n")
    write(cgroup / "pod" / "memory.max", f"{5 * MiB}\n")
    write(cgroup / "pod" / "memory.current", f"{3 * MiB}\n")
    write(cgroup / "pod" / "memory.stat", f"anon 5\ninactive_file {MiB}\n")
    assert available_memory(proc, cgroup) == AvailableMemory(3 * MiB, f"memory.max of {cgroup / 'pod'}")
    write(container / "memory.max", f"{MiB}\n")
    assert available_memory(proc, cgroup) == AvailableMemory(MiB - 1, f"memory.max of {container}")


def test_a_cgroup_of_version_1_bounds(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 10_240, "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    job = cgroup / "memory" / "job"
    write(job / "memory.limit_in_bytes", f"{4 * MiB}\n")
    write(job / "memory.usage_in_bytes", f"{5 * MiB}\n")
    assert available_memory(proc, cgroup) == AvailableMemory(0, f"memory.limit_in_bytes of {job}")
    write(job / "memory.limit_in_bytes", "9223372036854771712\n")
    assert available_memory(proc, cgroup).available == 10 * MiB


def test_a_container_that_sees_only_its_own_group_is_bound_by_it(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 10_240, "4:memory:/host/path/of/container\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", f"{2 * MiB}\n")
    write(cgroup / "memory" / "memory.usage_in_bytes", "0\n")
    assert available_memory(proc, cgroup).available == 2 * MiB


def test_nothing_readable_bounds_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", tmp_path / "none").available == 2**63 - 1
