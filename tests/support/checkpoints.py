"""Small random checkpoints of each family, made by transformers, and its answers to compare ours with.

`initializer_range` is 0.3: at the usual 0.02, and at this size even at 0.1, such a model repeats one token whatever its
cache holds, and hides errors. What transformers initialises to zero (biases) or to one (norms) is drawn at random, for
the same reason.
"""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils import logging

from tests.support.engines import ENGINE

VOCAB = 1000
EOS = 2
MAX_POSITIONS = 4096

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
_LATENT = {  # the sizes that vLLM's kernel for CPUs takes
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
}
_STATES = {  # of Mamba 2 layers
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.3, 2.0, 3.5, 5.0, 8.0],
}


def _mamba2_config(**sizes: Any) -> hf.PreTrainedConfig:
    """Without the sizes of attention, as checkpoints of Mamba 2 are."""
    return hf.Mamba2Config(**{name: value for name, value in sizes.items() if hasattr(hf.Mamba2Config, name)})


@dataclass(frozen=True)
class Recipe:
    """One kind of checkpoint. `settings` go on top of the common sizes; `norms` is the range of the norms' weights, and
    `score_norms` that of the norms of queries and keys."""

    config: Callable[..., hf.PreTrainedConfig]
    model: type[hf.PreTrainedModel]
    settings: Mapping[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    norms: tuple[float, float] = (0.5, 1.5)
    score_norms: tuple[float, float] = (1.0, 3.0)  # normed scores near zero attend to everything alike


RECIPES: Mapping[str, Recipe] = {
    "llama": Recipe(hf.LlamaConfig, hf.LlamaForCausalLM, {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-sharded": Recipe(hf.LlamaConfig, hf.LlamaForCausalLM, {"tie_word_embeddings": False}, shard_size="200KB"),
    "llama-bias": Recipe(
        hf.LlamaConfig, hf.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}
    ),
    "mistral": Recipe(hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": None, "head_dim": 24}),
    "mistral-window": Recipe(hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 23}),
    "qwen2": Recipe(hf.Qwen2Config, hf.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": Recipe(
        hf.Qwen2Config, hf.Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    ),
    "qwen3": Recipe(hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-linear": Recipe(
        hf.Qwen3Config,
        hf.Qwen3ForCausalLM,
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        },
    ),
    "llama-yarn": Recipe(hf.LlamaConfig, hf.LlamaForCausalLM, {"rope_parameters": _YARN}),
    "llama-dynamic": Recipe(
        hf.LlamaConfig,
        hf.LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "phi3": Recipe(hf.Phi3Config, hf.Phi3ForCausalLM),
    "phi3-longrope": Recipe(
        hf.Phi3Config,
        hf.Phi3ForCausalLM,
        # The long factors are for sequences beyond the original context. transformers uses the short ones below it.
        {"original_max_position_embeddings": 2, "rope_parameters": _LONGROPE, "sliding_window": 23},
    ),
    "gemma3": Recipe(
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        norms=(10.0, 20.0),  # layers must outweigh the embedding, which is scaled up and tied
    ),
    "mixtral": Recipe(hf.MixtralConfig, hf.MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Recipe(
        hf.Qwen3MoeConfig,
        hf.Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}
VLLM_RECIPES: Mapping[str, Recipe] = {
    "gemma2": Recipe(
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        {
            "head_dim": 32,
            "sliding_window": 20,
            # Norms as large as Gemma 3's make scores of 17,000, since queries and keys have no norm. Divided by this
            # they are 7 times the cap at most: enough that the cap decides. See docs/vllm.md for scores beyond 88 caps.
            "query_pre_attn_scalar": 60_000,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 100.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        norms=(10.0, 20.0),
    ),
    "gpt-oss": Recipe(
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        {
            "head_dim": 32,
            "intermediate_size": 192,  # on a CPU vLLM wants a multiple of 32 for each rank
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "olmo2": Recipe(hf.Olmo2Config, hf.Olmo2ForCausalLM),
    "glm4-moe": Recipe(
        hf.Glm4MoeConfig,
        hf.Glm4MoeForCausalLM,
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "deepseek-v2": Recipe(
        hf.DeepseekV2Config,
        hf.DeepseekV2ForCausalLM,
        {**_LATENT, "head_dim": 64, "topk_method": "greedy", "topk_group": 1},
    ),
    "deepseek-v3": Recipe(
        hf.DeepseekV3Config,
        hf.DeepseekV3ForCausalLM,
        {
            **_LATENT,
            "topk_method": "noaux_tc",  # transformers writes neither this nor the next, and vLLM reads both
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {**_YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "granite4": Recipe(
        hf.GraniteMoeHybridConfig,
        hf.GraniteMoeHybridForCausalLM,
        {
            **_STATES,
            "hidden_size": 128,
            "initializer_range": 0.1,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 160,
            "position_embedding_type": "rope",
        },
    ),
    "mamba2": Recipe(
        _mamba2_config,
        hf.Mamba2ForCausalLM,
        {
            "hidden_size": 128,
            "initializer_range": 0.1,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "qwen3-next": Recipe(
        hf.Qwen3NextConfig,
        hf.Qwen3NextForCausalLM,
        {
            "hidden_size": 128,
            "initializer_range": 0.1,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 32,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 4,  # all: in bfloat16 a router that chooses takes other experts than in float32
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "partial_rotary_factor": 0.5,
        },
        norms=(-0.5, 0.5),  # a norm's weight is added to one
        score_norms=(0.0, 1.0),
    ),
}
"""Families that vLLM's runner serves and our own engine does not."""
WIDE: Mapping[str, Any] = {"initializer_range": 0.1, "hidden_size": 256, "intermediate_size": 512, **ENGINE.wide}
"""Settings for a checkpoint that is wide enough to need no larger weights: its output depends on every page too."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "mixtral", "qwen3-moe")


def make(name: str, path: Path, seed: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write the checkpoint of the recipe `name` into `path`: weights, config, tokenizer, generation config.

    `settings` change the config further, so that a benchmark can ask for a larger one.
    """
    recipe = _recipe(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = recipe.model(config(name, **settings))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.uniform_(*recipe.score_norms)
                elif "norm" in parameter_name:
                    parameter.uniform_(*recipe.norms)
    logging.disable_progress_bar()
    model.to(dtype).save_pretrained(path, max_shard_size=recipe.shard_size)
    _tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [EOS]}))
    return path


def config(name: str, **settings: Any) -> hf.PreTrainedConfig:
    """The config of a recipe, with `settings` changed."""
    return _recipe(name).config(**{**_SIZES, **_recipe(name).settings, **ENGINE.checkpoint, **settings})


def _recipe(name: str) -> Recipe:
    return RECIPES.get(name) or VLLM_RECIPES[name]


@lru_cache
def _tokenizer() -> Tokenizer:
    """Byte-level BPE over words made of syllables: enough repetition for merges of every length."""
    rng = random.Random(0)
    syllables = [a + b + c for a in "bcdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(400)]
    corpus = [" ".join(rng.choices(words, k=30)) + "." for _ in range(300)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@dataclass(frozen=True)
class Reference:
    """A checkpoint as transformers runs it, in float32. `cache`, where one is given, makes what holds K and V."""

    model: hf.PreTrainedModel
    cache: Callable[[], hf.Cache | None] = lambda: None

    def _run(self, tokens: torch.Tensor, cache: hf.Cache | None, *, use_cache: bool = True) -> tuple[torch.Tensor, Any]:
        name = "cache_params" if self.model.config.model_type == "mamba2" else "past_key_values"
        output = self.model(tokens, **{name: cache}, use_cache=use_cache)
        return output.logits[0], output.get(name)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] float32."""
        cache = self.cache()
        return self._run(torch.tensor([list(tokens)]), cache, use_cache=cache is not None)[0]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """`count` greedy tokens, past any end-of-sequence token, and for each the gap between the two best logits.

        Where a gap is below 1e-3 another right implementation may choose otherwise.
        """
        tokens: list[int] = []
        gaps: list[float] = []
        step, cache = torch.tensor([list(prompt)]), self.cache()
        for _ in range(count):
            logits, cache = self._run(step, cache)
            (best, second), (token, _) = logits[-1].topk(2)
            tokens.append(int(token))
            gaps.append(float(best - second))
            step = token.view(1, 1)
        return tokens, gaps

    @torch.inference_mode()
    def expert_gap(self, tokens: Sequence[int]) -> float:
        """The smallest gap, at any token in any layer, between the router's logits of the last expert that it takes and
        the first that it leaves. Infinite for a model without experts.

        Routers' logits differ between batches, in float32 by up to 1e-3 (gpt-oss) and 3.5e-4 (Mixtral). Where the gap
        is below that another right implementation may take the other expert, and other tokens follow.
        """
        gaps: list[float] = []

        def look(router: Any, arguments: tuple[torch.Tensor], _: object) -> None:
            states = arguments[0].reshape(-1, arguments[0].shape[-1])
            logits = torch.nn.functional.linear(states, router.weight, getattr(router, "bias", None))
            best = logits.topk(router.top_k + 1).values
            gaps.append(float((best[:, -2] - best[:, -1]).min()))

        routers = [each for each in self.model.modules() if type(each).__name__.endswith("TopKRouter")]
        hooks = [each.register_forward_hook(look) for each in routers]
        self.model(torch.tensor([list(tokens)]))
        for hook in hooks:
            hook.remove()
        return min(gaps, default=math.inf)


def reference(path: Path, name: str = "") -> Reference:
    """Load a checkpoint with transformers, in float32: by the architecture that it names, or as the recipe `name`."""
    raw = json.loads((path / "config.json").read_text())
    named = _recipe(name).model.__name__ if name else raw["architectures"][0]
    model: Callable[..., hf.PreTrainedModel] = next(
        recipe.model for recipe in (*RECIPES.values(), *VLLM_RECIPES.values()) if recipe.model.__name__ == named
    ).from_pretrained
    return Reference(model(path, dtype=torch.float32, attn_implementation="eager").eval())
