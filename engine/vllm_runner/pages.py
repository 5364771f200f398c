"""What pages on vLLM's runner hold, from a checkpoint's config: K and V in the model's dtype, or in FP8.

vLLM's kernels write FP8 pages as K and V divided by two scales of the layer, and multiply with these when they read. A
checkpoint may bring the scales (`k_scale`, `v_scale`). They are tensors of it, so its digest in page keys covers them.
Without them they are 1. Nothing of vLLM or torch is imported here.
"""

# pyright: strict

from collections.abc import Iterator, Mapping
from typing import Any

from baton.errors import ModelError
from engine.models.config_file import DTYPES, ConfigFile
from kvstore.layout import DTYPE_BYTES, INT8, LATENT, PageLayout

FP8: Mapping[str, str] = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""The values of `model.kv_cache_dtype` for FP8, each with the dtype of vLLM's pages."""

WITH_STATES = "granitemoehybrid"
"""The `model_type` of models with recurrent states that were tried: Granite 4."""
_CPU_FLAGS = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"))
"""What torch calls AVX-512, as the kernel names it. vLLM computes with FP8 pages on no lesser CPU."""
_CPU_LATENT = 576
"""The elements of a latent with its rotated part: 512 and 64."""
_CPU_HEAD = 32
"""The elements of a head are a multiple of this on a CPU."""


def vllm_kv_dtype(config: Mapping[str, Any], kv_cache_dtype: str) -> str:
    """Return the `kv_cache_dtype` for vLLM. By "auto" that is FP8 where the checkpoint was quantized for it."""
    return "fp8" if kv_cache_dtype == "auto" and _scheme(config) else kv_cache_dtype


def largest_page(config: Mapping[str, Any], dtype: str, page_size: int, kv_cache_dtype: str) -> PageLayout:
    """Return the page of a model with the sizes that all configs name alike, computed in `dtype`.

    Raises ModelError for a config without them, a dtype that no model is computed in, and latents in int8.
    """
    own = ConfigFile(config)
    heads = own.count("num_key_value_heads", own.count("num_attention_heads"))
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


def state_tokens(config: Mapping[str, Any], dtype: str) -> int:
    """Return the fewest tokens whose K and V in a layer, computed in `dtype`, take as many bytes as a Mamba 2 state, 0
    for models without states. A state is in float32, its convolution's part in `dtype`.

    Raises ModelError for sizes that are none.
    """
    if config.get("model_type") != WITH_STATES:
        return 0
    own, width = ConfigFile(config), DTYPE_BYTES[largest_page(config, dtype, 1, "auto").dtype]
    heads, size, groups = own.count("mamba_n_heads"), own.count("mamba_d_state"), own.count("mamba_n_groups", 1)
    inner = own.count("mamba_expand", 2) * own.count("hidden_size")
    convolution = (own.count("mamba_d_conv", 4) - 1) * (inner + 2 * groups * size) * width
    state = convolution + heads * (inner // heads) * size * DTYPE_BYTES["float32"]
    token = 2 * own.count("num_key_value_heads", own.count("num_attention_heads")) * own.head_dim() * width
    return -(-state // token)


def lacks_for_states(
    config: Mapping[str, Any], device: str, ranks: int, stages: int, kv_cache_dtype: str
) -> Iterator[str]:
    """Say why vLLM's runner can't keep the recurrent states of a model."""
    attending = [kind for kind in config.get("layer_types") or () if kind in ("attention", "full_attention")]
    layers = config.get("num_hidden_layers")
    if device != "cpu":
        yield "recurrent states are kept on a CPU only"
    if ranks > 1:
        yield f"recurrent states are not divided by {ranks} ranks: set tensor_parallel_size to 1"
    if stages > 1:
        yield "recurrent states are not divided by stages: set pipeline_parallel_size to 1"
    if vllm_kv_dtype(config, kv_cache_dtype) != "auto":
        yield "recurrent states stand beside pages in the model's dtype only: set model.kv_cache_dtype to auto"
    if not attending or not isinstance(layers, int) or layers % len(attending) or layers < 2 * len(attending):
        yield f"layers with recurrent states must be a multiple of those with attention: {len(attending)} of {layers}"


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
    return quantization.get("kv_cache_scheme") or {}
