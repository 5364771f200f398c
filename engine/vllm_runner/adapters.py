"""LoRA adapters on disk, in the format of PEFT: checked before vLLM is told of them, and named by a digest.

Only safetensors are read. An adapter is refused unless vLLM computes it exactly as PEFT does: plain matrices A and B of
one rank, for products of attention and MLP that the checkpoint has.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.checkpoint_files import read_config, read_object
from baton.errors import CorruptWeights, ModelError, ModelNotFound, UnsupportedModel
from baton.messages import AdapterCard
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.vllm_runner import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.vllm_runner.requirements import adapters_lack

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_ABSENT = (
    "alora_invocation_tokens", "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save",
    "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
"""Settings that make more of an adapter than A and B of one rank."""
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the model as they are."""
_ELSEWHERE = ("lm_head", "embed_tokens", "experts")
"""Parts of a module's name for which no adapter is served."""


@dataclass(frozen=True)
class Adapter:
    """A checked adapter in `path`. Page keys and messages name it by the card's digest."""

    card: AdapterCard
    path: Path
    rank: int


def load_adapters(model: Path, modules: Mapping[str, str], max_rank: int, device: str = "cpu") -> tuple[Adapter, ...]:
    """Read and check the adapters in the directories `modules`, by name, for the checkpoint in `model`. Return them in
    the order of their names.

    Raises ModelNotFound, CorruptWeights and UnsupportedModel, each with the adapter's name.
    """
    if not modules:
        return ()
    config = read_config(model)
    if lack := adapters_lack(config, device):
        raise UnsupportedModel(lack)
    with TensorFiles(model) as base:
        return tuple(_checked(name, Path(path).expanduser(), base, max_rank) for name, path in sorted(modules.items()))


def _checked(name: str, path: Path, base: TensorFiles, max_rank: int) -> Adapter:
    try:
        return _read(name, path, base, max_rank)
    except ModelError as error:
        raise type(error)(f"LoRA adapter {name!r} in {path}: {error}") from error


def _read(name: str, path: Path, base: TensorFiles, max_rank: int) -> Adapter:
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelNotFound(f"there is no {ADAPTER_CONFIG}; give the directory of an adapter that PEFT has saved")
    config = read_object(path / ADAPTER_CONFIG)
    rank, alpha = _settings(config, max_rank)
    with TensorFiles(path, ADAPTER_WEIGHTS) as files:
        _check_tensors(files, base, rank)
        numbers = json.dumps({"rank": rank, "alpha": alpha, "rslora": bool(config.get("use_rslora"))}).encode()
        return Adapter(AdapterCard(name, files.fingerprint(numbers).hex(), str(path)), path, rank)


def _settings(config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    """Rank and alpha."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModel(f"peft_type is {kind!r}; only LORA is served")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModel(f"bias is {bias!r}; only none is served")
    if used := [key for key in _ABSENT if config.get(key)]:
        raise UnsupportedModel(f"{', '.join(used)} can't be served; leave it out when you train or convert it")
    if (start := config.get("init_lora_weights")) not in _HARMLESS_STARTS:
        raise UnsupportedModel(f"init_lora_weights is {start!r}, which changes the model itself; convert the adapter")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ModelError(f"{ADAPTER_CONFIG}: r is {rank!r}; it must be a whole number above zero")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise ModelError(f"{ADAPTER_CONFIG}: lora_alpha is {alpha!r}; it must be a number")
    if rank > max_rank:
        raise UnsupportedModel(f"its rank is {rank} and model.max_lora_rank is {max_rank}; raise that")
    return rank, float(alpha)


def _check_tensors(files: TensorFiles, base: TensorFiles, rank: int) -> None:
    """Compare names and shapes with the products of the model."""
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in sorted(files.names):
        if (match := _TENSOR.fullmatch(tensor)) is None:
            raise UnsupportedModel(f"{tensor} is neither A nor B of a product")
        sides.setdefault(match["module"], {})[match["side"]] = files.shape(tensor)
    if not sides:
        raise CorruptWeights(f"{ADAPTER_WEIGHTS} is empty")
    modules = {name.rpartition(".")[0] for name in base.names}
    for module, shapes in sides.items():
        if any(part in _ELSEWHERE for part in module.split(".")):
            raise UnsupportedModel(f"it changes {module}; adapters of embedding, head and experts are not served")
        if module not in modules:
            raise CorruptWeights(f"it changes {module}, which the model does not have")
        a, b = shapes.get("A", ()), shapes.get("B", ())
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise CorruptWeights(f"{module} has A {list(a)} and B {list(b)}; its rank is {rank}")
        weight = f"{module}.weight"
        if weight not in base.names or base.holds_bytes(weight):
            continue  # a quantized product, whose stored shape is not that of its numbers
        if (b[0], a[1]) != base.shape(weight):
            raise CorruptWeights(f"{module} has B·A of [{b[0]}, {a[1]}] and the model {list(base.shape(weight))}")
