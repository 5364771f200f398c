"""LoRA adapters on disk: what is refused before vLLM sees it, and what a digest depends on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import CorruptWeights, ModelError, ModelNotFound, UnsupportedModel
from deploy.control_plane import preflight
from engine.vllm_runner.adapters import load_adapters
from tests.support import adapters, checkpoints

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model.model.layers.0."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("model"))


def digest(model: Path, path: Path) -> str:
    (adapter,) = load_adapters(model, {"one": str(path)}, 16)
    return adapter.card.digest


def test_the_digest_is_that_of_what_is_computed(model: Path, tmp_path: Path):
    first = adapters.make(tmp_path / "first", model, 1)
    copy = shutil.copytree(first, tmp_path / "copy")
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    others = [
        adapters.make(tmp_path / "seed", model, 2),
        adapters.make(tmp_path / "alpha", model, 1, lora_alpha=8),
        adapters.make(tmp_path / "rank-stable", model, 1, use_rslora=True),
    ]
    assert digest(model, first) == digest(model, copy)
    assert len({digest(model, path) for path in (first, *others)}) == 4
    loaded = load_adapters(model, {"b": str(first), "a": str(copy)}, 16)
    assert [(one.card.name, one.rank) for one in loaded] == [("a", 8), ("b", 8)]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "IA3"),
        ({"bias": "all"}, UnsupportedModel, "bias"),
        ({"use_dora": True}, UnsupportedModel, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, UnsupportedModel, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, UnsupportedModel, "pissa"),
        ({"r": 0}, ModelError, "r is 0"),
        ({"r": "8"}, ModelError, "r is '8'"),
        ({"lora_alpha": None}, ModelError, "lora_alpha"),
        ({"r": 17}, UnsupportedModel, r"rank is 17 and model\.max_lora_rank is 16"),
        ({"r": 4}, CorruptWeights, "its rank is 4"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, Any], error: type[ModelError], says: str, model: Path, tmp_path: Path
):
    adapters.make(tmp_path, model, 1, **settings)
    with pytest.raises(error, match=says) as raised:
        load_adapters(model, {"one": str(tmp_path)}, 16)
    assert "LoRA adapter 'one'" in str(raised.value)


def test_a_product_whose_numbers_are_packed_has_another_shape(model: Path, tmp_path: Path):
    """As in NVFP4: two numbers of a row share a byte."""
    path = adapters.make(tmp_path / "adapter", model, 1)
    copy = shutil.copytree(model, tmp_path / "packed")
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj." in name:
            tensors[name] = torch.zeros(tensor.shape[0], tensor.shape[1] // 2, dtype=torch.uint8)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert digest(copy, path) == digest(model, path)


def without_b(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}self_attn.q_proj.lora_B.weight"]


def transposed(tensors: Tensors) -> None:
    name = f"{PREFIX}self_attn.q_proj.lora_A.weight"
    tensors[name] = tensors[name].T.contiguous()


def narrow(tensors: Tensors) -> None:
    name = f"{PREFIX}self_attn.k_proj.lora_B.weight"
    tensors[name] = tensors[name][:-1].contiguous()


def of_no_layer(tensors: Tensors) -> None:
    for side in "AB":
        tensors[f"base_model.model.model.layers.9.self_attn.q_proj.lora_{side}.weight"] = torch.ones(8, 8)


def of_the_head(tensors: Tensors) -> None:
    for side in "AB":
        tensors[f"base_model.model.lm_head.lora_{side}.weight"] = torch.ones(8, 8)


def of_the_embedding(tensors: Tensors) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(8, 8)


def with_a_whole_weight(tensors: Tensors) -> None:
    tensors[f"{PREFIX}self_attn.q_proj.weight"] = torch.ones(64, 64)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (without_b, CorruptWeights, r"q_proj has A \[8, 64\] and B \[\]"),
        (transposed, CorruptWeights, "rank is 8"),
        (narrow, CorruptWeights, r"\[31, 64\] and the model \[32, 64\]"),
        (of_no_layer, CorruptWeights, r"layers\.9.* does not have"),
        (of_the_head, UnsupportedModel, "lm_head"),
        (of_the_embedding, UnsupportedModel, "embed_tokens"),
        (with_a_whole_weight, UnsupportedModel, "neither A nor B"),
        (dict.clear, CorruptWeights, "empty"),
    ],
)
def test_tensors_that_are_refused(
    change: Callable[[Tensors], None], error: type[ModelError], says: str, model: Path, tmp_path: Path
):
    file = adapters.make(tmp_path, model, 1) / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(error, match=says):
        load_adapters(model, {"one": str(tmp_path)}, 16)


def test_adapters_of_experts_on_a_cpu(tmp_path: Path):
    mixture = checkpoints.make("mixtral", tmp_path / "model")
    modules = {"one": str(adapters.make(tmp_path / "adapter", mixture, 1))}
    with pytest.raises(UnsupportedModel, match="Triton"):
        load_adapters(mixture, modules, 16, "cpu")
    assert load_adapters(mixture, modules, 16, "cuda")


def test_pickled_and_missing_adapters_are_refused_before_a_cluster_starts(model: Path, tmp_path: Path):
    adapters.make(tmp_path, model, 1)
    modules = {"one": str(tmp_path)}
    preflight.check_adapters(modules)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    for refuse in (lambda: load_adapters(model, modules, 16), lambda: preflight.check_adapters(modules)):
        with pytest.raises(ModelNotFound, match="safetensors"):
            refuse()
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        load_adapters(model, {"one": str(tmp_path / "nowhere")}, 16)
