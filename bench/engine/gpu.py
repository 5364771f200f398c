"""Everything that only a GPU can show, in one command: run it first wherever there is one.

    python -m bench.engine.gpu           # all parts
    python -m bench.engine.gpu --call 2  # the second of four groups of parts, each of at most seven minutes
    python -m bench.engine.gpu --parts limits,engine --short
    python -m bench.engine.gpu --fake    # on a CPU, with small shapes: shows that the script runs to its end

Parts print their rows as they end, and write them to `rows.jsonl` in the folder of `--out`, so a run that is cut off
has told something. Logs and profiles lie there, too. A table of all rows comes last. A part that fails is told with
its error, and the next one runs.

Parts, by call:

1. - limits: nvidia-smi, what the context of CUDA takes, the speed of copies and matrix products.
   - imports: every entry module can be imported.
   - tests: `pytest -m gpu tests/engine/test_engine_gpu.py`.
2. - engine: steps on random weights of two shapes, 8B and 0.6B, made on the device. Decoding 1, 8, 64 and 256 sequences
     of 2,000 tokens, prompts of 2,048 and 8,192; each as a share of the roofline.
   - profile: the kernels of decode steps and of a chunk, by torch's profiler.
3. - pages: copies of pages in and out, from pinned memory, and by the worker's mover, alone and beside a step.
4. - cluster: one prefill and one decode worker on one GPU through `deploy/local.py`, and the hops of its requests.
   - runner: decode steps of our own engine, of `VllmRunner` and of vLLM's `LLM.generate`.
   - vllm: `bench/cluster/vllm_cluster.py` there: tokens/s beside vLLM's own engine, gaps beside its server, hand-offs.

The last two need vLLM in the same environment, and are left out without.

It needs Python 3.11 to 3.13, torch 2.11 or newer with CUDA, NumPy, safetensors, tokenizers, xxhash, msgspec, pyzmq,
grpcio, grpcio-health-checking, grpcio-reflection, prometheus-client, psutil, pyyaml and the router's HTTP packages
(pyproject.toml); for the tests also pytest, pytest-timeout, hypothesis and transformers. Ray is not needed. Where there
is no network, bring wheels of what is missing (`bench.engine.gpu_bundle`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from baton.client import Client
from bench import clusters, models, random_model, report
from bench.cluster import vllm_cluster
from bench.engine import gpu_pages, roofline
from bench.engine.gpu_device import Device, limits, profiled, random_engine, step_seconds
from bench.engine.roofline import Limits, Shape
from bench.peers.adapter import PeerProcess
from bench.peers.steps import Course, Decoding
from bench.report import Result
from engine.device.gpus import visible_gpus
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw
from engine.vllm_runner.requirements import Installation, problem

_ROOT = Path(__file__).parents[2]
_PAGE = 16
_POOL = 0.75  # of the memory that the weights leave
_TESTS_TIMEOUT = 300.0  # seconds
_ENTRIES = ("router.service", "kvstore.service", "worker.process", "deploy.local", "engine.vllm_runner.child")
CALLS = {1: ("limits", "imports", "tests"), 2: ("engine", "profile"), 3: ("pages",), 4: ("cluster", "runner", "vllm")}
"""Parts of one sitting: where a machine is lent for minutes, a part that takes too long costs no other call."""

LLAMA_8B: dict[str, Any] = {
    **models.LLAMA_100M,
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN_600M: dict[str, Any] = {
    **models.LLAMA_100M,
    "vocab_size": 151_936,
    "hidden_size": 1_024,
    "intermediate_size": 3_072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_TINY: dict[str, Any] = {
    **models.LLAMA_100M,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

Rows = Iterator[Result]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        arguments.out = arguments.out or Path(folder)
        arguments.out.mkdir(parents=True, exist_ok=True)
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    gpus = visible_gpus()
    fake = arguments.fake or not gpus.gpus
    device = Device("cpu" if not gpus.gpus or arguments.fake else "cuda:0", fake)
    report.say(f"{gpus}; commit {report.commit()}, torch {torch.__version__}{', small shapes on a CPU' * fake}")
    rows: list[Result] = []
    failed: list[str] = []
    measured: list[Limits] = []
    parts: dict[str, Callable[[], Rows]] = {
        "limits": lambda: _limits(device, measured),
        "imports": _imports,
        "tests": lambda: _tests(device, arguments.out),
        "engine": lambda: _engine(device, measured[0] if measured else limits(device), arguments.short),
        "profile": lambda: _profile(device, arguments.out),
        "pages": lambda: _pages(device),
        "cluster": lambda: _cluster(device),
        "runner": lambda: _runner(device, arguments.short),
        "vllm": lambda: _vllm(device),
    }
    for name in arguments.parts:
        began = time.monotonic()
        try:
            for row in parts[name]():
                rows.append(row)
                report.emit(row)
                with (arguments.out / "rows.jsonl").open("a") as lines:
                    print(row.line(), file=lines)
        except Exception as error:  # noqa: BLE001 - the other parts still have something to tell
            traceback.print_exc()
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
        if device.is_cuda:
            torch.cuda.empty_cache()  # the next part may have processes of its own
        report.say(f"{name}: {time.monotonic() - began:.0f} s")
    print(table(rows, failed, device))
    return 1 if failed or any(row.ok is False for row in rows) else 0


def table(rows: Sequence[Result], failed: Sequence[str], device: Device) -> str:
    """Return all rows as a Markdown table, and the parts that failed below it."""
    name = torch.cuda.get_device_name(device.name) if device.is_cuda else "a CPU in place of a GPU; no figure counts"
    lines = [f"{name}, commit {report.commit()}", "", "| part | case | value | share of the roofline | |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        share = f"{row.ratio:.0%}" if row.ratio is not None else ""
        verdict = "" if row.ok is None else "ok" if row.ok else "**wrong**"
        lines.append(f"| {row.bench} | {row.case} | {row.value:,.4g} {row.unit} | {share} | {verdict} |")
    return "\n".join([*lines, "", *failed])


# --- the parts --------------------------------------------------------------------------------------------------------


def _limits(device: Device, measured: list[Limits]) -> Rows:
    if shutil.which("nvidia-smi"):
        report.say(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    if device.is_cuda:
        used = _used_mib()
        _ = torch.randn(64, 64, device=device.name) @ torch.randn(64, 64, device=device.name)
        device.sync()
        if used is not None and (now := _used_mib()) is not None:
            mebibytes = now - used - torch.cuda.memory_reserved(device.name) / 2**20
            yield Result("limits", "context with cuBLAS (engine.device.gpu_memory.CONTEXT_BYTES)", mebibytes, "MiB")
    speeds = limits(device)
    measured.append(speeds)
    yield Result("limits", "copy, bytes read and written", speeds.read / 1e9, "GB/s")
    yield Result("limits", f"matrix product, {device.dtype}", speeds.compute / 1e12, "TFLOP/s")


def _used_mib() -> float | None:
    """Memory in use on the first GPU, by nvidia-smi; None without it."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return float(output) if output.isdigit() else None


def _imports() -> Rows:
    for name in _ENTRIES:
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=_TESTS_TIMEOUT)
        if done.returncode:
            report.say(done.stderr)
        yield Result("imports", name, done.returncode, "exit status", ok=not done.returncode)


def _tests(device: Device, out: Path) -> Rows:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["--durations=0", "tests/engine/test_engine_gpu.py"]
    log = out / "tests.txt"
    with log.open("w") as output:  # what a run that is cut off has said lies there
        try:
            subprocess.run(command, cwd=_ROOT, stdout=output, stderr=output, check=False, timeout=_TESTS_TIMEOUT)
        except subprocess.TimeoutExpired:
            print(f"cut off after {_TESTS_TIMEOUT:.0f} s: 1 error", file=output)
    lines = log.read_text().splitlines()
    report.say("\n".join(lines[-30:]))
    counts = {word.rstrip(","): int(count) for count, word in _pairs(lines[-1].split())}
    passed, bad = counts.get("passed", 0), counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
    yield Result("tests", "pytest -m gpu, passed", passed, "tests", ok=None if device.fake else passed > 0 and not bad)
    yield Result("tests", "pytest -m gpu, failed", bad, "tests", ok=not bad)


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The words that follow a number in pytest's last line, with it: ("12", "passed,")."""
    return ((count, word) for count, word in pairwise(words) if count.isdigit())


def _engine(device: Device, limits: Limits, short: bool) -> Rows:
    shapes = {"tiny": _TINY} if device.fake else {"0.6B": QWEN_600M, "8B": LLAMA_8B}
    for name, shape_config in shapes.items():
        pages = 512 if device.fake else _pages_for(shape_config, device)
        engine = random_engine(shape_config, device, pages, _PAGE)
        shape = Shape.of(shape_config, 2 if device.is_cuda else 4)
        yield from _steps(name, engine, shape, device, limits, 2 if device.fake else 4 if short else 20)
        del engine
        if device.is_cuda:
            torch.cuda.empty_cache()


def _pages_for(shape_config: Mapping[str, Any], device: Device) -> int:
    shape = Shape.of(shape_config, 2)
    weights = 2 * (shape.layers + 2 * shape.head)
    return int((device.free_bytes() - weights) * _POOL / (shape.kv_bytes * _PAGE))


def _steps(name: str, engine: Engine, shape: Shape, device: Device, limits: Limits, runs: int) -> Rows:
    """Decoding and prompts. Sequences share pages where all of them don't fit, far enough apart for no cache."""
    context, prompts = (60, (32, 64)) if device.fake else (2_000, (2_048, 8_192))
    each, num_pages = -(-(context + 1) // _PAGE), len(engine.pool)
    for draw in (TokenDraw(temperature=0.0), TokenDraw(temperature=1.0)):
        for rows in (1, 8, 64, 256):
            chunks = [
                Chunk([1], context, [(row * each + page) % num_pages for page in range(each)], draw)
                for row in range(rows)
            ]
            took, call = step_seconds(engine, chunks, device, runs)
            best = roofline.decode_step(rows, context + 1, shape, limits)
            how = "greedy" if not draw.temperature else "temperature 1"
            case = f"{name}, decode {rows} rows of {context}, {how}"
            yield Result("engine", case, took * 1e3, "ms", limit=best * 1e3, ratio=best / took)
            yield Result("engine", f"{case}: the host's part", call * 1e3, "ms")
    for tokens in prompts:
        for before in (0, prompts[-1]):
            pages = [page % num_pages for page in range(-(-(before + tokens) // _PAGE))]
            took, call = step_seconds(engine, [Chunk([1] * tokens, before, pages)], device, max(2, runs // 4))
            work = tokens * (2 * shape.layers + shape.attention * (before + tokens / 2))
            best = limits.seconds(shape.layers * shape.width, work)
            case = f"{name}, prompt of {tokens} behind {before}"
            yield Result("engine", case, took * 1e3, "ms", limit=best * 1e3, ratio=best / took)
            yield Result("engine", f"{case}: the host's part", call * 1e3, "ms")


def _profile(device: Device, out: Path) -> Rows:
    """Kernels of five decode steps and of a chunk. Tables of the dearest ones go to `profile.txt`."""
    context, rows, prompt = (60, 4, 64) if device.fake else (2_000, 32, 2_048)
    shape = _TINY if device.fake else LLAMA_8B
    engine = random_engine(shape, device, 512 if device.fake else _pages_for(shape, device), _PAGE)
    each, num_pages = -(-(context + 1) // _PAGE), len(engine.pool)
    greedy = TokenDraw(temperature=0.0)
    decode = [
        Chunk([1], context, [(row * each + page) % num_pages for page in range(each)], greedy) for row in range(rows)
    ]
    chunk = [Chunk([1] * prompt, 0, range(-(-prompt // _PAGE)))]
    for case, chunks in ((f"decode, {rows} rows of {context}", decode), (f"a prompt of {prompt}", chunk)):
        engine.step(chunks)
        profile = profiled(engine, chunks, device, 5)
        with (out / "profile.txt").open("a") as tables:
            print(case, profile.table, sep="\n", file=tables)
        yield Result("profile", f"{case}: operations of the device", profile.count, "a step")
        yield Result("profile", f"{case}: time in them", profile.busy * 1e3, "ms")
        yield Result("profile", f"{case}: a step", profile.step * 1e3, "ms")


def _pages(device: Device) -> Rows:
    for copied in gpu_pages.pinned(device):
        yield Result("pages", copied.case, copied.rate / 1e9, "GB/s")
    for layers in (1, 2) if device.fake else (2, 32):  # pages of 128 KiB and 2 MiB in bfloat16
        shape = {"num_hidden_layers": layers, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128}
        pages = 32 if device.fake else 4_096 // layers
        for copied in gpu_pages.moved(device, random_engine(_TINY | shape, device, pages, _PAGE)):
            yield Result("pages", copied.case, copied.rate / 1e9, "GB/s")


def _cluster(device: Device) -> Rows:
    """Time to the first token and between tokens, alone and eight at a time, with every prompt handed over."""
    length, output = (64, 8) if device.fake else (2_000, 64)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        if device.fake:
            random_model.write(model)
        else:
            models.write_shape(model, QWEN_600M)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        settings: dict[str, object] = {"router.disaggregation": "always", "model.device": device.name}
        if device.is_cuda:
            settings |= {"model.device": "auto", "store.host_cache_bytes": "8GiB"}
        else:
            settings |= {"prefill.kv_cache_bytes": "32MiB", "decode.kv_cache_bytes": "32MiB"}
            settings |= {"store.host_cache_bytes": "64MiB", "prefill.threads": 1, "decode.threads": 1}
        began = time.perf_counter()
        with clusters.local(model, 1, 1, settings, patience=240.0) as cluster:
            yield Result("cluster", "1P+1D: from nothing to live", time.perf_counter() - began, "s")
            with Client(cluster.address, operator=cluster.operator) as client:
                yield from _requests(client, vocabulary, length, output, device)


def _requests(client: Client, vocabulary: int, length: int, output: int, device: Device) -> Rows:
    def prompt(number: int) -> list[int]:
        return random_prompt(number, length, vocabulary)

    runs = [_stream(client, prompt(number), output) for number in range(3 if device.fake else 8)]
    ttft, between = (median(run[index] for run in runs[1:]) * 1e3 for index in (0, 1))
    yield Result("cluster", f"first token of {length} tokens, handed over, alone", ttft, "ms")
    yield Result("cluster", "between two tokens, alone", between, "ms")
    yield from _hops(client, len(runs) - 1)
    numbers = range(100, 104 if device.fake else 164)
    began = time.perf_counter()
    streams = [client.generate(prompt(number), max_tokens=output, ignore_eos=True, timeout=300) for number in numbers]
    tokens = sum(len(stream.result().token_ids) for stream in streams)
    seconds = time.perf_counter() - began
    yield Result("cluster", f"{len(numbers)} requests at a time, tokens generated", tokens / seconds, "1/s")


def _hops(client: Client, last: int) -> Rows:
    """Where the time to the first token of the last requests went: each hop's median, from the one before."""
    explained = [client.explain(one.request_id).attempts[-1].hops for one in client.requests(last)]
    names = ("placed", "accepted", "prefill_sent", "prefilled", "started", "first_token")
    for before, name in pairwise(names):
        took = [hops[name] - hops[before] for hops in explained if name in hops and before in hops]
        if took:
            yield Result("cluster", f"hop: {before} to {name}", median(took), "ms")


def random_prompt(number: int, length: int, vocabulary: int) -> list[int]:
    return [3 + (number * 7_919 + place * 31) % (vocabulary - 3) for place in range(length)]


def _stream(client: Client, prompt: Sequence[int], output: int) -> tuple[float, float]:
    """Seconds to the first token, and between two of the others."""
    sent = time.perf_counter()
    arrived = [time.perf_counter() for _ in client.generate(prompt, max_tokens=output, ignore_eos=True, timeout=300)]
    return arrived[0] - sent, (arrived[-1] - arrived[0]) / max(1, output - 1)


def _runner(device: Device, short: bool) -> Rows:
    """Steps of our own engine, of vLLM's runner under Baton's steps, and of vLLM itself, each in a process of its own
    and one after the other."""
    sides = {"our engine": ["native"]}
    if _vllm_is_here("runner", device):
        sides |= {"VllmRunner": ["baton"], "LLM.generate": ["vllm"]}
    else:
        yield Result("runner", "the right vLLM is installed", 0, "", ok=None if device.fake else False)
    kind, (prompt, output) = "cuda" if device.is_cuda else "cpu", (32, 4) if device.fake else (512, 32)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        path = models.write_shape(Path(folder), _TINY | {"head_dim": 32} if device.fake else QWEN_600M)
        vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
        for name, words in sides.items():
            command = [sys.executable, "-m", "bench.peers.steps", *words, str(path), kind]
            command += [] if words == ["vllm"] else ["4"]
            variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            began = time.monotonic()
            with PeerProcess(name, command, variables) as peer:
                yield Result("runner", f"{name}: loaded", time.monotonic() - began, "s")
                for rows in (1, 8, 32) if short or device.fake else (1, 8, 32, 64):
                    prompts = [random_prompt(row, prompt, vocabulary) for row in range(rows)]
                    runs = [peer.ask({"prompts": prompts, "count": output}) for _ in range(3)][1:]
                    courses = [Course(reply["tokens"], reply["ends"], reply["model"]) for reply in runs]
                    steps = [Decoding.of(course, output) for course in courses]
                    case = f"{name}, {rows} rows of {prompt}: a decode step"
                    yield Result("runner", case, median(step.step for step in steps) * 1e3, "ms")
                    yield Result(
                        "runner", f"{case}, the model's part", median(step.model for step in steps) * 1e3, "ms"
                    )


def _vllm_is_here(part: str, device: Device) -> bool:
    installation = Installation.find()
    if installation is not None and not installation.is_wrong:
        return True
    report.say(f"{part}: left out; {problem(installation, None, 0, device.name)}")
    return False


def _vllm(device: Device) -> Rows:
    """A cluster on vLLM's runner beside vLLM itself: `bench/cluster/vllm_cluster.py` on this device."""
    if not _vllm_is_here("vllm", device):
        yield Result("vllm", "the right vLLM is installed", 0, "", ok=None if device.fake else False)
        return
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        model = models.write_shape(Path(folder), _TINY | {"head_dim": 32} if device.fake else QWEN_600M)
        options = ["--device", "cuda" if device.is_cuda else "cpu"]
        # `vllm serve` on a CPU is another environment: a fake run does without.
        options += ["--short", "--parts", "decode,pages"] if device.fake else []
        arguments = vllm_cluster.parse(options)
        for part in arguments.parts:
            yield from vllm_cluster.PARTS[part](model, arguments)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [name for group in CALLS.values() for name in group]
    parser = argparse.ArgumentParser(description="What only a GPU can show.")
    parser.add_argument("--fake", action="store_true", help="on a CPU, with small shapes, whatever is here")
    parser.add_argument("--call", type=int, choices=CALLS, help="the parts of one sitting")
    parser.add_argument("--parts", help="those to run, in this order")
    parser.add_argument("--short", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="folder for rows.jsonl and logs (a temporary one, removed at the end)")
    arguments = parser.parse_args(argv)
    arguments.parts = [
        part for part in (arguments.parts or ",".join(CALLS.get(arguments.call, names))).split(",") if part
    ]
    if unknown := set(arguments.parts) - set(names):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
