"""What `make demo` shows of a cluster on this machine: a chat, and one killed worker.

The demo works as a user would: a chat over HTTP, a stream over gRPC. `deploy/demo.py` starts and ends the cluster. The
model is the one that comes with Baton (docs/demo-model.md). Each turn of the chat finds the KV pages of the turns
before it. The last questions ask for facts of the first message: if a page were lost or wrong, the answer would be
wrong, too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from rich import box
from rich.markup import escape
from rich.table import Table

from baton.client import ChatAnswer, Client, Generated, OutputDelta
from baton.v1 import cluster_pb2
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
"""The flags of its `baton up`."""
_LETTER = (
    "Please remember these notes. Mara lives in Ashford. The code of Mara's locker is 4072. Tira works as a baker. "
    "Tira has a golden parrot. Alwin plays the cello. The blue lamp is in the attic."
)
_ASIDES = ("Tell me a story about a fox.", "Tell me a story about a turtle.", "Thank you!")
_QUESTIONS = (
    ("What is the code of Mara's locker?", "4072"),
    ("Where does Mara live?", "Ashford"),
    ("What is the pet of Tira?", "golden parrot"),
    ("Where is the blue lamp?", "attic"),
)
_TEMPERATURE = 0.6  # of stories: at 0 the model tells the same story of every animal
_CHAT_SEED, _TALE_SEED = 5, 3
_LONG_STREAM = 380  # tokens: four stories, and the beginning of one more
_TALE = "Tell me many stories about an owl."
_BEGINNING = "Once upon a time"
_KILL_AFTER = 30  # tokens
_KILLS = 3  # where the demo is slower than the worker, a kill may come too late
_REPAIR_PATIENCE = 60.0  # seconds


def show(state: State) -> bool:
    """Show a chat and a killed worker. Return whether every answer was right and the stream survived."""
    console.print(f"\nwatch all of this at [bold]http://{state.first.api}/dashboard[/] until the demo ends")
    with Client(state.target, state.operator, http=f"http://{state.first.api}") as client:
        return _show_chat(client) & _show_failover(client)


def _show_chat(client: Client) -> bool:
    """Whether the model answers questions about the first message at the end of a long chat."""
    title("a chat: facts first, stories next, questions at the end")
    messages: list[dict[str, str]] = []
    turns: list[tuple[str, ChatAnswer]] = []
    right = True
    for question, value in ((_LETTER, ""), *((aside, "") for aside in _ASIDES), *_QUESTIONS):
        messages.append({"role": "user", "content": question})
        console.print(f"[bold]you[/]    {escape(question)}")
        console.print("[bold green]model[/]  ", end="")
        temperature = 0.0 if value else _TEMPERATURE
        stream = client.chat(messages, temperature=temperature, seed=_CHAT_SEED, max_completion_tokens=300, timeout=30)
        for delta in stream:
            console.print(delta.content, end="", markup=False)
        answer = stream.result()
        console.print("" if value in answer.content else f"  [bold red](it should say {value})[/]")
        right = right and value in answer.content
        messages.append({"role": "assistant", "content": answer.content})
        turns.append((question, answer))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("turn", no_wrap=True)
    for name in ("prompt tokens", "cached", "first token"):
        table.add_column(name, justify="right")
    for question, answer in turns:
        first = answer.metrics["time_to_first_token_ms"]
        short = question if len(question) <= 34 else f"{question[:33]}…"
        table.add_row(
            escape(short), str(answer.usage.prompt_tokens), str(answer.usage.cached_tokens), f"{first:.1f} ms"
        )
    console.print(table)
    return right


def _show_failover(client: Client) -> bool:
    title("kill -9 in the middle of a stream")
    undisturbed = _generate(client, _TALE)
    console.print(f"undisturbed, on {_workers(undisturbed)}: {len(undisturbed.token_ids)} tokens")
    assassin, disturbed = _disturb(client, "disturbed")
    for number in range(1, _KILLS):
        if assassin.victim is None or disturbed.work.attempts > 1:
            break
        console.print("its worker had made every token before it was killed: once more")
        _wait_whole(client, assassin.victim)
        assassin, disturbed = _disturb(client, f"disturbed-{number}")
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


def _disturb(client: Client, request: str) -> tuple[_Assassin, Generated]:
    """Stream a request whose decode worker is killed on the way."""
    assassin = _Assassin(client, request)
    console.print(_BEGINNING, end="")
    made = _generate(client, _TALE, assassin, request)
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
    client: Client, question: str, on_delta: Callable[[OutputDelta], None] = lambda _: None, request_id: str = ""
) -> Generated:
    """Ask over gRPC, which reports the workers of a stream; the prompt is what the chat template makes."""
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{_BEGINNING}"
    stream = client.generate(
        prompt,
        max_tokens=_LONG_STREAM,
        temperature=_TEMPERATURE,
        seed=_TALE_SEED,
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


def title(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")
