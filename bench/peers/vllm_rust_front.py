"""vLLM's HTTP front in Rust, `vllm-rs`, before an engine that computes nothing.

`python -m bench.peers.vllm_rust_front BINARY MODEL WORDS`: WORDS is a JSON list of token ids. `fake_engine.follow` says
what the process answers. The front is a process below this one, and this one is its engine core, as vLLM 0.32.0 has it:
requests and tokens pass over sockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import msgspec

from baton.checkpoint_files import read_object
from bench.peers.adapter import only_answers
from bench.peers.fake_engine import FakeEngine, follow

_ADD, _ABORT = b"\0", b"\1"  # vllm.v1.engine.EngineCoreRequestType
_FINISHED = 1  # FinishReason.LENGTH
_CORE = {  # vllm.v1.engine.EngineCoreReadyResponse
    "num_gpu_blocks": 1_000, "block_size": 16, "dp_stats_address": None, "dtype": "bfloat16", "vllm_version": "0.32.0",
    "world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1, "data_parallel_rank": 0, "max_num_seqs": 256, "max_num_batched_tokens": 8_192,
    "instance_id": "bench", "supports_lora": False, "max_loras": 0,
}  # fmt: skip


def _listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    return listener


def main() -> None:
    """Serve until stdin is closed."""
    answers = only_answers()
    _, binary, model, words = sys.argv
    http, requests, outputs = listeners = [_listener() for _ in range(3)]
    options = {"model_tag": model, "model": model, "served_model_name": [Path(model).name], "disable_log_stats": True}
    command = [binary, "frontend", "--args-json", json.dumps(options)]
    for name, listener in (("listen-fd", http), ("input-listener-fd", requests), ("output-listener-fd", outputs)):
        command += [f"--{name}", str(listener.fileno())]
    limit = read_object(Path(model) / "config.json")["max_position_embeddings"]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    with subprocess.Popen(command, pass_fds=[each.fileno() for each in listeners], stdout=sys.stderr) as front:
        asyncio.run(_serve(FakeEngine(json.loads(words)), limit, addresses, answers, front.pid))
        front.kill()


async def _serve(engine: FakeEngine[str], limit: int, addresses: list[str], answers: TextIO, pid: int) -> None:
    http, requests, outputs = addresses
    zmq: Any = import_module("zmq")
    context = import_module("zmq.asyncio").Context()
    dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    dealer.setsockopt(zmq.IDENTITY, bytes(2))
    dealer.connect(f"tcp://{requests}")
    push.connect(f"tcp://{outputs}")
    await dealer.send(msgspec.msgpack.encode({"max_model_len": limit, **_CORE}))
    tasks = [_read(dealer, engine), _write(push, engine), follow(engine, http, answers, pid)]
    done, others = await asyncio.wait([*map(asyncio.ensure_future, tasks)], return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for task in done:
        task.result()


async def _read(dealer: Any, engine: FakeEngine[str]) -> None:
    while True:
        kind, body, *_ = await dealer.recv_multipart()
        if kind == _ADD:
            name, _, _, sampling, *_ = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
            engine.add(msgspec.msgpack.decode(name), msgspec.msgpack.decode(sampling)["max_tokens"])
        elif kind == _ABORT:
            for name in msgspec.msgpack.decode(body):
                engine.drop(name)


async def _write(push: Any, engine: FakeEngine[str]) -> None:
    while True:
        step = await engine.step(lambda _: 0)
        tokens = [[each.stream, [each.token], None, None, None, _FINISHED if each.last else None] for each in step]
        await push.send(msgspec.msgpack.encode([0, tokens, None, time.monotonic()]))


if __name__ == "__main__":
    main()
