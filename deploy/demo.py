"""`make demo`, from its start to its end: the cluster that it starts ends with it, whatever ends it.

SIGINT, SIGTERM, SIGHUP, a closed stdout and an exception all lead to `DemoCluster.down`. `baton up` and `baton down`
run in sessions of their own, so Ctrl-C in the terminal reaches this process alone. `make demo` blocks the signals until
this module has imported what it needs, and `run` lets them in. `deploy/commands/demo.py` has what the demo shows.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.markup import escape

from baton.errors import BatonError, StartupError
from deploy.commands import demo
from deploy.commands.demo_chat import choose
from deploy.commands.terminal import OutputClosed, forget_stdout, out
from deploy.control_plane import state_file
from deploy.control_plane.reports import read_overview
from deploy.control_plane.state_file import State
from deploy.interrupts import SIGNALS, exit_status, held, interruptible
from deploy.processes import ProcessIdentity, end, session_members

NAME = "demo"
_PATIENCE = 90.0  # seconds for `baton down`, and for `baton up` to take down what it has started
_PIPE_CLOSED = 128 + signal.SIGPIPE


class DemoCluster:
    """Owns the demo's cluster. `down` may be called at any moment of `up`."""

    def __init__(self) -> None:
        self._folder = Path.home() / ".local" / "state" / "baton" / NAME
        self._up: subprocess.Popen[bytes] | None = None

    def up(self, *arguments: str) -> State:
        """Run `baton up` and return the state of the cluster. Raises StartupError, and OutputClosed."""
        with held():
            self._up = _baton("up", "--name", NAME, *arguments)
        if status := self._up.wait():
            raise OutputClosed if status == _PIPE_CLOSED else StartupError(f"baton up has failed with status {status}")
        if (state := state_file.read_state(self._folder)) is None:
            raise StartupError("`baton up` has left no state file")
        return state

    def down(self) -> list[str]:
        """End the cluster or its start, and return what is left of it: normally nothing."""
        if self._up is None or (status := self._up.poll() or 0) > 0:
            return []  # a start that has failed took down its own processes
        try:
            state = state_file.read_state(self._folder)
        except StartupError as error:
            return [str(error)]
        known = _processes(self._folder, state)
        if self._up.returncode is None:
            members = session_members(ProcessIdentity.of(self._up.pid))
            self._up.terminate()
            status = _wait(self._up)
            end(members, patience=0)  # compilers, for one
        if status <= 0:  # it serves, or was killed
            _wait(_baton("down", "--name", NAME))
        return _left(self._folder, state, known)


def main() -> int:
    """Run the demo. Return 0 if every answer was right, the stream survived and nothing is left."""
    try:
        with held():
            return run(DemoCluster())
    except KeyboardInterrupt as interrupt:  # it was held until the cluster was down
        return exit_status(interrupt)


def run(cluster: DemoCluster) -> int:
    """Show everything on a cluster that is down afterwards, and return the exit status."""
    begin, status = time.monotonic(), 1
    try:
        with interruptible():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            demo.title("a model")
            chosen = choose(lambda text: out.print(escape(text)))
            demo.title(f"baton up: one prefill worker, two decode workers, and {chosen.title}")
            status = 0 if demo.show(cluster.up(*chosen.flags, *demo.UP), chosen) else 1
    except KeyboardInterrupt as interrupt:
        status = exit_status(interrupt)
        _say("interrupted")
    except OutputClosed:
        forget_stdout()
        status = _PIPE_CLOSED
    except Exception as error:  # noqa: BLE001 - whatever it is, the line is enough, and the cluster ends
        kind = "" if isinstance(error, BatonError) else f"{type(error).__name__}: "
        _say(f"[bold red]the demo failed:[/] {kind}{escape(str(error))}")
    finally:
        _say("\n[bold cyan]baton down[/]")
        left = cluster.down()
        _say("nothing is left of the cluster but its logs" if not left else f"[red]left behind: {left}[/]")
    _say(f"\n[bold]{time.monotonic() - begin:.0f} s[/] in all")
    if status == 0:
        _say("`baton up` starts such a cluster and leaves it up, with the page at http://127.0.0.1:8000/dashboard")
    return status or bool(left)


def _processes(folder: Path, state: State | None) -> list[ProcessIdentity]:
    overview = read_overview(folder)
    views = overview.processes if overview is not None else ()
    mine = [view.identity for view in views if view.identity is not None]
    return mine + (session_members(state.ray.own.leader) if state is not None and state.ray.own is not None else [])


def _left(folder: Path, state: State | None, known: list[ProcessIdentity]) -> list[str]:
    left = [f"process {identity.pid}" for identity in known if not identity.gone()]
    if state is not None and state.ray.own is not None:
        left += [f"process {identity.pid}" for identity in session_members(state.ray.own.leader)]
        left += [state.ray.own.directory] if Path(state.ray.own.directory).exists() else []
    return left + [str(path) for path in (state_file.path(folder),) if path.exists()]


def _baton(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deploy", *arguments]
    return subprocess.Popen(command, start_new_session=True)  # noqa: S603 - our own command


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _say(text: str) -> None:
    """Print, unless nothing reads it: what comes next must be done in any case."""
    try:
        out.print(text)
    except OutputClosed:
        forget_stdout()


if __name__ == "__main__":
    sys.exit(main())
