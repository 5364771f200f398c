"""Signals and closed pipes at any moment of a command. `tests/cluster/test_interrupts.py` has those of clusters."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.interrupts import SIGNALS, Interrupted, exit_status, held, interruptible
from tests.support.eventually import eventually

_BATON = [sys.executable, "-m", "deploy"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_what_was_before_is_restored(number: signal.Signals):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught, interruptible():
        signal.raise_signal(number)
    assert exit_status(caught.value) == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_signal_raises_again_while_the_first_propagates():
    with pytest.raises(Interrupted) as caught, interruptible():  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM


def test_a_held_signal_waits_for_the_end():
    done = False
    with pytest.raises(Interrupted) as caught, interruptible():  # noqa: PT012
        with held():
            signal.raise_signal(signal.SIGHUP)
            done = True
        pytest.fail("the signal is lost")
    assert done
    assert exit_status(caught.value) == 129


def test_a_held_signal_does_not_hide_an_error():
    with pytest.raises(ValueError, match="broken"), interruptible(), held():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("broken")


def test_a_teardown_is_not_disturbed():
    steps: list[str] = []
    with pytest.raises(Interrupted), interruptible(), held():  # noqa: PT012
        try:
            with interruptible():
                signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            signal.raise_signal(signal.SIGINT)
            steps.append("torn down")
            raise
    assert steps == ["torn down"]


@pytest.mark.slow
def test_ctrl_c_while_modules_are_imported_shows_no_traceback():
    with subprocess.Popen([*_BATON, "top"], stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: _catches_sigint(process.pid), "Python has started")
        eventually(lambda: not _catches_sigint(process.pid), "it imports the command")
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


def _catches_sigint(pid: int) -> bool:
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) & 1 << signal.SIGINT - 1)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["config show", "config show --json", "version", "bench --list"])
def test_a_command_whose_reader_has_gone_says_nothing(command: str):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*_BATON, *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.slow
@pytest.mark.parametrize("command", ["config show", "config show --json", "version", "--help", "status -h"])
def test_a_command_whose_disk_is_full_says_so(command: str):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*_BATON, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == "error (output): stdout can't be written: [Errno 28] No space left on device\n"
    assert done.returncode == 1
