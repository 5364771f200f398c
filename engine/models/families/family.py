"""What a family's file says: its names, its reader, and its checkpoint's tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.models.config_file import ConfigFile
from engine.spec import ModelSpec

_ATTENTION_AND_MLP: Mapping[tuple[str, ...], str] = {
    ("q",): "self_attn.q_proj",
    ("k",): "self_attn.k_proj",
    ("v",): "self_attn.v_proj",
    ("output",): "self_attn.o_proj",
    ("gate",): "mlp.gate_proj",
    ("up",): "mlp.up_proj",
    ("down",): "mlp.down_proj",
}
_NORMS: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class TensorNames:
    """Where a layer's numbers lie in the checkpoint, below `model.layers.N.`; the defaults are Llama's names.

    A matrix may hold several of a layer's products, whose rows follow one another in the order of the key. `experts` is
    the place of one expert, with a number for the braces, and `expert_products` are its gate, up and down.
    """

    products: Mapping[tuple[str, ...], str] = field(default_factory=lambda: _ATTENTION_AND_MLP)
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    router: str = ""
    experts: str = ""
    expert_products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """A family: `name` is the `model_type` of its configs, `architecture` the class that they name."""

    name: str
    architecture: str
    read: Callable[[ConfigFile], ModelSpec]
    tensors: TensorNames = field(default_factory=TensorNames)
