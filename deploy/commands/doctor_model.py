"""What `baton doctor MODEL` finds: the engine that would serve a checkpoint on this machine, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.checkpoint_files import read_config, text_settings
from baton.checkpoints import hub, named
from baton.config import Config
from baton.errors import ModelError, ModelNotFound
from baton.messages import WorkerRole
from baton.system_memory import available_memory
from deploy.commands.terminal import err, size
from deploy.control_plane import checkpoint, preflight
from deploy.control_plane.preflight import Finding, Level, version_of
from engine.device.gpus import VisibleGpus, resolve_device, visible_gpus
from engine.models.config_file import ConfigFile
from engine.vllm_runner import TESTED_ARCHITECTURES
from engine.vllm_runner.pages import largest_page
from engine.vllm_runner.requirements import Installation, page_size_lack
from kvstore.arena.memory import arena_bytes

if TYPE_CHECKING:
    from engine.spec import ModelSpec
    from worker.engine_choice import EngineChoice, EngineFacts


@dataclass(frozen=True)
class ModelReport:
    """The engine that would serve a model, None if none can; why; and what was looked at."""

    model: str
    engine: str | None
    why: str
    findings: tuple[Finding, ...]


def examine_model(config: Config, model: str) -> ModelReport:
    """Look at the checkpoint `model`, a directory or a hub id in the cache, for a decode worker of this configuration.
    A named model is fetched.

    Raises ModelNotFound if it is not on this machine, ModelError for a config that can't be read, and StartupError for
    a device that is not here.
    """
    from worker.engine_choice import choose, devices_of, engine_facts  # imports torch

    preflight.check_model(model)
    path = hub.resolve(model, say=err.print) if model in named.MODELS else hub.cached(model)
    if path is None:
        raise ModelNotFound(
            f"{model!r} is no directory, nor in the hub's cache; `baton up --model` and `hf download` fetch a hub id"
        )
    path = path.resolve()
    gpus = visible_gpus()
    device = resolve_device(config.device_of("decode"), gpus)
    devices = {device, *devices_of(config, gpus).values()}
    raw, installed = read_config(path), Installation.find()
    facts = engine_facts(config, path, devices, installed)
    choice = choose(facts)
    spec = _spec(path)
    report = checkpoint.examine(config, path, [(choice.engine, device)] if choice.engine else [])
    findings = (
        _engine(choice, facts),
        *_checkpoint(raw, spec),
        *(Finding("bad", "files", "can't be served", str(problem)) for problem in report.problems),
        *(Finding("warn", "files", note) for note in report.notes),
        _device(config, device, gpus),
        _native(config, spec, facts, choice),
        _vllm(raw, installed, facts, choice),
        _page_size(config, raw, choice, device),
        *_memory(config, path, raw, spec, choice, device, gpus),
        *_arena(config, raw, spec, choice),
    )
    return ModelReport(model, choice.engine, choice.why, findings)


def _spec(path: Path) -> ModelSpec | None:
    from engine.models.config import load_spec

    try:
        return load_spec(path)
    except ModelError:
        return None


def _engine(choice: EngineChoice, facts: EngineFacts) -> Finding:
    if choice.engine is None:
        return Finding("bad", "engine", "none on this machine can serve the model", _advice(facts) or choice.why)
    title = "our own (native)" if choice.engine == "native" else "vLLM's runner (vllm)"
    return Finding("ok", "engine", f"{title}: {choice.why}")


def _advice(facts: EngineFacts) -> str:
    """What would make the other runner serve the model, if one could."""
    if facts.setting == "vllm" and not facts.native_lack:
        return f"our own engine can serve it: --engine native. vLLM's runner can't: {facts.vllm_lack}"
    if facts.setting == "native" and not facts.vllm_lack:
        return f"vLLM's runner can serve it: --engine vllm. Our own can't: {facts.native_lack}"
    return ""


def _checkpoint(raw: Mapping[str, Any], spec: ModelSpec | None) -> Iterator[Finding]:
    named = ", ".join(map(str, raw.get("architectures") or ())) or f"model_type {raw.get('model_type')}"
    quantization: Any = raw.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    description = (
        f"{named}, weights {method or 'not quantized'}, in {raw.get('dtype', raw.get('torch_dtype')) or 'no dtype'}"
    )
    yield Finding("ok", "checkpoint", description)
    text = text_settings(raw)
    try:
        config = ConfigFile(text)
        heads = config.count("num_attention_heads")
        shape = f"{config.count('num_hidden_layers')} layers, {heads} heads of {config.head_dim()}, "
        shape += f"{config.count('num_key_value_heads', heads)} of them with K and V"
    except ModelError as error:
        yield Finding("warn", "shape", "not read", str(error))
        return
    if spec is None:
        window = text.get("sliding_window")
        yield Finding("ok", "shape", f"{shape}; window {window or 'none'}")
        return
    kinds = [f"{'all' if window is None else window}" for window in dict.fromkeys(spec.windows)]
    yield Finding("ok", "shape", f"{shape}; tokens a layer sees: {' or '.join(kinds)}; family {spec.family}")


def _device(config: Config, device: str, gpus: VisibleGpus) -> Finding:
    if lack := preflight.ranks_problem(config, "decode", device, len(gpus.gpus)):
        return Finding("bad", "device", f"{device}, of {gpus}", lack)
    if device == "cpu":
        return Finding("ok", "device", f"the CPU: {gpus.problem or 'model.device says so'}")
    metrics = "" if version_of("nvidia-ml-py") else "for metrics of the GPU: pip install 'baton[gpu]'"
    return Finding("ok", "device", f"{device}, of {gpus}", metrics)


def _native(config: Config, spec: ModelSpec | None, facts: EngineFacts, choice: EngineChoice) -> Finding:
    if facts.native_lack or spec is None:
        return Finding(_if_needed(choice), "our own engine", f"can't serve it: {facts.native_lack}")
    form = f"weights stored {spec.stored}"
    if at_load := config.model.quantization:
        form += f", quantized to {at_load} when they are loaded"
    return Finding("ok", "our own engine", f"can serve it: family {spec.family}, {form}")


def _vllm(raw: Mapping[str, Any], installed: Installation | None, facts: EngineFacts, choice: EngineChoice) -> Finding:
    named = [str(name) for name in raw.get("architectures") or ()]
    tested = TESTED_ARCHITECTURES.intersection(named)
    what = f"Baton's tests run {', '.join(sorted(tested))} on it" if tested else "Baton's tests run no model like it"
    if installed is None:
        may = "could serve it" if tested else "may serve it"
        return Finding(_if_needed(choice), "vLLM's runner", f"{may}; {what}", facts.vllm_lack)
    if facts.vllm_lack:
        return Finding(
            _if_needed(choice), "vLLM's runner", f"can't serve it; vLLM {installed.version}", facts.vllm_lack
        )
    return Finding("ok", "vLLM's runner", f"can serve it: vLLM {installed.version} knows it; {what}")


def _if_needed(choice: EngineChoice) -> Level:
    """What the lack of one engine means: little where the other one serves the model."""
    return "bad" if choice.engine is None else "ok"


def _page_size(config: Config, raw: Mapping[str, Any], choice: EngineChoice, device: str) -> Finding:
    tokens = config.pages.page_size
    try:
        ranks = config.stage_ranks_of("decode")
        lack = page_size_lack(text_settings(raw), tokens, device, config.model.dtype, ranks)
    except ModelError as error:
        return Finding("warn", "page size", f"{tokens} tokens", str(error))
    text = f"{tokens} tokens; our own engine takes any, vLLM's runner {'not these' if lack else 'these too'}"
    if lack and choice.engine != "native":
        return Finding("bad", "page size", text, lack)
    return Finding("ok", "page size", text)


def _memory(
    config: Config,
    path: Path,
    raw: Mapping[str, Any],
    spec: ModelSpec | None,
    choice: EngineChoice,
    device: str,
    gpus: VisibleGpus,
) -> Iterator[Finding]:
    """Weights and pages of one decode worker beside the memory that there is."""
    role: WorkerRole = "decode"
    own = config.worker(role)
    weights = preflight.weight_bytes(path)
    if spec is not None and choice.engine == "native":
        weights = preflight.native_weight_bytes(config, spec, device)
    if not weights:
        yield Finding("bad", "memory", "the checkpoint has no *.safetensors", "Baton loads no other kind of weights")
        return
    page, draft = _page_bytes(config, raw, spec, choice), preflight.draft_weight_bytes(config.model)
    per_page = f", {size(page)} a page" if page else ""
    if device == "cpu":
        room = available_memory()
        free, bound, pages = room.available, room.bound, own.kv_cache_bytes.on_cpu
    else:
        ranks, total = config.ranks_of(role), gpus.gpus[int(device.partition(":")[2] or 0)].memory_bytes
        free = int(ranks * total * own.gpu_memory_utilization)
        bound = f"{own.gpu_memory_utilization:g} of {f'{ranks} × ' if ranks > 1 else ''}{gpus.gpus[0].name}"
        pages = int(own.kv_cache_bytes)
    beside = f", those of the draft {size(draft)}" if draft else ""
    text = f"weights {size(weights)}{beside}, pages {size(pages) if pages else 'what is left'}{per_page}"
    text += f"; {size(free)} ({bound})"
    if weights + draft + pages > free:
        yield Finding("bad", "memory", text, "lower kv_cache_bytes, or take a machine or a GPU with more memory")
    else:
        yield Finding("ok", "memory", text)


def _arena(config: Config, raw: Mapping[str, Any], spec: ModelSpec | None, choice: EngineChoice) -> Iterator[Finding]:
    """How many tokens of the model the store of this machine holds, beside its longest prompts."""
    longest = text_settings(raw).get("max_position_embeddings")
    if not (page := _page_bytes(config, raw, spec, choice)) or not isinstance(longest, int):
        return
    arena = arena_bytes(config, available_memory())
    tokens = arena // page * config.pages.page_size
    text = f"{size(arena)} hold {tokens:,} tokens; the longest prompts have {longest:,}"
    if tokens >= 2 * longest:
        yield Finding("ok", "arena", text)
        return
    needed = size(2 * -(-longest // config.pages.page_size) * page).replace(" ", "")
    advice = f"prompts as long as that wait for each other; two of them fit with store.host_cache_bytes={needed}"
    yield Finding("warn", "arena", text, advice)


def _page_bytes(config: Config, raw: Mapping[str, Any], spec: ModelSpec | None, choice: EngineChoice) -> int | None:
    """Of one page of the model; None where the config does not say."""
    from engine.engine import layout_of
    from worker.draft import page_layers

    text: Mapping[str, Any] = text_settings(raw)
    text = {"quantization_config": raw.get("quantization_config"), **text}
    own = config.model.dtype, config.pages.page_size, config.model.kv_cache_dtype
    try:
        native = spec if choice.engine == "native" else None
        page = layout_of(native, *own) if native else largest_page(text, *own)
        return replace(page, num_layers=page.num_layers + page_layers(config.model, raw)).page_bytes
    except ModelError:
        return None
