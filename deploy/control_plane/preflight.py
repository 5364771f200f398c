"""The checks of a machine and a configuration: `baton up` ends at the first error, `baton doctor` shows what all find.

Each error says how to fix it. A check that passes returns a line about what it saw, if that is worth to be shown.
"""

import importlib.metadata
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from baton import doors
from baton.api_keys import KeyRing
from baton.checkpoint_files import read_config
from baton.checkpoints import gguf_file, hub
from baton.checkpoints.from_gguf import FILE as GGUF_FILE
from baton.config import Config, ModelConfig, WorkerConfig
from baton.errors import BatonError, ConfigError, ModelNotFound, NotEnoughMemory, StartupError
from baton.hosts import is_loopback
from baton.messages import WorkerRole
from baton.operator_address import Loopback, parse_operator
from baton.ports import FixedPort, Patience, RouterPorts
from baton.system_memory import AvailableMemory, available_memory
from baton.wire import ClusterKeys
from deploy.control_plane import probe, state_file
from deploy.control_plane.reports import read_overview
from deploy.control_plane.state_file import State
from deploy.processes import session_members
from engine.device.gpus import resolve_device, visible_gpus
from engine.spec import QUANTIZED_AT_LOAD, ModelSpec
from engine.vllm_runner import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.vllm_runner.pages import FP8
from engine.vllm_runner.requirements import Installation, problem, setting_that_needs_vllm
from kvstore.arena.memory import arena_bytes
from kvstore.layout import CODES

Level: TypeAlias = Literal["ok", "warn", "bad"]

# Memory of processes besides KV pages and weights, about; measured with a tiny model.
_PROCESS_BYTES = 300 * 2**20  # of a worker
_VLLM_BYTES = 500 * 2**20  # of vLLM beside it
_RANK_BYTES = 350 * 2**20  # of each rank beside that, where there are several

_LITTLE_MEMORY = 4 * 2**30
_FEW_FILES = 4_096


class Finding(msgspec.Struct, frozen=True, rename={"text": "found"}):
    """The result of one check. `advice` is empty if there is no problem."""

    level: Level
    subject: str
    text: str
    advice: str = ""


def check(config: Config, say: Callable[[str], object]) -> None:
    """Run all checks; `say` tells what takes long. Raises the first error."""
    pools = config.pools()
    for pool in pools:
        check_model(pool.model.path)
        check_adapters(pool.model.lora_modules)
    check_keys(config)
    check_doors(config)
    check_ports(config, say)
    check_device(config)
    for pool in pools:
        check_engine(pool)
    room = available_memory()
    check_memory(config, room)
    if (arena := arena_bytes(config, room)) > arena.ON_CPU:
        say(f"the store of a machine like this one takes an arena of {_mib(arena)}")


def examine(config: Config) -> list[Finding]:
    """Run all checks but those of the model. A failed one is a finding, never an exception."""
    room, ports = available_memory(), _ports(config)
    return [
        *_findings("Ray", f"{version_of('ray')}; can't be used", check_ray),
        _memory(room),
        *_findings("memory", "too little for this configuration", lambda: check_memory(config, room)),
        *_findings("ports", f"{ports}: can't all be had", lambda: _own_ports(config) or check_ports(config)),
        *_findings("keys", f"{config.cluster.key_path} can't be used", lambda: check_keys(config)),
        *_findings("clients", f"the doors at {config.api.host} can't open", lambda: check_doors(config)),
        _torch(),
        *_findings("device", "not here", lambda: check_device(config)),
        cores(config),
        _files(),
        *_clusters(config.cluster.state_dir.parent),
    ]


def _findings(subject: str, failed: str, look: Callable[[], Finding | str | None]) -> Iterator[Finding]:
    """Turn what a check returns or raises into findings. `failed` is what an error means."""
    try:
        outcome = look()
    except BatonError as error:
        yield Finding("bad", subject, failed, str(error))
    else:
        if outcome is not None:
            yield outcome if isinstance(outcome, Finding) else Finding("ok", subject, outcome)


def check_ray() -> Finding:
    """Find a Ray that `baton up` would join. Raises RayUnusable."""
    version = version_of("ray")
    if version is None:
        return Finding("bad", "Ray", "not installed", "pip install 'ray[default]'")
    address = probe.find()
    if address is None:
        return Finding("ok", "Ray", f"{version}; none runs here, so `baton up` starts one of its own")
    if probe.link(address).mode == "token":
        return Finding("ok", "Ray", f"{version} at {address}, which asks for a token; ours is accepted")
    return Finding(
        "warn",
        "Ray",
        f"{version} at {address}, without authentication",
        "whoever reaches its ports can run code here: `ray stop`, `ray get-auth-token --generate`, then "
        "`RAY_AUTH_MODE=token ray start --head`",
    )


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_model(model: str) -> None:
    """Check that `model` may be a checkpoint; `checkpoint` looks into it. Raises ConfigError and ModelNotFound."""
    if not model:
        raise ConfigError(
            "no model is given; say which: --model DIRECTORY, or a Hugging Face id such as Qwen/Qwen3-0.6B"
        )
    path = Path(model).expanduser()
    if path.is_dir():
        if not os.path.lexists(path / "config.json"):
            raise ModelNotFound(f"{path} holds no config.json; give the directory of a Hugging Face checkpoint")
    elif gguf_file.is_one(path):
        return
    elif path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFound(
            f"{model} is not a directory; give that of a checkpoint, a GGUF file, or a Hugging Face id (owner/name)"
        )


def check_adapters(modules: Mapping[str, str]) -> None:
    """Check that each LoRA adapter has its files. Raises ModelNotFound."""
    for name, path in modules.items():
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (Path(path).expanduser() / file).is_file():
                raise ModelNotFound(
                    f"model.lora_modules: {name!r} in {path} has no {file}; give the directory of an adapter that PEFT "
                    "saved as safetensors"
                )


def check_keys(config: Config) -> str:
    """Check that the cluster's keys can be used. The default file may be missing: `baton up` makes it."""
    path = config.cluster.key_path
    if config.cluster.key_file or path.exists():
        ClusterKeys.read_file(path)
        return f"{path}, for its owner alone; every link of the cluster is encrypted with them"
    if is_loopback(config.router.host):
        return f"the cluster's first process makes {path}"
    return f"`baton up` makes {path}; processes started by hand on other nodes need the file"


def check_doors(config: Config) -> str:
    """Check what a client needs: TLS and a key. Raises StartupError and KeysUnusable."""
    doors.server_tls(config.tls)
    ring = KeyRing(config.api_keys_path, required=config.api.require_keys)
    doors.check_keys(config, ring)
    keys = "every client needs an API key" if ring.required else "clients need no API key"
    return f"{keys}; {'TLS' if config.tls.cert_file else 'no TLS'}, at {config.api.host}"


def check_ports(config: Config, say: Callable[[str], object] | None = None) -> str:
    """Check that the router's ports can be had. With `say`, wait while a connection holds one, and tell that. Raises
    PortInUse, and StartupError for a host that is no address of this machine."""
    patience = Patience(listener=0.0, connection=5.0) if say else Patience(0.0, 0.0, 0.0, 0.0)
    ports = RouterPorts.of(config, patience=patience)
    doors = [ports.grpc, ports.internal, *ports.further, ports.http, ports.api]
    if isinstance(operator := parse_operator(config.router.operator), Loopback):
        any_port = f"--set router.operator={operator._replace(port=0)}"
        doors.append(FixedPort("router.operator", operator.host, operator.port, "router.operator", any_port, patience))
    for door in doors:
        for turn, pause in enumerate(door.waits()):
            if say is not None and not turn:
                say(f"waiting for {door}: a connection holds it")
            time.sleep(pause)
    return f"{_ports(config)}: free"


def _own_ports(config: Config) -> str:
    """The ports of this very cluster, if it runs; "" if it does not."""
    return f"{_ports(config)}: this cluster is up and has its ports" if _is_up(config.cluster.state_dir) else ""


def _ports(config: Config) -> str:
    router, api = config.router, config.api
    clients, further = (router.grpc_port, api.port), (each.internal_port for each in config.models)
    inside = (router.internal_port, *further, router.http_port)
    return f"{_listed(clients)} on {api.host}, {_listed(inside)} on {router.host}"


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(str(port) if port else "any" for port in ports)


def _memory(room: AvailableMemory) -> Finding:
    text = f"{room.available / 2**30:.1f} GiB left, bounded by {room.bound}"
    if room.available < _LITTLE_MEMORY:
        return Finding("warn", "memory", text, "end something, or raise the limit")
    return Finding("ok", "memory", text)


def check_memory(config: Config, room: AvailableMemory) -> None:
    """Check that each model's arena, KV pages and weights fit into the free memory of this machine or cgroup, beside
    those of the models before it.

    If other nodes may join, only one decode worker is certain to run here. On a GPU, KV pages and weights are in its
    own memory. Raises NotEnoughMemory.
    """
    for pool in config.pools():
        room = replace(room, available=room.available - _check_memory(pool, room))


def _check_memory(config: Config, room: AvailableMemory) -> int:
    """Check the memory of one model, and return the bytes that it takes. Raises NotEnoughMemory."""
    prefill, decode = config.cluster.prefill, config.cluster.decode
    if not is_loopback(config.router.host):
        prefill, decode = 0, 1
    roles: Sequence[tuple[WorkerRole, WorkerConfig, int]] = [
        ("prefill", config.prefill, prefill),
        ("decode", config.decode, decode),
    ]
    on_cpu = [(own, count) for role, own, count in roles if count and runs_on_cpu(config, role)]
    pools = sum(count * own.kv_cache_bytes.on_cpu for own, count in on_cpu)
    checkpoint = hub.cached(config.model.path) if on_cpu else None
    weights = _loaded_bytes(config, checkpoint) if checkpoint else 0
    copies = sum(count for _, count in on_cpu)  # of the weights
    pools += decode * config.draft_cache_bytes
    drafting = decode if config.model.speculative_config is None else copies
    loaded = copies * weights + drafting * draft_weight_bytes(config.model)
    processes = sum(count * _process_bytes(config, role) for role, _, count in roles)
    arena = arena_bytes(config, room)
    needed = arena + pools + processes + loaded
    if needed > room.available:
        raise NotEnoughMemory(
            f"the cluster needs about {_mib(needed)}: an arena of {_mib(arena)}, page pools of "
            f"{_mib(pools)}, weights of {_mib(loaded)}, and processes of {prefill + decode} workers of "
            f"{_mib(processes)}; {_mib(room.available)} are left ({room.bound}). Lower store.host_cache_bytes, "
            "prefill.kv_cache_bytes or decode.kv_cache_bytes, or start fewer workers"
        )
    return needed


def _process_bytes(config: Config, role: WorkerRole) -> int:
    """What a worker's processes take besides KV pages and weights."""
    if not _asks_for_vllm(config):
        return _PROCESS_BYTES
    ranks = config.ranks_of(role)
    return _PROCESS_BYTES + _VLLM_BYTES + (ranks * _RANK_BYTES if ranks > 1 else 0)


def _asks_for_vllm(config: Config) -> str:
    """Return which setting asks for vLLM's runner, "" if none does.

    It also serves models that our own engine does not know, which is not looked at here.
    """
    if config.model.engine == "vllm":
        return "model.engine is vllm"
    return "" if config.model.engine == "native" else setting_that_needs_vllm(config)


def runs_on_cpu(config: Config, role: WorkerRole) -> bool:
    """Whether workers of that role on this machine will compute on its CPU."""
    device = config.device_of(role)
    return device == "cpu" or (device == "auto" and not visible_gpus().gpus)


def check_device(config: Config) -> None:
    """Check that this machine has the device, and a GPU for each rank, of each model, if all workers run here. Raises
    StartupError."""
    if not is_loopback(config.router.host):
        return
    gpus = visible_gpus()
    for pool in config.pools():
        roles: Sequence[WorkerRole] = ("prefill", "decode") if pool.cluster.prefill else ("decode",)
        for role in roles:
            if lack := ranks_problem(pool, role, resolve_device(pool.device_of(role), gpus), len(gpus.gpus)):
                raise StartupError(lack)


def ranks_problem(config: Config, role: WorkerRole, device: str, gpus: int) -> str:
    """Return why the ranks of a worker of that role find no room on this machine, which has so many GPUs; "" if they
    do. Ranks on a CPU share its cores."""
    ranks, (kind, _, index) = config.ranks_of(role), device.partition(":")
    if kind != "cuda" or int(index or 0) + ranks <= gpus:
        return ""
    start = f", from {device} on" if index else ""
    return (
        f"the {ranks} ranks of a {role} worker need {ranks} GPUs of one machine{start}, and this one has {gpus}; lower "
        f"{role}.tensor_parallel_size"
    )


def _torch() -> Finding:
    version = version_of("torch")
    if version is None:
        return Finding("bad", "torch", "not installed", "pip install torch")
    import torch

    gpus = visible_gpus()
    if gpus.gpus:
        return Finding("ok", "torch", f"{version}; {gpus}")
    if gpus.wasted:
        return Finding("warn", "torch", f"{version}, CPU only, though this machine has an NVIDIA driver", gpus.problem)
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("ok", "torch", f"{version}, CPU only ({capability}): {gpus.problem}")


def cores(config: Config) -> Finding:
    """Compare this machine's cores with the workers that would share them."""
    here = len(os.sched_getaffinity(0))
    roles: Sequence[WorkerRole] = ("prefill", "decode")
    counts: Sequence[tuple[Config, WorkerRole, int]] = [
        (pool, role, getattr(pool.cluster, role)) for pool in config.pools() for role in roles
    ]
    workers = sum(count for _, _, count in counts)
    ranks = sum(count * pool.ranks_of(role) for pool, role, count in counts)
    text = f"{here} for {workers} workers" + (f" of {ranks} ranks in all" if ranks > workers else "")
    if here < ranks and any(count and runs_on_cpu(pool, role) for pool, role, count in counts):
        return Finding("warn", "cores", text, "they will take turns; fine for trying out, not for speed")
    return Finding("ok", "cores", text)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        return Finding("warn", "open files", f"at most {soft}", f"ulimit -n {min(hard, 65_536)}, before `ray start`")
    return Finding("ok", "open files", f"at most {soft}")


def check_engine(config: Config) -> None:
    """Check that vLLM's runner can serve the model if a setting asks for it and all workers run here.

    Of a hub model that was not fetched yet, only the installation of vLLM is looked at. Whether our own engine knows a
    model is seen by its worker: that question imports torch. Raises ConfigError and ModelError.
    """
    engine, held = config.model.engine, config.model.kv_cache_dtype
    if engine == "native" and held in FP8.keys() - CODES.keys():
        raise ConfigError(
            f"model.kv_cache_dtype is {held}, and our own engine has no such pages: set fp8 or int8 there, or take "
            "vLLM's runner, which has them: --engine vllm"
        )
    if not (why := _asks_for_vllm(config)) or not is_loopback(config.router.host):
        return
    path, gpus = hub.cached(config.model.path), visible_gpus()
    raw = read_config(path) if path is not None else None
    roles: Sequence[tuple[WorkerRole, int]] = [("prefill", config.cluster.prefill), ("decode", config.cluster.decode)]
    for role, count in roles:
        if not count:
            continue
        device = resolve_device(config.device_of(role), gpus)
        model = config.model
        own = (config.stage_ranks_of(role), held, model.quantization, model.enable_expert_parallel, model.dtype)
        if lack := problem(Installation.find(), raw, config.pages.page_size, device, *own, config.stages_of(role)):
            raise ConfigError(f"{why}, and vLLM's runner can't: {lack}")


def check_name_free(folder: Path) -> None:
    """Check that no cluster of this name is up. Remains of a dead one are allowed. Raises StartupError."""

    state = state_file.read_state(folder)
    # Without an address its `up` never finished. No other `up` is in progress, since we hold the lock.
    if state is not None and state.routers and _alive(folder, state):
        raise StartupError(
            f"a cluster named {state.name!r} is up already, at {state.target}; end it with `baton down --name "
            f"{state.name}`, or give this one another name: --name"
        )


def _is_up(folder: Path) -> bool:
    """Whether the cluster of that folder runs, according to a readable state file."""
    try:
        state_file.read_state(folder)
    except BatonError:
        return False
    try:
        check_name_free(folder)
    except BatonError:
        return True
    return False


def _clusters(folder: Path) -> Iterator[Finding]:
    """Say of each cluster of this user whether it runs or has left something."""
    for path in sorted(folder.glob("*/cluster.json")):
        name = path.parent.name
        try:
            check_name_free(path.parent)
        except BatonError as error:
            text, _, advice = str(error).partition(";")
            up = _is_up(path.parent)
            yield Finding("ok" if up else "bad", "cluster", f"{name}: {text}", "" if up else advice.strip())
        else:
            yield Finding("warn", "cluster", f"{name} has died", f"baton down --name {name} clears away what is left")


def _alive(folder: Path, state: State) -> bool:
    overview = read_overview(folder)
    supervisors = [state.supervisor, overview.supervisor if overview is not None else None]
    return any(identity is not None and not identity.gone() for identity in supervisors) or (
        state.ray.own is not None and bool(session_members(state.ray.own.leader))
    )


def weight_bytes(path: Path) -> int:
    """Return the bytes of a checkpoint's weights; 0 if they are not on this machine."""
    files = [*path.glob("*.safetensors"), path / GGUF_FILE]
    return sum(file.stat().st_size for file in files if file.is_file())


def draft_weight_bytes(model: ModelConfig) -> int:
    """Return the bytes of the weights of a draft or of heads; 0 if they are not on this machine. MTP layers are in the
    files of the model."""
    own = model.speculative_config
    named = model.draft_model or model.speculation_heads or (own.model if own is not None else "")
    folder = hub.cached(named) if named else None
    return weight_bytes(folder) if folder else 0


def native_weight_bytes(config: Config, spec: ModelSpec, device: str) -> int:
    """Return the bytes of a model's weights as our own engine holds them. Imports torch. Raises ModelError."""
    from engine.engine import dtype_of, linear_maker
    from engine.models import memory
    from engine.models.weights import TORCH_DTYPES

    model = config.model
    maker = linear_maker(device, spec, model.quantization)
    return memory.weight_bytes(spec, TORCH_DTYPES[dtype_of(spec, model.dtype)], maker)


def _loaded_bytes(config: Config, path: Path) -> int:
    """Return the bytes of weights on a CPU: those of the files, unless they are quantized when they are loaded."""
    if config.model.quantization not in QUANTIZED_AT_LOAD:
        return weight_bytes(path)
    from engine.models.config import load_spec

    return native_weight_bytes(config, load_spec(path), "cpu")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
