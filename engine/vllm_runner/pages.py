"""What pages on vLLM's runner hold, from a checkpoint's config: K and V in the model's dtype, or in FP8.

vLLM's kernels write FP8 pages as K and V divided by two scales of the layer, and multiply with these when they read. A
checkpoint may bring the scales (`k_scale`, `v_scale`). They are tensors of it, so its digest in page keys covers them.
Without them they are 1. Nothing of vLLM or torch is imported here.
"""

# pyright: strict

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from baton.errors import ModelError
from engine.models.config_file import DTYPES, ConfigFile
from kvstore.layout import DTYPE_BYTES, INT8, LATENT, STATES, PageLayout

FP8: Mapping[str, str] = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""The values of `model.kv_cache_dtype` for FP8, each with the dtype of vLLM's pages."""

STATES_ON_CPU = "recurrent states are kept on a CPU only"

_MOST_GROUPS = 64
"""Groups that the layers of a model are divided into, where all keep states."""
_CPU_FLAGS = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"))
"""What torch calls AVX-512, as the kernel names it. vLLM computes with FP8 pages on no lesser CPU."""
_DELTA_HEADS = (64, 128)
"""Sizes of a gated delta net's heads that its kernel for CPUs was compiled for."""
_CPU_LATENT = 576
"""The elements of a latent with its rotated part: 512 and 64."""
_CPU_HEAD = 32
"""The elements of a head are a multiple of this on a CPU."""


def vllm_kv_dtype(config: Mapping[str, Any], kv_cache_dtype: str) -> str:
    """Return the `kv_cache_dtype` for vLLM. By "auto" that is FP8 where the checkpoint was quantized for it."""
    return "fp8" if kv_cache_dtype == "auto" and _scheme(config) else kv_cache_dtype


def largest_page(
    config: Mapping[str, Any], dtype: str, page_size: int, kv_cache_dtype: str, ranks: int = 1
) -> PageLayout:
    """Return the page of a model with the sizes that all configs name alike, computed in `dtype` by so many ranks.

    Raises ModelError for a config without them, a dtype that no model is computed in, and latents in int8.
    """
    own = ConfigFile(config)
    if dtype == "auto":
        dtype = str(config.get("dtype", config.get("torch_dtype")) or "float32")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}; set model.dtype to one")
    chosen = vllm_kv_dtype(config, kv_cache_dtype)
    held = dtype if chosen == "auto" else FP8.get(chosen, chosen)
    if width := latent_width(config):
        if held == INT8:
            raise ModelError("latents (MLA) are not kept in int8: set model.kv_cache_dtype to auto")
        return PageLayout(own.count("num_hidden_layers"), 1, width, page_size, held, LATENT)
    if states_only(config):
        elements = state_bytes(config, dtype, ranks) // (ranks * DTYPE_BYTES[dtype])
        return PageLayout(own.count("num_hidden_layers"), ranks, elements, page_size, dtype, STATES)
    heads = own.count("num_key_value_heads", own.count("num_attention_heads"))
    return PageLayout(own.count("num_hidden_layers"), heads, own.head_dim(), page_size, held)


def latent_width(config: Mapping[str, Any]) -> int:
    """Return the elements that a layer with latent attention (MLA) keeps of a token: the latent and the rotated part of
    a key. 0 for other models. Raises ModelError for sizes that are none."""
    own = ConfigFile(config)
    return own.count("kv_lora_rank") + own.count("qk_rope_head_dim") if own.has("kv_lora_rank") else 0


def lacks_for_latents(config: Mapping[str, Any], device: str, kv_cache_dtype: str) -> Iterator[str]:
    """Say why vLLM's runner can't hold the latents of a model. On a GPU which kernels there are is vLLM's to say."""
    if device != "cpu":
        return
    if (width := latent_width(config)) != _CPU_LATENT:
        yield f"its kernel for latents (MLA) on CPUs takes {_CPU_LATENT} elements of a token, not {width}"
    if config.get("index_topk"):
        yield "its sparse attention (index_topk) has no kernel for CPUs"
    if vllm_kv_dtype(config, kv_cache_dtype) != "auto":
        yield "its kernel for latents (MLA) on CPUs takes the model's dtype only: set model.kv_cache_dtype to auto"


class _State(NamedTuple):
    """A layer's state, of all ranks together."""

    convolution: int  # elements in the model's dtype
    recurrent: int  # elements in float32
    divided: tuple[int, ...]  # how many there are of each thing that ranks share


def _granite_state(own: ConfigFile, ranks: int) -> _State:
    heads, size, groups = own.count("mamba_n_heads"), own.count("mamba_d_state"), own.count("mamba_n_groups", 1)
    inner = own.count("mamba_expand", 2) * own.count("hidden_size")
    return _mamba_state(inner, heads, size, groups, own.count("mamba_d_conv", 4), ranks)


def _mamba2_state(own: ConfigFile, ranks: int) -> _State:
    heads, size, groups = own.count("num_heads", 128), own.count("state_size", 128), own.count("n_groups", 8)
    inner = heads * own.count("head_dim", 64)
    return _mamba_state(inner, heads, size, groups, own.count("conv_kernel", 4), ranks)


def _mamba_state(inner: int, heads: int, size: int, groups: int, kernel: int, ranks: int) -> _State:
    """Each rank has a single group whole."""
    divided = (heads,) if groups == 1 else (heads, groups)
    return _State((kernel - 1) * (inner + 2 * max(groups, ranks) * size), inner // heads * heads * size, divided)


def _gated_delta_state(own: ConfigFile, ranks: int) -> _State:
    keys, values = own.count("linear_num_key_heads", 16), own.count("linear_num_value_heads", 32)
    key, value = own.count("linear_key_head_dim", 128), own.count("linear_value_head_dim", 128)
    convolved = 2 * keys * key + values * value
    return _State((own.count("linear_conv_kernel_dim", 4) - 1) * convolved, values * key * value, (keys, values))


_STATES: Mapping[str, Callable[[ConfigFile, int], _State]] = {
    "granitemoehybrid": _granite_state,
    "mamba2": _mamba2_state,
    "qwen3_next": _gated_delta_state,
}
"""By the `model_type` of models with recurrent states that were tried: a layer's state for so many ranks."""


def has_states(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in _STATES


def states_only(config: Mapping[str, Any]) -> bool:
    """Whether all of its layers do."""
    return config.get("model_type") == "mamba2"


def attending_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers of a model with states attend, and keep K and V. Raises ModelError for sizes that are
    none."""
    own, kinds = ConfigFile(config), config.get("layer_types")
    if not kinds and config["model_type"] == "qwen3_next":
        return own.count("num_hidden_layers") // own.count("full_attention_interval", 4)
    return sum(kind in ("attention", "full_attention") for kind in kinds or ())


def group_layers(layers: int) -> int:
    """Return how many layers of a model whose layers all keep states share a page. The fewer they are, the less a
    hand-off carries beside the last state: of each page, the states of one group."""
    return next(size for size in range(1, layers + 1) if layers % size == 0 and layers // size <= _MOST_GROUPS)


def state_bytes(config: Mapping[str, Any], dtype: str, ranks: int = 1) -> int:
    """Return the bytes of a layer's state on all ranks of a model that is computed in `dtype`. Raises ModelError for
    sizes that are none."""
    state = _STATES[config["model_type"]](ConfigFile(config), ranks)
    return state.convolution * DTYPE_BYTES[dtype] + state.recurrent * DTYPE_BYTES["float32"]


def state_tokens(config: Mapping[str, Any], dtype: str, ranks: int = 1) -> int:
    """Return the fewest tokens whose K and V in a layer, computed in `dtype`, take as many bytes as a state, 0 for
    models without states and for those that keep no K and V. Raises ModelError for sizes that are none."""
    if not has_states(config) or states_only(config):
        return 0
    page = largest_page(config, dtype, 1, "auto")
    return -(-state_bytes(config, page.dtype, ranks) * page.num_layers // page.page_bytes)


def lacks_for_states(
    config: Mapping[str, Any], device: str, ranks: int, stages: int, kv_cache_dtype: str, dtype: str, cpu: str
) -> Iterator[str]:
    """Say why vLLM's runner can't keep the recurrent states of a model. `cpu` describes the CPU, its flags as words.
    Raises ModelError for sizes that are none."""
    own, delta = ConfigFile(config), config["model_type"] == "qwen3_next"
    layers = own.count("num_hidden_layers")
    if device != "cpu":
        yield STATES_ON_CPU
    divided = _STATES[config["model_type"]](own, ranks).divided
    if uneven := [count for count in divided if count % ranks]:
        yield f"{uneven[0]} heads of states can't be shared evenly by {ranks} ranks: lower tensor_parallel_size"
    if stages > 1:
        yield "recurrent states are not divided by stages: set pipeline_parallel_size to 1"
    if vllm_kv_dtype(config, kv_cache_dtype) != "auto":
        yield "recurrent states stand beside pages in the model's dtype only: set model.kv_cache_dtype to auto"
    if states_only(config):
        if layers == group_layers(layers):
            yield f"its {layers} layers can't be divided into 2 to {_MOST_GROUPS} equal groups"
        return
    if delta and device == "cpu":
        yield from _lacks_for_delta(own, largest_page(config, dtype, 1, "auto").dtype, cpu)
    attending = attending_layers(config)
    if not attending or layers % attending or layers < 2 * attending:
        yield f"layers with recurrent states must be a multiple of those with attention: {attending} of {layers}"


def _lacks_for_delta(own: ConfigFile, dtype: str, cpu: str) -> Iterator[str]:
    """Say why vLLM's kernel for CPUs can't compute gated delta nets."""
    kernel = "its kernel for gated delta nets on CPUs"
    if dtype != "bfloat16":
        yield f"{kernel} takes bfloat16 only, not {dtype}: set model.dtype to bfloat16"
    if "avx512_bf16" not in cpu.split():
        yield f"{kernel} was tried with AVX512-BF16 only, which this one does not have"
    heads = key, value = own.count("linear_key_head_dim", 128), own.count("linear_value_head_dim", 128)
    if key != value or key not in _DELTA_HEADS:
        yield f"{kernel} takes heads of {' or '.join(map(str, _DELTA_HEADS))} elements, keys' as values', not {heads}"


def lacks(
    config: Mapping[str, Any], head_dim: int | None, device: str, ranks: int, kv_cache_dtype: str, cpu: str
) -> Iterator[str]:
    """Say why vLLM's runner can't hold the pages that are asked for. `cpu` describes the CPU, its flags as words;
    `head_dim` is None where the config does not tell."""
    chosen = vllm_kv_dtype(config, kv_cache_dtype)
    if chosen == "auto":
        return
    if chosen not in FP8:
        yield f"its pages are in the model's dtype or in FP8, and model.kv_cache_dtype is {chosen}: set auto or fp8"
        return
    if device != "cpu":
        return  # which kernels there are is vLLM's to say
    pages = f"FP8 pages, by {'model.kv_cache_dtype' if chosen == kv_cache_dtype else 'the checkpoint'}"
    if not _CPU_FLAGS.issubset(cpu.split()):
        yield f"its kernels take {pages}, on a CPU with AVX-512 only: set model.kv_cache_dtype to auto"
    if head_dim is not None and head_dim % _CPU_HEAD:
        yield f"its kernels take {pages}, with heads of a multiple of {_CPU_HEAD} elements only, not {head_dim}"
    if ranks > 1 and _scheme(config).get("strategy") == "attn_head":
        # vLLM's CPU kernels take the largest scale of a rank's heads, so pages would differ between degrees.
        yield "its kernels for CPUs take one scale for all heads, and several ranks would each choose their own"


def _scheme(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How llm-compressor quantized K and V; empty if it did not."""
    quantization: Mapping[str, Any] = config.get("quantization_config") or {}
    scheme: Any = quantization.get("kv_cache_scheme")
    return cast("Mapping[str, Any]", scheme) if isinstance(scheme, dict) else {}
