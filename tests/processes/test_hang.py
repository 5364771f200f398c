"""`tests/support/hung_thread.py`: one thread of a process stands still, the others go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.hung_thread import hung, stopped

_CHILD = """
import sys, threading

def answer():
    for line in sys.stdin:
        print(line.strip(), flush=True)

threading.Thread(target=answer, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


def test_the_main_thread_stands_still_while_another_answers() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            with hung(child.pid):
                assert stopped(child.pid)
                child.stdin.write("while it is stopped\n")
                child.stdin.flush()
                assert child.stdout.readline() == "while it is stopped\n"
            assert not stopped(child.pid)
            with hung(child.pid):  # a process that dies meanwhile
                child.kill()
                assert child.wait(60) == -9
        finally:
            child.kill()


def test_a_thread_that_computes_is_stopped_where_it_waits() -> None:
    """Stopped elsewhere it would hold the interpreter's lock, and no other thread would answer."""
    busy = _CHILD.replace(
        "threading.Event().wait()", "import time\nwhile True:\n    sum(range(30_000)); time.sleep(1e-4)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            for turn in range(10):
                with hung(child.pid):
                    child.stdin.write(f"{turn}\n")
                    child.stdin.flush()
                    assert child.stdout.readline() == f"{turn}\n"
        finally:
            child.kill()


def test_a_process_that_does_not_exist() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    with pytest.raises(ProcessLookupError, match=str(child.pid)), hung(child.pid):
        pass
