"""`make demo`: a whole cluster on this machine, four requests, one killed worker, and nothing left behind.

The demo works as a user would: `baton up`, requests over gRPC, `baton down`. It makes the model itself (`demo_model`).
Its output is gibberish, but the same on every run. The demo can thus check that a stream with a killed worker goes on
to the same last token.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.client import Client, Generated, OutputDelta
from baton.errors import BatonError, StartupError
from baton.v1 import cluster_pb2
from deploy.commands import demo_model
from deploy.control_plane import state_file
from deploy.control_plane.reports import read_overview
from deploy.control_plane.state_file import State
from deploy.processes import ProcessIdentity, session_members

NAME = "demo"
FOLDER = Path(".demo")
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
_LONG_STREAM = 600  # tokens: a stream of several seconds, with the kill early in it
_KILL_AFTER = 60  # tokens
_REPAIR_PATIENCE = 60.0  # seconds

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demo and return 0 if the stream survived and nothing is left."""
    begin = time.monotonic()
    folder = FOLDER.resolve()
    model = demo_model.write(folder / "model")
    _title("baton up: one prefill worker, two decode workers")
    settings = [part for setting in _SETTINGS for part in ("--set", setting)]
    _baton("up", "--name", NAME, "--model", str(model), "--prefill", "1", "--decode", "2", "--ray", "own", *settings)
    try:
        state = _state()
        with Client(state.target, state.operator) as client:
            _show_requests(client)
            survived = _show_failover(client)
        processes = _processes(state)
    finally:
        _title("baton down")
        _baton("down", "--name", NAME)
    left = _left(state, processes)
    console.print("nothing is left of the cluster but its logs" if not left else f"[red]left behind: {left}[/]")
    console.print(f"\n[bold]{time.monotonic() - begin:.0f} s[/] in all")
    return 0 if survived and not left else 1


def _show_requests(client: Client) -> None:
    _title("three requests")
    sentences = demo_model.text()
    story = " ".join(sentences[:110])
    short = _stream(client, "short", "The supervisor remembers", 32)
    long = _stream(client, "long", story, 48)
    again = _stream(client, "long again", f"{story} {sentences[200]}", 48)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("short", "long", "long again"):
        table.add_column(name, justify="right")
    facts = [_facts(made) for made in (short, long, again)]
    for row in facts[0]:
        table.add_row(row, *(column[row] for column in facts))
    console.print(table)


def _facts(made: Generated) -> dict[str, str]:
    usage, timing, work = made.usage, made.timing, made.work
    return {
        "prompt tokens": str(usage.prompt_tokens),
        "of them cached": str(usage.cached_tokens),
        "prefill worker": work.prefill_worker or "none needed",
        "  tokens it computed": str(work.tokens_computed),
        "  pages it found (hit)": str(work.pages_hit),
        "  pages it stored": str(work.pages_shipped),
        "decode worker": _workers(made),
        "  pages it had on its device": str(work.pages_on_device),
        "  pages it fetched": str(work.pages_fetched),
        "time to first token": f"{timing.first_token or 0:.1f} ms",
        "time between tokens": f"{_itl(made):.2f} ms",
    }


def _itl(made: Generated) -> float:
    """Return the mean gap between tokens, by the router's clock."""
    timing = made.timing
    return ((timing.finished or 0) - (timing.first_token or 0)) / max(1, made.usage.completion_tokens - 1)


def _show_failover(client: Client) -> bool:
    _title("kill -9 in the middle of a stream")
    prompt = "Between two stations the engineer explains"
    undisturbed = _generate(client, prompt, _LONG_STREAM)
    console.print(f"undisturbed, on {_workers(undisturbed)}: {len(undisturbed.token_ids)} tokens")
    assassin = _Assassin(client, "disturbed")
    begin = time.monotonic()
    disturbed = _generate(client, prompt, _LONG_STREAM, assassin, "disturbed")
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
    replaced = f"{time.monotonic() - begin:.1f} s after the request began" if whole else "[red]not in time[/]"
    console.print(f"  the supervisor has replaced {name}: {replaced}")
    return same and whole


def _successor(made: Generated, victim: str) -> str:
    last = made.work.decode_workers[-1]
    return f"{last}, freshly restarted" if last == victim else last


class _Assassin:
    """Watches a request's stream and kills its decode worker after `_KILL_AFTER` tokens. Measures the longest gap."""

    def __init__(self, client: Client, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self.seen = 0
        self.gap = 0.0
        self.victim: cluster_pb2.Process | None = None
        self._last: float | None = None

    def __call__(self, delta: OutputDelta) -> None:
        if delta.token_ids:
            now = time.monotonic()
            self.gap = max(self.gap, now - (now if self._last is None else self._last))
            self._last = now
        if self.victim is not None:
            return
        self.seen += len(delta.token_ids)
        if self.seen >= _KILL_AFTER:
            worker = self._client.explain(self._request_id).request.decode_worker
            self.victim = next(process for process in self._client.status().processes if process.name == worker)
            os.kill(self.victim.pid, signal.SIGKILL)


def _stream(client: Client, name: str, prompt: str, max_tokens: int) -> Generated:
    console.print(f"[bold]{name}[/]  [dim]{escape(prompt[:60])}{'…' if len(prompt) > 60 else ''}[/]")
    made = _generate(client, prompt, max_tokens, _print)
    console.print()
    return made


def _print(delta: OutputDelta) -> None:
    console.print("".join(c if c.isprintable() else " " for c in delta.text), end="", markup=False)


def _generate(
    client: Client,
    prompt: str,
    max_tokens: int,
    on_delta: Callable[[OutputDelta], None] = lambda _: None,
    request_id: str = "",
) -> Generated:
    stream = client.generate(
        prompt, max_tokens=max_tokens, temperature=0.8, seed=7, ignore_eos=True, request_id=request_id
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
