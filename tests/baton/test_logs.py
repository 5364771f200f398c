"""Logs: bounded files, and bounded lines of what a stranger can trigger."""

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import logs
from baton.config import Bytes, ClusterConfig
from baton.logs import RateLimit, RateLimitedLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was before once the test has ended."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    for handler in root.handlers[:]:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_one_line_of_a_kind_per_interval_and_the_next_counts_those_left_out() -> None:
    clock = Clock()
    limit = RateLimit(interval=10.0, clock=clock)
    assert [limit.admit("a") for _ in range(1_000)] == [0, *[None] * 999]
    assert limit.admit("b") == 0  # another kind
    clock.now += 9.9
    assert limit.admit("a") is None
    clock.now += 0.2
    assert limit.admit("a") == 1_000
    assert limit.admit("a") is None
    clock.now += 10.0
    assert limit.admit("a") == 1


def test_a_burst_is_let_through() -> None:
    limit = RateLimit(interval=10.0, burst=3, clock=Clock())
    assert [limit.admit("a") for _ in range(5)] == [0, 0, 0, None, None]


def test_a_limit_remembers_a_bounded_number_of_kinds() -> None:
    limit = RateLimit(clock=Clock())
    for kind in range(5_000):
        limit.admit(kind)
    assert len(limit._kinds) <= 1_000


def test_a_line_is_short_printable_and_says_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RateLimitedLog(logging.getLogger("baton.test"), RateLimit(clock=clock))
    for _ in range(3):
        log.warning("a stranger sent %s", "x\nforged line\x1b[0m" + "y" * 10_000)
    clock.now += 11
    log.warning("a stranger sent %s", "z")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("a stranger sent x\\nforged line\\x1b[0myyy")
    assert len(first) <= 500
    assert second == "a stranger sent z (2 lines like this were left out)"


def test_a_log_is_rotated_and_only_its_user_reads_it(tmp_path: Path, root: logging.Logger) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "store-0.log").touch(0o644)
    (folder / "store-0.log").chmod(0o644)  # whatever the umask
    cluster = ClusterConfig(log_dir=str(folder), log_max_bytes=Bytes(10_000), log_files=2)
    path = logs.configure("store-0", cluster)
    log = logging.getLogger("kvstore.test")
    for number in range(2_000):
        log.info("line %d", number)
    files = sorted(folder.iterdir())
    assert [each.name for each in files] == ["store-0.log", "store-0.log.1", "store-0.log.2"]
    assert path == files[0]
    for each in files:
        assert each.stat().st_size <= 10_000
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert files[0].read_text().endswith(" line 1999\n")


def test_tracebacks_and_lines_of_libraries_are_limited(tmp_path: Path, root: logging.Logger) -> None:
    path = logs.configure("router", ClusterConfig(log_dir=str(tmp_path)))
    ours, library = logging.getLogger("router.frontend.grpc_api.grpc_server"), logging.getLogger("asyncio")
    for number in range(500):
        library.error("no more descriptors %d", number)
        try:
            raise ValueError("garbage of a client")
        except ValueError:
            ours.exception("failed")
        ours.info("request %d ended", number)
    text = path.read_text()
    assert text.count("no more descriptors") == 5
    assert text.count("Traceback") == 5
    assert text.count(" ended\n") == 500  # a line of ours without a traceback always comes
