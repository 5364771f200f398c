"""What `make demo` shows of a cluster on this machine: a chat, and one killed worker.

The demo works as a user would: a chat over HTTP, a stream over gRPC. `deploy/demo.py` starts and ends the cluster, and
`demo_chat.py` chooses the model. Each turn of the chat finds the KV pages of the turns before it. The last questions
ask for facts of the first message: if a page were lost or wrong, the answer would be wrong, too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from baton.client import Client, Generated, OutputDelta
from baton.operator_api import Process
from deploy.commands.demo_chat import Show, show_chat
from deploy.commands.terminal import out as console
from deploy.control_plane.state_file import State

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
UP = ["--prefill", "1", "--decode", "2", "--ray", "own", *(f"--set={setting}" for setting in _SETTINGS)]
"""The flags of its `baton up`, besides the model's."""
_KILL_AFTER = 30  # tokens
_KILLS = 3  # where the demo is slower than the worker, a kill may come too late
_REPAIR_PATIENCE = 60.0  # seconds


def show(state: State, chosen: Show) -> bool:
    """Show a chat and a killed worker. Return whether every answer was right and the stream survived."""
    console.print(f"\nwatch all of this at [bold]http://{state.first.api}/dashboard[/] until the demo ends")
    with Client(state.target, state.operator, http=f"http://{state.first.api}") as client:
        title("a chat: facts first, other matters next, questions about the facts at the end")
        return show_chat(client, chosen, console) & _show_failover(client, chosen)


def _show_failover(client: Client, show: Show) -> bool:
    title("kill -9 in the middle of a stream")
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
    console.print(show.tale_beginning, end="")
    generated = _generate(client, show, assassin, request)
    console.print()
    return assassin, generated


def _successor(generated: Generated, victim: str) -> str:
    last = generated.work.decode_workers[-1]
    return f"{last}, freshly restarted" if last == victim else last


class _Assassin:
    """Watches a request's stream and kills its decode worker after `_KILL_AFTER` tokens. Measures the longest gap."""

    def __init__(self, client: Client, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._workers = {process.name: process for process in client.status().processes}
        self._worker: Process | None = None
        self.began = time.monotonic()
        self.seen = 0
        self.gap = 0.0
        self.victim: Process | None = None
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
        if self._worker is None:
            self._worker = self._workers[self._client.explain(self._request_id).request.decode_worker]
        if self.seen >= _KILL_AFTER:
            self.victim = self._worker
            os.kill(self.victim.pid, signal.SIGKILL)
            console.print("[bold red] ✗ [/]", end="")


def _generate(
    client: Client, show: Show, on_delta: Callable[[OutputDelta], None] = lambda _: None, request_id: str = ""
) -> Generated:
    """Ask over gRPC, which reports the workers of a stream; the prompt is what the chat template makes."""
    prompt = f"<|im_start|>user\n{show.tale}<|im_end|>\n<|im_start|>assistant\n{show.tale_beginning}"
    stream = client.generate(
        prompt,
        max_tokens=show.tale_tokens,
        temperature=show.tale_temperature,
        top_p=show.top_p,
        seed=show.tale_seed,
        ignore_eos=True,
        request_id=request_id,
    )
    for delta in stream:
        on_delta(delta)
    return stream.result()


def _workers(generated: Generated) -> str:
    return " then ".join(generated.work.decode_workers)


def _wait_whole(client: Client, victim: Process) -> bool:
    """Whether the supervisor replaces the killed worker within `_REPAIR_PATIENCE`."""
    deadline = time.monotonic() + _REPAIR_PATIENCE
    while time.monotonic() < deadline:
        named = [process for process in client.status().processes if process.name == victim.name]
        if any(p.pid != victim.pid and p.state == "live" for p in named):
            return True
        time.sleep(0.1)
    return False


def title(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")
