"""What killed vLLM processes and their workers leave on the machine, without vLLM."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from engine.vllm_runner import leftovers
from engine.vllm_runner.leftovers import ProcessFolder, remove_abandoned

WORKER = """
import sys
from pathlib import Path
from engine.vllm_runner import leftovers
leftovers.parent = lambda: Path(sys.argv[1])
print(leftovers.ProcessFolder().path, flush=True)
sys.stdin.read()
"""
ENDED = 2**22 + 1  # above every process id


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm; temporary files are kept below another folder."""
    folder = tmp_path / "shm"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
    monkeypatch.setattr(leftovers, "parent", lambda: tmp_path / "tmp")
    return folder


def test_a_folder_goes_with_the_memory_that_its_ranks_shared(shared: Path):
    folder, other = ProcessFolder(), ProcessFolder()
    assert set(folder.environment.values()) == {str(folder.path)}
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "vllm_dist_ab").touch()
    for name in ("vllm_dist_ab-tp:0-[0-1]-cpushm", "vllm_dist_abc-tp:0", "another"):
        (shared / name).touch()
    folder.remove()
    assert {file.name for file in shared.iterdir()} == {"vllm_dist_abc-tp:0", "another"}
    assert not folder.path.exists()
    assert other.path.exists()
    other.remove()


def test_the_next_worker_removes_what_a_killed_one_left(tmp_path: Path):
    argv = [sys.executable, "-c", WORKER, str(leftovers.parent())]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        left = Path(worker.stdout.readline().strip())
        (left / "socket").touch()
        remove_abandoned()
        assert (left / "socket").exists(), "its worker lives"
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        folder = ProcessFolder()
        assert not left.exists()
        folder.remove()
        assert not list((tmp_path / "tmp").iterdir())


def test_links_and_files_in_its_place_are_left_alone(tmp_path: Path):
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "file").touch()
    link = tmp_path / "tmp" / "baton-vllm-link"
    link.symlink_to(folder)
    (tmp_path / "tmp" / "baton-vllm-file").touch()
    remove_abandoned()
    assert (folder / "file").exists()
    assert link.is_symlink()
    assert (tmp_path / "tmp" / "baton-vllm-file").exists()


def test_names_of_ended_processes_of_this_user_go(shared: Path):
    user = os.getuid()
    stay = {f"__KMP_REGISTERED_LIB_{os.getpid()}_{user}", f"__KMP_REGISTERED_LIB_{ENDED}_{user + 1}"}
    stay.add("__KMP_REGISTERED_LIB_x")
    for name in (*stay, f"__KMP_REGISTERED_LIB_{ENDED}_{user}"):
        (shared / name).touch()
    remove_abandoned()
    assert {file.name for file in shared.iterdir()} == stay


def test_without_room_for_a_folder_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leftovers, "_lock", lambda folder: None)
    with pytest.raises(OSError, match=f"no folder in {tmp_path}/tmp can be locked"):
        ProcessFolder()


def test_paths_of_sockets_are_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    for usual, expected in (("/var/tmp", "/var/tmp"), ("/" + 49 * "a", "/" + 49 * "a"), ("/" + 50 * "a", "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", usual)
        assert leftovers.parent() == Path(expected)
    monkeypatch.undo()
    folder = ProcessFolder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.path}/{uuid.uuid4()}")
    folder.remove()
    assert not folder.path.exists()
