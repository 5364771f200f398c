"""Mixtral: Mistral with a mixture of experts in every layer, whose router's weights are normalised after the choice."""

from engine.models.config_file import ConfigFile
from engine.models.families.family import Family, TensorNames
from engine.spec import ExpertsSpec, ModelSpec


def read_model(config: ConfigFile) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    head_dim = config.head_dim()
    experts = ExpertsSpec(
        count=config.count("num_local_experts", 8),
        top_k=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        renormalise=True,
    )
    # transformers 5 means 10⁶ where a config names no theta.
    layers = config.layers(config.rope(head_dim, theta=1e6), config.window_everywhere(), experts)
    return config.model("mixtral", layers, head_dim=head_dim)


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    read_model,
    TensorNames(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}", expert_products=("w1", "w3", "w2")
    ),
)
