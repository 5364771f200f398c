"""Everything that only a GPU can show, in one command: run it first wherever there is one.

    bench/gpu.py                     # all parts, about 9 minutes on an H100 or H200 (not run yet)
    bench/gpu.py --parts limits,engine
    bench/gpu.py --fake              # on a CPU, with small shapes: shows that the script runs to its end

Parts print their rows as they end, so a run that is cut off has told something. A table of all rows comes last. A part
that fails is told with its error, and the next one runs.

1. limits: nvidia-smi, what the context of CUDA takes, the speed of copies and matrix products
2. tests: `pytest -m gpu`
3. engine: steps on random weights of two shapes, 8B and 0.6B, made on the device: decoding 1, 8, 64 and 256 sequences
   of 2,000 tokens, prompts of 2,048 and 8,192; each as a share of the roofline
4. pages: copies of pages in and out, pageable, pinned, and by the worker's mover, alone and beside a step
5. kill: SIGKILL during a copy. After the pidfd is readable no byte may change
6. cluster: one prefill and one decode worker on one GPU through `deploy/local.py`
7. vllm: `bench/vllm_cluster.py` there: tokens/s beside vLLM's own engine, gaps beside its server, hand-offs. It needs
   vLLM in the same environment, and is left out without

It needs Python 3.11 to 3.13, torch 2.11 or newer with CUDA, NumPy, safetensors, tokenizers, xxhash, msgspec, pyzmq,
grpcio, grpcio-health-checking, grpcio-reflection, prometheus-client, psutil, pyyaml and the router's HTTP packages
(pyproject.toml); for the tests also pytest, pytest-timeout, hypothesis and transformers. Ray is not needed. Where there
is no network, bring wheels of what is missing. From the project's root: `PYTHONPATH=. python bench/gpu.py`.
"""

from __future__ import annotations

import argparse
import json
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

from baton import config
from baton.client import Client
from bench import gpu_pages, models, random_model, report, roofline, vllm_cluster
from bench.gpu_device import Device, limits, random_engine, step_seconds
from bench.report import Result
from bench.roofline import Limits, Shape
from deploy.local import LocalCluster
from engine.device.gpus import visible_gpus
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw
from engine.vllm_runner.requirements import Installation, problem

_ROOT = Path(__file__).parent.parent
_PAGE = 16
_POOL = 0.75  # of the memory that the weights leave
_TESTS_TIMEOUT = 300.0  # seconds

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
    asked = _parse(argv)
    gpus = visible_gpus()
    fake = asked.fake or not gpus.gpus
    device = Device("cpu" if not gpus.gpus or asked.fake else "cuda:0", fake)
    report.say(f"{gpus}; commit {report.commit()}, torch {torch.__version__}{', small shapes on a CPU' * fake}")
    rows: list[Result] = []
    failed: list[str] = []
    measured: list[Limits] = []
    parts: dict[str, Callable[[], Rows]] = {
        "limits": lambda: _limits(device, measured),
        "tests": lambda: _tests(device),
        "engine": lambda: _engine(device, measured[0] if measured else limits(device)),
        "pages": lambda: _pages(device),
        "kill": lambda: _kill(device),
        "cluster": lambda: _cluster(device),
        "vllm": lambda: _vllm(device),
    }
    for name in asked.parts:
        began = time.monotonic()
        try:
            for row in parts[name]():
                rows.append(row)
                report.emit(row)
        except Exception as error:  # noqa: BLE001 - the other parts still have something to tell
            traceback.print_exc()
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
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
            taken = now - used - torch.cuda.memory_reserved(device.name) / 2**20
            yield Result("limits", "context with cuBLAS (engine.device.gpu_memory.CONTEXT_BYTES)", taken, "MiB")
    found = limits(device)
    measured.append(found)
    yield Result("limits", "copy, bytes read and written", found.read / 1e9, "GB/s")
    yield Result("limits", f"matrix product, {device.dtype}", found.compute / 1e12, "TFLOP/s")


def _used_mib() -> float | None:
    """Memory in use on the first GPU, by nvidia-smi; None without it."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return float(said) if said.isdigit() else None


def _tests(device: Device) -> Rows:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "gpu", "tests/engine/test_gpu.py"]
    command[-1:] = command[-1:] if device.fake else ["tests/engine"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=_TESTS_TIMEOUT)
    report.say("\n".join(done.stdout.splitlines()[-30:]))
    counts = {word.rstrip(","): int(count) for count, word in _pairs(done.stdout.splitlines()[-1].split())}
    passed, bad = counts.get("passed", 0), counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
    yield Result("tests", "pytest -m gpu, passed", passed, "tests", ok=None if device.fake else passed > 0 and not bad)
    yield Result("tests", "pytest -m gpu, failed", bad, "tests", ok=not bad)


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The words that follow a number in pytest's last line, with it: ("12", "passed,")."""
    return ((count, word) for count, word in pairwise(words) if count.isdigit())


def _engine(device: Device, found: Limits) -> Rows:
    shapes = {"tiny": _TINY} if device.fake else {"0.6B": QWEN_600M, "8B": LLAMA_8B}
    for name, shape_config in shapes.items():
        pages = 512 if device.fake else _pages_for(shape_config, device)
        engine = random_engine(shape_config, device, pages, _PAGE)
        yield from _steps(name, engine, Shape.of(shape_config, 2 if device.is_cuda else 4), device, found)
        del engine
        if device.is_cuda:
            torch.cuda.empty_cache()


def _pages_for(shape_config: Mapping[str, Any], device: Device) -> int:
    shape = Shape.of(shape_config, 2)
    weights = 2 * (shape.layers + 2 * shape.head)
    return int((device.free_bytes() - weights) * _POOL / (shape.kv_bytes * _PAGE))


def _steps(name: str, engine: Engine, shape: Shape, device: Device, found: Limits) -> Rows:
    """Decoding and prompts. Sequences share pages where all of them don't fit, far enough apart for no cache."""
    context, prompts = (60, (32, 64)) if device.fake else (2_000, (2_048, 8_192))
    each, runs, num_pages = -(-(context + 1) // _PAGE), 2 if device.fake else 20, len(engine.pool)
    for draw in (TokenDraw(temperature=0.0), TokenDraw(temperature=1.0)):
        for rows in (1, 8, 64, 256):
            chunks = [
                Chunk([1], context, [(row * each + page) % num_pages for page in range(each)], draw)
                for row in range(rows)
            ]
            took, call = step_seconds(engine, chunks, device, runs)
            best = roofline.decode_step(rows, context + 1, shape, found)
            how = "greedy" if not draw.temperature else "temperature 1"
            case = f"{name}, decode {rows} rows of {context}, {how}"
            yield Result("engine", case, took * 1e3, "ms", limit=best * 1e3, ratio=best / took)
            yield Result("engine", f"{case}: the host's part", call * 1e3, "ms")
    for tokens in prompts:
        for before in (0, prompts[-1]):
            pages = [page % num_pages for page in range(-(-(before + tokens) // _PAGE))]
            took, call = step_seconds(engine, [Chunk([1] * tokens, before, pages)], device, max(2, runs // 4))
            work = tokens * (2 * shape.layers + shape.attention * (before + tokens / 2))
            best = found.seconds(shape.layers * shape.width, work)
            case = f"{name}, prompt of {tokens} behind {before}"
            yield Result("engine", case, took * 1e3, "ms", limit=best * 1e3, ratio=best / took)
            yield Result("engine", f"{case}: the host's part", call * 1e3, "ms")


def _pages(device: Device) -> Rows:
    for copied in gpu_pages.copies(device):
        yield Result("pages", copied.case, copied.rate / 1e9, "GB/s")
    for layers in (1, 2) if device.fake else (2, 32):  # pages of 128 KiB and 2 MiB in bfloat16
        shape = {"num_hidden_layers": layers, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128}
        pages = 32 if device.fake else 4_096 // layers
        for copied in gpu_pages.moved(device, random_engine(_TINY | shape, device, pages, _PAGE)):
            yield Result("pages", copied.case, copied.rate / 1e9, "GB/s")


def _kill(device: Device) -> Rows:
    for number in range(2 if device.fake else 5):
        seen = gpu_pages.kill_while_copying(device)
        yield Result("kill", f"{number}: from SIGKILL to the pidfd", seen.until_gone * 1e3, "ms")
        yield Result("kill", f"{number}: slots written after that", seen.writes_after, "", ok=not seen.writes_after)
        if seen.until_free is not None:
            yield Result("kill", f"{number}: from the pidfd to free memory", seen.until_free * 1e3, "ms")


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
        settings: dict[str, object] = dict.fromkeys(
            ("router.grpc_port", "router.internal_port", "router.http_port", "api.port"), 0
        )
        settings |= {"model.path": str(model), "cluster.prefill": 1, "cluster.decode": 1, "model.device": device.name}
        settings |= {"router.disaggregation": "always"}
        if device.is_cuda:
            settings |= {"model.device": "auto", "store.host_cache_bytes": "8GiB"}
        else:
            settings |= {"prefill.kv_cache_bytes": "32MiB", "decode.kv_cache_bytes": "32MiB"}
            settings |= {"store.host_cache_bytes": "64MiB", "prefill.threads": 1, "decode.threads": 1}
        began = time.perf_counter()
        with LocalCluster(config.load(None, settings), Path(folder) / "cluster", patience=240.0) as cluster:
            yield Result("cluster", "1P+1D: from nothing to live", time.perf_counter() - began, "s")
            with Client(cluster.address) as client:
                yield from _requests(client, vocabulary, length, output, device)


def _requests(client: Client, vocabulary: int, length: int, output: int, device: Device) -> Rows:
    def prompt(number: int) -> list[int]:
        return [3 + (number * 7_919 + place * 31) % (vocabulary - 3) for place in range(length)]

    runs = [_stream(client, prompt(number), output) for number in range(3 if device.fake else 8)]
    ttft, between = (median(run[index] for run in runs[1:]) * 1e3 for index in (0, 1))
    yield Result("cluster", f"first token of {length} tokens, handed over, alone", ttft, "ms")
    yield Result("cluster", "between two tokens, alone", between, "ms")
    numbers = range(100, 104 if device.fake else 164)
    began = time.perf_counter()
    streams = [client.generate(prompt(number), max_tokens=output, ignore_eos=True, timeout=300) for number in numbers]
    tokens = sum(len(stream.result().token_ids) for stream in streams)
    taken = time.perf_counter() - began
    yield Result("cluster", f"{len(numbers)} requests at a time, tokens generated", tokens / taken, "1/s")


def _stream(client: Client, prompt: Sequence[int], output: int) -> tuple[float, float]:
    """Seconds to the first token, and between two of the others."""
    sent = time.perf_counter()
    arrived = [time.perf_counter() for _ in client.generate(prompt, max_tokens=output, ignore_eos=True, timeout=300)]
    return arrived[0] - sent, (arrived[-1] - arrived[0]) / max(1, output - 1)


def _vllm(device: Device) -> Rows:
    """A cluster on vLLM's runner beside vLLM itself: `bench/vllm_cluster.py` on this device."""
    found = Installation.find()
    if found is None or found.is_wrong:
        report.say(f"vllm: left out; {problem(found, None, 0, device.name)}")
        yield Result("vllm", "the right vLLM is installed", 0, "", ok=None if device.fake else False)
        return
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        model = models.write_shape(Path(folder), _TINY | {"head_dim": 32} if device.fake else QWEN_600M)
        options = ["--device", "cuda" if device.is_cuda else "cpu"]
        # `vllm serve` on a CPU is another environment: a fake run does without.
        options += ["--short", "--parts", "decode,pages"] if device.fake else []
        asked = vllm_cluster.parse(options)
        for part in asked.parts:
            yield from vllm_cluster.PARTS[part](model, asked)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = ("limits", "tests", "engine", "pages", "kill", "cluster", "vllm")
    parser = argparse.ArgumentParser(description="What only a GPU can show.")
    parser.add_argument("--fake", action="store_true", help="on a CPU, with small shapes, whatever is here")
    parser.add_argument("--parts", default=",".join(names), help="those to run, in this order")
    asked = parser.parse_args(argv)
    asked.parts = [part for part in asked.parts.split(",") if part]
    if unknown := set(asked.parts) - set(names):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
