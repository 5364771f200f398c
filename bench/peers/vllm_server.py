"""vLLM's CPU build as a server of OpenAI's API, at the settings that serve it best on a machine of few cores."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from baton.errors import StartupError
from bench.peers import environments

_PATIENCE = 420.0  # seconds; it compiles
_CONTEXT = 4_096  # tokens
_GPU_SHARE = "0.45"  # of the GPU's memory


@contextmanager
def serve(
    model: Path, peers: Path, max_num_batched_tokens: int | None, threads: int, python: Path | None = None
) -> Iterator[str]:
    """A server of that checkpoint; its URL. It computes at most `max_num_batched_tokens` tokens in a step (none: its
    own default). With `python`, that of an environment with vLLM, it computes on a GPU. Else it is vLLM's CPU build,
    whose environment is, or will be, below the folder `peers`. Raises StartupError."""
    own, options = ({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}, ["--gpu-memory-utilization", _GPU_SHARE])
    if python is None:
        python, own = _on_cpu(peers, threads)
        # One process computes and schedules: two would take turns at waiting for each other on these few cores.
        options = ["--distributed-executor-backend", "uni"]
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(_CONTEXT), "--disable-uvicorn-access-log", *options]
    if max_num_batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environments.variables(own)
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, f"{url}/health", output)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _on_cpu(peers: Path, threads: int) -> tuple[Path, dict[str, str]]:
    """The Python of vLLM's CPU build, and its variables. Raises StartupError."""
    try:
        environments.prepare(environments.VLLM, peers)
        libraries = environments.tcmalloc(peers), environments.openmp(environments.VLLM, peers)
    except environments.NotPrepared as error:
        raise StartupError(f"vLLM's environment can't be made: {error}") from None
    return environments.VLLM.python(peers), {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "5",
        # Without this it would not heed the executor that is chosen below.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        **environments.preloading(*libraries),
    }  # fmt: skip


def _wait(process: subprocess.Popen[bytes], url: str, output: IO[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    output.seek(0)
    tail = output.read().decode(errors="replace").strip().splitlines()[-8:]
    raise StartupError("\n".join(["vLLM does not serve:", *tail]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
