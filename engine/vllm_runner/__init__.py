"""A runner whose model, kernels and weights are vLLM's: its executor and model runner, driven step by step.

vLLM computes. Baton's schedulers decide each step, Baton's pages hold K and V, and Baton's sampler draws every token.
vLLM runs in a child process of the worker, since a mistake there may end its process. `runner` is the worker's side,
`child` the other; `messages` is what they say to each other. Nothing of vLLM is imported but in the child.
"""

VLLM_VERSION = "0.32.0"
"""The release whose inner interfaces this was written for, and that tests run with."""
VLLM_VERSIONS = (VLLM_VERSION, "0.33.0")
"""The releases that are served. Others are refused. Of the second there is no build for CPUs."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a LoRA adapter, as PEFT saves it."""

TESTED_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM",
        "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM",
        "GptOssForCausalLM", "Glm4MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
        "GraniteMoeHybridForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM",
    }
)  # fmt: skip
"""Architectures whose greedy tokens `tests/vllm_runner` compares with transformers'."""
