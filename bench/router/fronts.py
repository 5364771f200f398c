"""Fronts by themselves, each in a process, before an engine that computes nothing: Baton's, and vLLM's own.

`python -m bench.router.fronts DOOR MODEL WORDS` is the process of one of Baton's doors, http or grpc.
WORDS is a JSON list of token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import grpc
import psutil
from tokenizers import Regex, Tokenizer, pre_tokenizers

from baton.api_keys import KeyRing
from baton.checkpoint_files import read_object
from baton.checkpoints.named import MODELS
from baton.config import ModelConfig
from baton.monotonic_clock import MonotonicClock
from baton.ports import FixedPort
from baton.timeline import Timeline
from baton.v1 import generation_pb2_grpc
from bench import processes, report
from bench.peers import environments
from bench.peers.adapter import PeerProcess, only_answers
from bench.peers.fake_engine import FakeEngine, follow
from bench.router.front_clients import PROMPT
from router.events import Cancelled, Finished, RequestEnded, Summary, Usage
from router.frontend.api.app import HttpApi
from router.frontend.api.server import ApiServer
from router.frontend.detokenizer import TextStream
from router.frontend.generation import GenerationService
from router.frontend.grpc_api.grpc_server import GenerationServicer
from router.frontend.identity import Gatekeeper
from router.frontend.off_loop import TokenizerThreads
from router.frontend.output_stream import OutputStream, StopVerdict
from router.frontend.served_model import ServedModel, load
from router.generation_request import GenerationRequest
from router.tracing.request_spans import RequestSpans

_ROOT = Path(__file__).parent.parent.parent
_TEXTS = ("baton", "engine", "kvstore", "router", "simulator")
_PROMPT, _SYSTEM, _ANSWER, _TURN = 215_000, 12_000, 600, 4_600  # characters
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED, of <linux/posix-timers.h>


class Front:
    """A front's process. It ends with this object's context."""

    def __init__(self, name: str, door: str, process: PeerProcess) -> None:
        self.name = name
        self.door = door  # as of `front_clients.Order`
        self._process = process
        self.address: str = process.hello["address"]
        self.pid: int = process.hello["pid"]

    def pace(self, interval: float | None) -> None:
        """Have tokens come at this interval in seconds, or as fast as they are read. Raises PeerFailed."""
        self._process.ask({"interval": interval})

    def pin(self, clients: int, own: int) -> None:
        """Have the front run on a core of its own, and its engine on that of the clients where it is a process."""
        processes.pin(self._process.pid, {clients})
        processes.pin_tree(self.pid, {own})

    def cpu_seconds(self) -> float:
        """Return the CPU time of the front so far: of all threads of its process, and of those that it has started."""
        pids = [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]
        # The clock's number as clock_getcpuclockid(3) makes it. /proc counts in hundredths of a second.
        return sum(time.clock_gettime((~pid << 3) | _PROCESS_CLOCK) for pid in pids)


def words(model: Path) -> list[int]:
    """Return some tokens that are letters alone: each has a text by itself."""
    tokenizer, limits = (served := load(ModelConfig(path=str(model)))).tokenizer, served.limits
    assert tokenizer is not None
    return [token for token in range(min(limits.vocab_size, 2_000)) if tokenizer.text_of(token).strip().isalpha()]


def baton(door: str, model: Path, token_ids: Sequence[int], stack: contextlib.ExitStack) -> PeerProcess:
    """Start the process of one of Baton's doors, http or grpc. Raises PeerFailed."""
    command = [sys.executable, "-m", "bench.router.fronts", door, str(model), json.dumps(token_ids)]
    return stack.enter_context(PeerProcess(f"Baton's {door} front", command, environments.variables({})))


def vllm(
    model: Path, token_ids: Sequence[int], folder: Path, stack: contextlib.ExitStack, *options: str
) -> PeerProcess:
    """Start vLLM's front, whose environment lies below the folder. Raises PeerFailed."""
    own = {
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    command = [str(environments.VLLM.python(folder)), "-m", "bench.peers.vllm_front", str(model), json.dumps(token_ids)]
    command += ["--served-model-name", model.name, "--disable-uvicorn-access-log", *options]
    return stack.enter_context(PeerProcess("vLLM's front", command, environments.variables(own)))


def vllm_rust(model: Path, token_ids: Sequence[int], folder: Path, stack: contextlib.ExitStack) -> PeerProcess:
    """Start vLLM's front in Rust, which lies below the folder. Raises PeerFailed and NotPrepared."""
    binary = environments.existing(environments.vllm_rust(folder))
    command = [sys.executable, "-m", "bench.peers.vllm_rust_front", str(binary), str(model), json.dumps(token_ids)]
    variables = environments.variables({"RUST_LOG": "warn", "VLLM_LOGGING_LEVEL": "WARNING"})
    return stack.enter_context(PeerProcess("vLLM's front in Rust", command, variables))


def chat_model(folder: Path) -> Path:
    """Write what fronts read of a chat model with a context of 131,072 into the folder, and return it: SmolLM2's
    vocabulary and template. Words are cut as by Qwen's tokenizer, which both of vLLM's tokenizers take."""
    source = MODELS["smollm2"].fetch(report.say)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    config = read_object(source / "config.json") | {"max_position_embeddings": 131_072}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def conversations(model: str, count: int, turns: int, seed: int) -> list[list[bytes]]:
    """Return the bodies of each turn of agents' conversations: prompts of about 60,000 tokens, which grow by 2 %. Tools
    have read parts of this repository. The system's message is the same in all."""
    files = (file for folder in _TEXTS for file in sorted((_ROOT / folder).rglob("*.py")))
    text = "\n".join(file.read_text() for file in files)
    draw = random.Random(seed)
    system = {"role": "system", "content": text[:_SYSTEM]}

    def bodies() -> Iterator[bytes]:
        at = draw.randrange(len(text) - 2 * _PROMPT)
        messages, end = [system], at + _PROMPT - _SYSTEM
        for _ in range(turns):
            while at < end:
                messages.append({"role": "assistant", "content": text[at : at + _ANSWER]})
                messages.append({"role": "user", "content": text[at + _ANSWER : at + _TURN]})
                at += _TURN
            end += _TURN
            fields = {"model": model, "messages": messages, "max_tokens": 1, "stream": True, "temperature": 0}
            yield json.dumps(fields).encode()

    return [[*bodies()] for _ in range(count)]


class FakeDriver:
    """What a front asks of the router, before the engine that computes nothing."""

    def __init__(self, model: ServedModel, engine: FakeEngine[OutputStream]) -> None:
        self.model = model
        self.unready = None
        self._engine = engine

    def draw_seed(self) -> int:
        return 1

    def fingerprint(self, adapter: str) -> str:
        return "fp_0"

    def submit(
        self, request: GenerationRequest, *, leader: OutputStream | None = None, further: bool = False,
        spans: RequestSpans | None = None,
    ) -> OutputStream:  # fmt: skip
        stream = OutputStream("r", TextStream.of(self.model.tokenizer, request))
        self._engine.add(stream, request.max_tokens or 1)
        return stream

    def abandon(self, stream: OutputStream) -> None:
        self._engine.drop(stream)
        stream.end(RequestEnded("r", Cancelled("the client does not read"), _summary(stream.token_count)))

    async def run(self) -> None:
        """Pass the engine's tokens on."""
        while True:
            for each in await self._engine.step(lambda stream: stream.unread):
                if each.stream.emit((each.token,), ()) is StopVerdict.UNREAD:
                    self.abandon(each.stream)
                elif each.last:
                    each.stream.end(RequestEnded("r", Finished("length"), _summary(each.stream.token_count)))


def _summary(completion: int) -> Summary:
    now = time.monotonic()
    line = Timeline(received=now, first_token=now, ended=now)
    return Summary(line, now, Usage(prompt=len(PROMPT), completion=completion))


async def _serve(door: str, model: str, token_ids: list[int], answers: TextIO) -> None:
    engine = FakeEngine[OutputStream](token_ids)
    driver: Any = FakeDriver(load(ModelConfig(path=model)), engine)
    service = GenerationService(driver, MonotonicClock(), TokenizerThreads())

    async def page() -> bytes:
        return b""

    if door == "http":
        listener = await FixedPort("api.port", "127.0.0.1", 0).listener()
        await ApiServer(HttpApi(service, page, Gatekeeper(KeyRing(None))).app, 4_096).serve(listener)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    else:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(service), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    running = asyncio.create_task(driver.run())
    following = asyncio.create_task(follow(engine, address, answers))
    await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()


if __name__ == "__main__":
    _, _door, _model, _words = sys.argv
    asyncio.run(_serve(_door, _model, json.loads(_words), only_answers()))
