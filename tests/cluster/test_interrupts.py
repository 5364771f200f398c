"""However and whenever `make demo` and `baton up` are ended, nothing of the cluster is left, and no traceback is shown.

A moment is a line of their output. Ctrl-C is typed in a terminal, so it goes to make, too.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine.cpu import build
from tests.cluster.machine import MODEL, Machine, unavailable
from tests.support.thorough import cases

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(600)]

_DEMO = ["make", "-o", ".venv/.ready", "demo"]  # without the network that a set-up needs
_UP = [sys.executable, "-m", "deploy", "up", "--model", MODEL, "--set", "store.host_cache_bytes=32MiB"]
_UP += [f"--set={role}.{each}" for role in ("prefill", "decode") for each in ("kv_cache_bytes=32MiB", "threads=1")]

# Arguments: how, the moments, the command. A terminal shows the command's output until it ends.
_RUN = r"""
import json, os, pty, re, signal, subprocess, sys
how, moments, command = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
shown = ""
def read(source):
    global shown
    try:
        text = os.read(source, 10_000).decode(errors="replace")
    except OSError:  # the command has closed its terminal
        text = ""
    shown += text
    return bool(text)
if how == "pipe":
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not re.search(moments[0], shown) and read(process.stdout.fileno()):
            pass
    status = process.returncode
else:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    seen = 0
    while read(terminal):
        if moments and (match := re.search(moments[0], shown[seen:])):
            del moments[0]
            seen += match.end()
            if how == "ctrl-c":
                os.write(terminal, b"\x03")
            elif how == "close":  # the terminal's window is closed: SIGHUP
                os.close(terminal)
                break
            else:
                os.killpg(os.tcgetpgrp(terminal), signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps({"shown": shown, "status": status, "moments_missed": moments if how != "pipe" else []}))
"""


@dataclass(frozen=True)
class End:
    """How a command is ended, and after which words of its output, each of which ends it once more."""

    how: str
    moments: tuple[str, ...]
    command: tuple[str, ...] = tuple(_DEMO)

    def __str__(self) -> str:
        return f"{self.command[0].rpartition('/')[2]}-{self.how}-{'-'.join(self.moments)}".replace(" ", "_")


_TEN = [
    End("ctrl-c", ("deploy.demo",)),  # make shows the command: Python is starting
    End("ctrl-c", ("baton up:",)),
    End("ctrl-c", ("so the demo serves",)),
    End("ctrl-c", ("starting a Ray",)),
    End("ctrl-c", ("starting a Ray", "taking down|interrupted")),
    End("ctrl-c", ("starting the cluster", "interrupted")),
    End("ctrl-c", ("router is live",)),
    End("ctrl-c", ("kill -9",)),
    End("pipe", ("starting a Ray",)),
    End("pipe", ("facts first",)),
]
_MORE = [
    End("ctrl-c", ("decode-0 is live",)),
    End("ctrl-c", ("demo serves",)),
    End("ctrl-c", ("undisturbed",)),
    End("ctrl-c", ("ending the cluster's processes",)),
    End("ctrl-c", ("undisturbed", "ending the cluster's processes", "ending the Ray")),
    End("term", ("store-0 is live",)),
    End("term", ("kill -9",)),
    End("ctrl-c", ("no --model",)),
    End("close", ("starting a Ray",)),
    End("close", ("facts first",)),
    End("pipe", ("baton down",)),
]
_ALONE = [
    End("ctrl-c", ("starting a Ray", "taking down|interrupted"), tuple(_UP)),
    End("close", ("starting the cluster",), tuple(_UP)),
    End("pipe", ("router is live",), tuple(_UP)),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    if reason := unavailable():
        pytest.skip(reason)
    build.library()  # compiled here, not while a cluster starts
    with Machine() as one:
        one.make_model()
        yield one


@pytest.mark.parametrize("end", cases([*_TEN, *_ALONE, *_MORE], [*_TEN, *_ALONE]), ids=str)
def test_no_end_of_the_demo_or_of_a_start_leaves_anything(machine: Machine, end: End):
    run = [sys.executable, "-c", _RUN, end.how, json.dumps(end.moments), *end.command]
    done = machine.run(*run, timeout=500, **machine.without_models())  # the bundled model starts soonest
    assert done.status == 0, done
    shown, status = done.json["shown"], done.json["status"]
    assert done.json["moments_missed"] == [], shown
    assert status != 0 or end.moments == ("baton down",), shown  # by then everything has been shown
    assert "Traceback" not in shown + done.err, f"{shown}{done.err}"
    assert "left behind" not in shown, shown
    assert machine.left_behind() == [], shown
