"""`make demo`: a whole cluster on this machine, a chat, one killed worker, and nothing left behind.

The demo works as a user would: `baton up`, a chat over HTTP, a stream over gRPC, `baton down`. `demo_chat.py` chooses
the model. Each turn of the chat finds the KV pages of the turns before it. The last questions ask for facts of the
first message: if a page were lost or wrong, the answer would be wrong, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from baton.client import Client, Generated, OutputDelta
from baton.errors import BatonError, StartupError
from baton.v1 import cluster_pb2
from deploy.commands.demo_chat import Show, choose, show_chat
from deploy.control_plane import state_file
from deploy.control_plane.reports import read_overview
from deploy.control_plane.state_file import State
from deploy.processes import ProcessIdentity, session_members

NAME = "demo"
_SETTINGS = [
    *(f"router.{port}_port=0" for port in ("grpc", "internal", "http")),
    "api.port=0",
    "store.host_cache_bytes=64MiB",
    "prefill.kv_cache_bytes=64MiB",
    "decode.kv_cache_bytes=64MiB",
    "prefill.threads=1",
    "decode.threads=1",
    "cluster.heartbeat_timeout_ms=1500",
]
_KILL_AFTER = 30  # tokens
_KILLS = 3  # where the demo is slower than the worker, a kill may come too late
_REPAIR_PATIENCE = 60.0  # seconds

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demo and return 0 if every answer was right, the stream survived and nothing is left."""
    begin = time.monotonic()
    _title("a model")
    show = choose(lambda text: console.print(escape(text)))
    _title(f"baton up: one prefill worker, two decode workers, and {show.title}")
    settings = [part for setting in _SETTINGS for part in ("--set", setting)]
    _baton("up", "--name", NAME, "--prefill", "1", "--decode", "2", "--ray", "own", *show.flags, *settings)
    try:
        state = _state()
        console.print(f"\nwatch all of this at [bold]http://{state.first.api}/dashboard[/] until the demo ends")
        with Client(state.target, state.operator, http=f"http://{state.first.api}") as client:
            _title("a chat: facts first, other matters next, questions about the facts at the end")
            remembered = show_chat(client, show, console)
            survived = _show_failover(client, show)
        processes = _processes(state)
    finally:
        _title("baton down")
        _baton("down", "--name", NAME)
    left = _left(state, processes)
    console.print("nothing is left of the cluster but its logs" if not left else f"[red]left behind: {left}[/]")
    console.print(f"\n[bold]{time.monotonic() - begin:.0f} s[/] in all")
    console.print("`baton up` starts such a cluster and leaves it up, with the page at http://127.0.0.1:8000/dashboard")
    return 0 if remembered and survived and not left else 1


def _show_failover(client: Client, show: Show) -> bool:
    _title("kill -9 in the middle of a stream")
    undisturbed = _generate(client, show)
    console.print(f"undisturbed, on {_workers(undisturbed)}: {len(undisturbed.token_ids)} tokens")
    assassin, disturbed = _disturb(client, show, "disturbed")
    for number in range(1, _KILLS):
        if assassin.victim is None or disturbed.work.attempts > 1:
            break
        console.print("its worker had made every token before it was killed: once more")
        _wait_whole(client, assassin.victim)
        assassin, disturbed = _disturb(client, show, f"disturbed-{number}")
    if assassin.victim is None:
        console.print("[red]the stream ended before its worker could be killed[/]")
        return False
    same = disturbed.token_ids == undisturbed.token_ids and disturbed.text == undisturbed.text
    whole = _wait_whole(client, assassin.victim)
    name, pid = assassin.victim.name, assassin.victim.pid
    console.print(f"disturbed: [bold]{name}, pid {pid}, killed after {assassin.seen} tokens[/]")
    console.print(f"  the stream stood still for {assassin.gap:.2f} s, and went on on {_successor(disturbed, name)}")
    console.print(f"  {len(disturbed.token_ids)} tokens, {disturbed.work.attempts} attempts")
    console.print("  [bold green]the same tokens to the end[/]" if same else "  [bold red]other tokens[/]")
    replaced = f"{time.monotonic() - assassin.began:.1f} s after the request began" if whole else "[red]not in time[/]"
    console.print(f"  the supervisor has replaced {name}: {replaced}")
    return same and whole and disturbed.work.attempts > 1


def _disturb(client: Client, show: Show, request: str) -> tuple[_Assassin, Generated]:
    """Stream a request whose decode worker is killed on the way."""
    assassin = _Assassin(client, request)
    made = _generate(client, show, assassin, request)
    console.print()
    return assassin, made


def _successor(made: Generated, victim: str) -> str:
    last = made.work.decode_workers[-1]
    return f"{last}, freshly restarted" if last == victim else last


class _Assassin:
    """Watches a request's stream and kills its decode worker after `_KILL_AFTER` tokens. Measures the longest gap."""

    def __init__(self, client: Client, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._workers = {process.name: process for process in client.status().processes}
        self._found: cluster_pb2.Process | None = None
        self.began = time.monotonic()
        self.seen = 0
        self.gap = 0.0
        self.victim: cluster_pb2.Process | None = None
        self._last: float | None = None

    def __call__(self, delta: OutputDelta) -> None:
        console.print(delta.text, end="", markup=False)
        if delta.token_ids:
            now = time.monotonic()
            self.gap = max(self.gap, now - (now if self._last is None else self._last))
            self._last = now
        if self.victim is not None:
            return
        self.seen += len(delta.token_ids)
        if self._found is None:
            self._found = self._workers[self._client.explain(self._request_id).request.decode_worker]
        if self.seen >= _KILL_AFTER:
            self.victim = self._found
            os.kill(self.victim.pid, signal.SIGKILL)
            console.print("[bold red] ✗ [/]", end="")


def _generate(
    client: Client, show: Show, on_delta: Callable[[OutputDelta], None] = lambda _: None, request_id: str = ""
) -> Generated:
    """Ask over gRPC, which reports the workers of a stream; the prompt is what the chat template makes."""
    prompt = f"<|im_start|>user\n{show.tale}<|im_end|>\n<|im_start|>assistant\n"
    stream = client.generate(
        prompt,
        max_tokens=show.tale_tokens,
        temperature=0.7,
        top_p=show.top_p,
        seed=7,
        ignore_eos=True,
        request_id=request_id,
    )
    for delta in stream:
        on_delta(delta)
    return stream.result()


def _workers(made: Generated) -> str:
    return " then ".join(made.work.decode_workers)


def _wait_whole(client: Client, victim: cluster_pb2.Process) -> bool:
    """Whether the supervisor replaces the killed worker within `_REPAIR_PATIENCE`."""
    deadline = time.monotonic() + _REPAIR_PATIENCE
    while time.monotonic() < deadline:
        named = [process for process in client.status().processes if process.name == victim.name]
        if any(p.pid != victim.pid and p.state == cluster_pb2.PROCESS_STATE_LIVE for p in named):
            return True
        time.sleep(0.1)
    return False


def _state() -> State:
    state = state_file.read(_folder())
    if state is None:
        raise StartupError("`baton up` has left no state file")
    return state


def _folder() -> Path:
    return Path.home() / ".local" / "state" / "baton" / NAME


def _processes(state: State) -> list[ProcessIdentity]:
    """Return every process of the cluster and of its Ray."""
    overview = read_overview(_folder())
    views = overview.processes if overview is not None else ()
    mine = [view.identity for view in views if view.identity is not None]
    return mine + (session_members(state.ray.own.leader) if state.ray.own is not None else [])


def _left(state: State, processes: list[ProcessIdentity]) -> list[str]:
    left = [f"process {identity.pid}" for identity in processes if not identity.gone()]
    if state.ray.own is not None:
        left += [f"process {identity.pid}" for identity in session_members(state.ray.own.leader)]
        left += [state.ray.own.directory] if Path(state.ray.own.directory).exists() else []
    return left + [str(path) for path in (state_file.path(_folder()),) if path.exists()]


def _baton(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "deploy", *arguments], check=False)  # noqa: S603 - our own command
    if done.returncode != 0:
        raise StartupError(f"baton {arguments[0]} has failed with status {done.returncode}")


def _title(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        console.print(f"[bold red]the demo failed:[/] {escape(str(error))}")
        sys.exit(1)
