"""What `baton doctor` finds about this machine's GPUs. `baton up` says what of it should be mended.

`read_facts` looks at the machine. `examine` decides, and is pure.
"""

import importlib
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config import Config
from baton.hosts import is_loopback
from baton.messages import WorkerRole
from baton.system_memory import available_memory
from deploy.control_plane.preflight import Finding, Level
from deploy.placement.gpu_sharing import gpus_in_use, share_gpus, uses_assigned_gpu, wanted_gpus
from engine.device.gpus import Gpu, visible_gpus
from engine.vllm_runner.requirements import Installation, problem, setting_that_needs_vllm
from kvstore.arena import numa
from kvstore.arena.memory import arena_bytes

_RUN_ON = "H200"
"""The GPU that Baton has run on (docs/benchmarks.md)."""
_MPS_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - the default of NVIDIA's daemon
_PINNING = 0.04  # seconds for each GiB, measured there


@dataclass(frozen=True)
class GpuFacts:
    """What this machine has. `kernels`: the GPUs that torch was compiled for, "" if it does not tell."""

    gpus: Sequence[Gpu] = ()
    kernels: str = ""
    free: Sequence[int] = ()  # bytes of each GPU; none without NVML
    vllm: Installation | None = None
    has_mps: bool = False
    numa_nodes: int = 1  # with processors
    may_spread: bool = True  # the kernel lets memory be spread over them
    arena: int = 0
    locked: int = resource.RLIM_INFINITY  # bytes that a process may lock


def read_facts(config: Config) -> GpuFacts:
    if not (gpus := visible_gpus().gpus):
        return GpuFacts()
    import torch

    flags: Any = getattr(torch._C, "_cuda_getArchFlags", str)
    nodes = numa.socket_nodes()
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPES))
    return GpuFacts(
        gpus,
        flags() or "",
        _free(gpus),
        Installation.find(),
        has_mps=(pipes / "control").exists(),
        numa_nodes=len(nodes),
        may_spread=numa.may_interleave(nodes),
        arena=arena_bytes(config, available_memory()),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def _free(gpus: Sequence[Gpu]) -> Sequence[int]:
    with suppress(Exception):  # the library is optional, and may fail in its own ways
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return [nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).free for gpu in gpus]
    return ()


def warn(config: Config, say: Callable[[str], object]) -> None:
    """Say what should be mended if all workers run on this machine."""
    if is_loopback(config.router.host):
        for finding in examine(config, read_facts(config)):
            if finding.level != "ok":
                say(f"{finding.subject}: {finding.text}. {finding.advice}")


def examine(config: Config, facts: GpuFacts) -> Iterator[Finding]:
    """Yield a finding for each kind of GPU, and for all that decides how they will serve."""
    pools = [pool for pool in config.pools() if _on_gpus(pool)]
    if not facts.gpus or not pools:
        return
    for look in (_kinds, _memory, _vllm):
        yield from dict.fromkeys(finding for pool in pools for finding in look(pool, facts))
    yield from _sharing(pools, facts)
    yield from _host(config, facts)


def _on_gpus(config: Config) -> Sequence[tuple[WorkerRole, int]]:
    """The roles of a model's workers that may have GPUs, with their number."""
    roles: Sequence[tuple[WorkerRole, int]] = [("prefill", config.cluster.prefill), ("decode", config.cluster.decode)]
    return [(role, count) for role, count in roles if count and config.device_of(role) != "cpu"]


def _kinds(config: Config, facts: GpuFacts) -> Iterator[Finding]:
    kinds = list(dict.fromkeys((gpu.name, gpu.capability, gpu.memory_bytes) for gpu in facts.gpus))
    for name, capability, memory in kinds:
        count = sum((gpu.name, gpu.capability, gpu.memory_bytes) == (name, capability, memory) for gpu in facts.gpus)
        text = f"{count} × {name}, {_gib(memory)}, sm_{capability[0]}{capability[1]}"
        if facts.kernels and not has_kernels(facts.kernels, capability):
            advice = f"torch was compiled for {facts.kernels}: install a build for it, or hide it: CUDA_VISIBLE_DEVICES"
            yield Finding("bad", "GPU", f"{text}: unknown to the installed torch", advice)
        elif capability < (8, 0):
            yield Finding("warn", "GPU", f"{text}: vLLM has no bfloat16 there", "--dtype float16")
        elif _RUN_ON not in name:
            advice = "`python -m bench.engine.gpu` runs the tests that need a GPU, and measures it"
            yield Finding("ok", "GPU", f"{text}; Baton has not run on such a GPU yet", advice)
        else:
            yield Finding("ok", "GPU", text)
    if len(kinds) > 1 and config.model.numerics == "exact":
        advice = "choose one by CUDA_VISIBLE_DEVICES or node_selector, or set model.numerics to mixed"
        yield Finding("warn", "GPU", "of several kinds, whose arithmetic gives other bits", advice)


def has_kernels(kernels: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for `kernels`, such as "sm_80 sm_90a compute_120", runs on a GPU. Machine code (sm) runs on
    later GPUs of its generation, intermediate code (compute) on all later ones, and code with a suffix on its own."""
    for kind, major, minor, suffix in re.findall(r"(sm|compute)_(\d+)(\d)([af]?)", kernels):
        target = (int(major), int(minor))
        if target == capability:
            return True
        if not suffix and target < capability and (kind == "compute" or target[0] == capability[0]):
            return True
    return False


def _memory(config: Config, facts: GpuFacts) -> Iterator[Finding]:
    role, _ = _on_gpus(config)[-1]
    part = config.worker(role).gpu_memory_utilization
    for index, (gpu, free) in enumerate(zip(facts.gpus, facts.free, strict=False)):
        if free < part * gpu.memory_bytes:
            text = (
                f"{_gib(free)} of GPU {index} are free, and workers may use {_gib(int(part * gpu.memory_bytes))} of it"
            )
            advice = f"end what `nvidia-smi` shows there, or lower {role}.gpu_memory_utilization"
            yield Finding("warn", "GPU memory", text, advice)


def _vllm(config: Config, facts: GpuFacts) -> Iterator[Finding]:
    if config.model.engine == "native":
        return
    if lack := problem(facts.vllm, None, config.pages.page_size, "cuda"):
        needed = config.model.engine == "vllm" or setting_that_needs_vllm(config)
        level: Level = "bad" if needed else "warn"
        instead = "and this configuration needs it" if needed else "so our own engine will, several times slower"
        yield Finding(level, "vLLM", f"can't serve on these GPUs, {instead}", lack)
    elif facts.vllm is not None:
        yield Finding("ok", "vLLM", f"{facts.vllm.version}, for GPUs")


def _sharing(pools: Sequence[Config], facts: GpuFacts) -> Iterator[Finding]:
    requests = {
        f"{role}-m{number}-{index}": wanted_gpus(pool, role)
        for number, pool in enumerate(pools)
        for role, count in _on_gpus(pool)
        if uses_assigned_gpu(pool.device_of(role))
        for index in range(count)
    }
    shares = [share.share for share in share_gpus(requests, len(facts.gpus)).values()]
    in_use, parts = gpus_in_use(shares), sum(share < 1 for share in shares)
    if parts and in_use < len(facts.gpus):
        text = f"Ray puts {len(shares)} workers on {in_use} of {len(facts.gpus)} GPUs, and the others stay idle"
        yield Finding("warn", "GPU shares", text, f"start a multiple of {len(facts.gpus)} workers")
    if in_use < len(shares) and not facts.has_mps:
        advice = "start `nvidia-cuda-mps-control -d` before Ray, or one worker for both roles: --prefill 0"
        yield Finding("warn", "MPS", "workers share a GPU and take turns on it: NVIDIA's MPS does not run", advice)


def _host(config: Config, facts: GpuFacts) -> Iterator[Finding]:
    pinned = f"{_gib(facts.arena)}, which each worker pins in about {facts.arena / 2**30 * _PINNING:.1f} s"
    if config.store.transport == "nixl" and facts.locked != resource.RLIM_INFINITY:
        text = f"{pinned}; a process may lock {_gib(facts.locked)}, and RDMA needs all of it locked"
        yield Finding("warn", "arena", text, "ulimit -l unlimited, before `ray start`")
    elif facts.may_spread:
        yield Finding("ok", "arena", f"{pinned}; on {facts.numa_nodes} NUMA nodes")
    else:
        text = f"{pinned}; the kernel does not spread it over the {facts.numa_nodes} NUMA nodes"
        yield Finding("warn", "arena", text, "start the container with --cap-add SYS_NICE")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
