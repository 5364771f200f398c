"""Which engine a worker computes with: our own ("native") or vLLM's runner. `choose` is the rule, and it is pure.

`model.engine` names one, or says "auto":

- on a CPU our own wherever it knows the model: it is exact there, and faster;
- on a GPU vLLM's where it can serve the model: our own engine has no fast kernels for GPUs;
- the other one where only that can serve the model.

All workers of a cluster have one engine, since pages of two engines never meet. So the rule looks at the devices of
all roles. `baton up` applies it where all workers run on its machine, and sets `model.engine` for them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.checkpoint_files import read_config, text_settings
from baton.config import Config
from baton.errors import ConfigError, UnsupportedModel
from baton.messages import WorkerRole
from engine.device.gpus import VisibleGpus, resolve_device
from engine.engine import quantization_lack
from engine.models.config import load_spec
from engine.vllm_runner.drafts import settings_lack
from engine.vllm_runner.requirements import (
    Installation,
    adapters_lack,
    degrees_lack,
    problem,
    proposals_lack,
    setting_that_needs_vllm,
)

Name = Literal["native", "vllm"]


@dataclass(frozen=True)
class EngineFacts:
    """What the rule looks at. A lack says why an engine can't serve the model on this device; "" means that it can."""

    setting: Literal["auto", "native", "vllm"]
    native_lack: str
    vllm_lack: str
    on_gpu: bool


@dataclass(frozen=True)
class EngineChoice:
    """The engine, None if none can serve the model; and why."""

    engine: Name | None
    why: str


def choose(facts: EngineFacts) -> EngineChoice:
    """Apply the rule."""
    lacks: Mapping[Name, str] = {"native": facts.native_lack, "vllm": facts.vllm_lack}
    titles: Mapping[Name, str] = {"native": "our own engine", "vllm": "vLLM's runner"}
    if facts.setting != "auto":
        lack = lacks[facts.setting]
        return (
            EngineChoice(None, f"{titles[facts.setting]} can't: {lack}")
            if lack
            else EngineChoice(facts.setting, f"model.engine is {facts.setting}")
        )
    first: Name = "vllm" if facts.on_gpu else "native"
    second: Name = "native" if facts.on_gpu else "vllm"
    if not lacks[first]:
        why = "it has the kernels for GPUs" if facts.on_gpu else "it is exact and fast on a CPU"
        return EngineChoice(first, f"{titles[first]} can serve the model, and {why}")
    if not lacks[second]:
        return EngineChoice(second, f"{titles[first]} can't: {lacks[first]}")
    return EngineChoice(None, f"our own engine can't: {facts.native_lack}; vLLM's runner can't: {facts.vllm_lack}")


def engine_facts(config: Config, path: Path, devices: Collection[str], vllm: Installation | None) -> EngineFacts:
    """Read the config of the checkpoint in `path` and return the facts. `devices`, of all roles: "cpu" or CUDA devices.

    Raises ModelError for a checkpoint without a readable config, ConfigError for sequences longer than its context.
    """
    # Workers of both roles have one engine: pages of two engines never meet.
    ranks = max(config.stage_ranks_of("prefill"), config.stage_ranks_of("decode"))
    stages = max(config.stages_of("prefill"), config.stages_of("decode"))
    raw, model = read_config(path), config.model
    context = text_settings(raw).get("max_position_embeddings")
    if isinstance(context, int) and model.max_model_len > context:
        longer = f"model.max_model_len is {model.max_model_len} and the checkpoint's context is {context} tokens"
        raise ConfigError(f"{longer} (max_position_embeddings): lower it")
    own = (ranks, model.kv_cache_dtype, model.quantization, model.enable_expert_parallel, model.dtype, stages)
    lacks = [problem(vllm, raw, config.pages.page_size, device, *own) for device in devices]
    if model.lora_modules or model.max_loras:
        lacks += [adapters_lack(text_settings(raw), device) for device in devices]
    lack = next(filter(None, [*lacks, degrees_lack(text_settings(raw), config)]), "")
    if context is None and not model.max_model_len:
        lack = lack or "config.json names no context (max_position_embeddings): set model.max_model_len"
    if len({device.partition(":")[0] for device in devices}) > 1:
        lack = lack or "its pages on a GPU have another form than those on a CPU, and roles differ in their devices"
    if config.pages.recompute_share:
        lack = lack or "pages.recompute_share is set, and only our own engine compares pages"
    native, on_gpu = _setting_lack(config) or native_lack(path, config, devices), set(devices) != {"cpu"}
    if model.speculation_heads:
        lack = lack or "model.speculation_heads is set, and only our own engine has heads; leave it out"
    drafters = ("draft_model", "speculation_heads", "speculative_config")
    named = next((name for name in drafters if getattr(model, name)), "")
    if model.speculation == "ngram" or named:
        setting = f"model.{named} is set" if named else "model.speculation is ngram"
        remedy = "leave it out" if named else "set it to auto"
        exact = model.numerics == "exact"
        unverified = proposals_lack(text_settings(raw), on_gpu=on_gpu, exact=exact, stages=stages)
        if model.speculative_config:
            unverified = unverified or settings_lack(model, ranks)
        lack = lack or (f"{setting}, and {unverified}; {remedy}" if unverified else "")
        unverified = f"{setting}, and of our own kernels only those for CPUs verify proposals; {remedy}"
        native = native or (unverified if on_gpu or not model.native else "")
    return EngineFacts(model.engine, native, lack, on_gpu=on_gpu)


def _setting_lack(config: Config) -> str:
    """Return which setting our own engine can't honour; "" if there is none."""
    setting = setting_that_needs_vllm(config)
    return f"{setting}, and only vLLM's runner has that" if setting else ""


def native_lack(path: Path, config: Config, devices: Collection[str]) -> str:
    """Return why our own engine can't serve the checkpoint on these devices; "" if it can. Raises ModelError for one
    that makes no sense."""
    model = config.model
    try:
        spec = load_spec(path)
    except UnsupportedModel as error:
        return str(error)
    lacks = (quantization_lack(spec, device, model.dtype, model.native, model.quantization) for device in devices)
    return next(filter(None, lacks), "")


def devices_of(config: Config, gpus: VisibleGpus) -> Mapping[WorkerRole, str]:
    """Return the devices of the roles that the cluster begins with, as they are on this machine. A CUDA device need not
    be here: workers of that role may run elsewhere."""
    roles: Sequence[WorkerRole] = ("prefill", "decode") if config.cluster.prefill else ("decode",)
    devices: dict[WorkerRole, str] = {role: config.device_of(role) for role in roles}
    return {role: resolve_device(each, gpus) if each == "auto" else each for role, each in devices.items()}


def engine_of(config: Config, path: Path, devices: Collection[str]) -> EngineChoice:
    """Return the engine that serves the checkpoint in `path` on these devices. Raises UnsupportedModel if none can,
    ConfigError if vLLM's runner can't and `model.engine` or another setting asks for it."""
    choice = choose(engine_facts(config, path, devices, Installation.find()))
    if choice.engine is None:
        if config.model.engine == "vllm" or config.model.quantization or _setting_lack(config):
            raise ConfigError(f"model.engine is {config.model.engine}, and {choice.why}")
        raise UnsupportedModel(choice.why)
    return choice
