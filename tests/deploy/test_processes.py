"""Processes named by pid and start, and children that die with their parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.processes import ProcessIdentity, end, session_members

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@contextmanager
def running(
    command: list[str] = SLEEP, **options: bool | int
) -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    with subprocess.Popen(command, **options) as process:  # pyright: ignore[reportCallIssue, reportArgumentType]
        try:
            yield process, ProcessIdentity.of(process.pid)
        finally:
            process.kill()


def test_a_process_is_gone_as_soon_as_it_is_killed_reaped_or_not():
    with running() as (process, identity):
        assert not identity.gone()
        assert not identity.wait(0.01)
        process.kill()
        assert identity.wait(5)
        assert identity.gone()  # a zombie
        process.wait()
        assert identity.gone()


def test_a_reused_pid_is_another_process():
    with running() as (process, identity):
        stranger = ProcessIdentity(identity.pid, identity.started - 1)
        assert stranger.gone()
        stranger.signal(signal.SIGKILL)
        assert end([stranger], patience=0) == []
        assert not identity.gone()
        assert process.poll() is None


def test_a_pid_that_has_become_the_number_of_a_thread_is_gone():
    """As a process of another host may have: `baton down` asks for those, too."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, args=(60,))
    thread.start()
    try:
        assert thread.native_id is not None
        was = ProcessIdentity(thread.native_id, 1)
        assert was.gone()
        assert end([was], patience=0) == []
    finally:
        ends.set()
        thread.join()


def test_a_stopped_process_is_not_gone_and_can_be_ended():
    with running() as (_, identity):
        identity.signal(signal.SIGSTOP)
        assert not identity.gone()
        assert end([identity], patience=0.05) == []
        assert identity.gone()


def test_end_waits_for_what_ends_by_itself_and_kills_what_does_not():
    stubborn = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    with running() as (willing, one), running([sys.executable, "-c", stubborn], stdout=subprocess.PIPE) as (other, two):
        assert other.stdout.readline() == b"on\n"
        assert end([one, two], patience=1.0) == []
        assert willing.wait() == -signal.SIGTERM
        assert other.wait() == -signal.SIGKILL
        other.stdout.close()


def test_a_session_is_found_even_when_its_leader_has_gone(tmp_path: Path):
    script = f"sh -c 'echo $$ > {tmp_path}/inner; exec sleep 60' & wait"
    with running(["sh", "-c", script], start_new_session=True) as (leader, identity):
        inner = tmp_path / "inner"
        deadline = time.monotonic() + 5
        while not (inner.exists() and inner.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.01)
        orphan = int(inner.read_text())
        assert {member.pid for member in session_members(identity)} == {identity.pid, orphan}
        leader.kill()
        leader.wait()
        assert {member.pid for member in session_members(identity)} == {orphan}
        assert session_members(ProcessIdentity(os.getpid(), 1)) == []  # the pid now means another process
        assert end(session_members(identity), patience=0) == []
        assert session_members(identity) == []


def test_no_such_process():
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(2**22 + 1)


def test_a_child_dies_with_its_parent(tmp_path: Path):
    """However the parent ends: here by SIGKILL."""
    (tmp_path / "sleeper.py").write_text(
        f"import os, time, pathlib; pathlib.Path(r'{tmp_path}/pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-m', 'deploy.child', str(os.getpid()), 'sleeper']); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    with subprocess.Popen([sys.executable, "-c", parent], env=environment) as process:
        pid = tmp_path / "pid"
        deadline = time.monotonic() + 10
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        child = ProcessIdentity.of(int(pid.read_text()))
        process.kill()
        assert child.wait(5)


def test_a_child_whose_parent_is_already_gone_does_not_start():
    result = subprocess.run(
        [sys.executable, "-m", "deploy.child", "1", "this"], capture_output=True, text=True, check=False, timeout=30
    )
    assert result.returncode == 1
    assert "has gone" in result.stderr
