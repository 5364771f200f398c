"""Loading: every way a checkpoint can be broken has its error, and the fingerprint names exactly what was loaded."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import CorruptWeights, ModelError, ModelNotFound, NotEnoughMemory
from engine.engine import Engine
from engine.models import weights
from engine.step.batch import Chunk, TokenDraw
from tests.support import checkpoints

Checkpoints = Callable[[str], Path]


def load(path: Path, head: bool = True, dtype: str = "auto", num_pages: int = 2) -> Engine:
    return Engine.load(path, dtype, "cpu", num_pages, 16, head, threads=1)


@pytest.fixture
def llama(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


@pytest.fixture
def sharded(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama-sharded"), tmp_path / "sharded"))


def rewrite(path: Path, change: Mapping[str, torch.Tensor | None]) -> None:
    """Save the single file again with some tensors replaced, added or (None) left out."""
    tensors = load_file(path / "model.safetensors") | dict(change)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def edit(path: Path, change: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(change)))


@pytest.mark.parametrize(
    "name", ["llama", "llama-sharded", "llama-bias", "qwen2", "qwen3", "phi3", "gemma3", "mixtral", "qwen3-moe"]
)
def test_both_kinds_of_worker_agree_on_the_fingerprint(name: str, checkpoint: Checkpoints):
    whole, headless = load(checkpoint(name)), load(checkpoint(name), head=False)
    assert len(whole.fingerprint) == 16
    assert whole.fingerprint == headless.fingerprint
    assert whole.fingerprint == load(checkpoint(name), dtype="bfloat16").fingerprint


def test_fingerprints_differ_between_checkpoints(checkpoint: Checkpoints):
    names = ("llama", "llama-sharded", "mistral", "qwen2", "qwen3")
    assert len({load(checkpoint(name)).fingerprint for name in names}) == len(names)


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.3.mlp.up_proj.weight"]
)
@pytest.mark.parametrize("head", [True, False])
def test_one_flipped_bit_changes_the_fingerprint(tensor: str, head: bool, llama: Path):
    before = load(llama, head).fingerprint
    weights = load_file(llama / "model.safetensors")[tensor]
    weights.view(-1).view(torch.int32)[-1] ^= 1
    rewrite(llama, {tensor: weights})
    assert load(llama, head).fingerprint != before


def test_the_fingerprint_covers_the_config(llama: Path):
    before = load(llama).fingerprint
    edit(llama / "config.json", {"rms_norm_eps": 1e-3})
    assert load(llama).fingerprint != before


def test_the_fingerprint_is_that_of_the_content_not_of_the_files(sharded: Path, tmp_path: Path):
    before = load(sharded).fingerprint
    tensors: dict[str, torch.Tensor] = {}
    for shard in sharded.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (sharded / "model.safetensors.index.json").unlink()
    save_file(tensors, sharded / "model.safetensors")
    assert load(sharded).fingerprint == before


def test_a_prefill_worker_keeps_no_head(checkpoint: Checkpoints):
    weights = load(checkpoint("llama-sharded"), head=False)._model._weights
    assert weights.head is None
    assert weights.norm is None
    assert len(weights.layers) == 3


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("kind", ["copy", "other head", "head alone", "left over"])
def test_tensors_that_transformers_welcomes_are_read_as_it_reads_them(
    kind: str, llama: Path, caplog: pytest.LogCaptureFixture
):
    """The checkpoint's config says that embedding and output head are one."""
    embedding = load_file(llama / "model.safetensors")[EMBEDDING]
    changes: Mapping[str, Mapping[str, torch.Tensor | None]] = {
        "copy": {HEAD: embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        "other head": {HEAD: embedding.flip(0).contiguous()},
        "head alone": {HEAD: embedding, EMBEDDING: None},
        "left over": {"model.layers.1.self_attn.q_proj.bias": torch.ones(64), "visual.x": torch.ones(2)},
    }
    rewrite(llama, changes[kind])
    prompt = [5, 9, 2, 77, 41, 3]
    engine = load(llama)
    theirs = checkpoints.reference(llama).logits(prompt)[-1]
    (chosen,) = engine.step([Chunk(prompt, 0, [0], TokenDraw(temperature=0, logprobs=20))])
    assert chosen is not None
    best = theirs.log_softmax(-1).topk(20)
    assert chosen.token == int(best.indices[0])
    assert [token for token, _ in chosen.top] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor([value for _, value in chosen.top]), best.values, atol=1e-3, rtol=1e-3)
    says = {"other head": "tie_word_embeddings", "left over": "2 tensors"}.get(kind)
    notes = [record.message for record in caplog.records if record.name == weights.__name__]
    assert [says in note for note in notes] == ([True] if says else [])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({"model.layers.3.self_attn.q_proj.weight": None}, "model.layers.3.self_attn.q_proj.weight"),
        ({"model.norm.weight": torch.ones(65)}, r"model.norm.weight has shape \[65\], its config says \[64\]"),
        ({EMBEDDING: None}, EMBEDDING),
        ({HEAD: torch.ones(999, 64)}, r"lm_head.weight has shape \[999, 64\]"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int32)}, "is I32; known: F32, BF16, F16"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.float64)}, "is F64"),
    ],
)
@pytest.mark.parametrize("head", [True, False])
def test_tensors_that_the_config_does_not_ask_for(
    change: dict[str, torch.Tensor | None], named: str, head: bool, llama: Path
):
    rewrite(llama, change)
    with pytest.raises(CorruptWeights, match=named):
        load(llama, head)


@pytest.mark.parametrize("left", [0, 4, 100, 50_000, b"\x80\x04pickle", b"\xff" * 4096, b"<html>not found</html>" * 9])
def test_a_file_that_is_truncated_or_no_safetensors(left: int | bytes, llama: Path):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left] if isinstance(left, int) else left)
    with pytest.raises(CorruptWeights, match=r"model\.safetensors"):
        load(llama)


def test_a_file_that_is_cut_names_the_first_tensor_that_is_not_whole(llama: Path):
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    second = sorted(begin + one["data_offsets"][1] for name, one in header.items() if name != "__metadata__")[1]
    (name,) = (name for name, one in header.items() if begin + one.get("data_offsets", (0, 0))[1] == second)
    file.write_bytes(whole[: second - 1])
    with pytest.raises(
        CorruptWeights, match=rf"can't be read: {name} ends at byte {second:,} of {second - 1:,}; fetch"
    ):
        load(llama)


def test_no_safetensors_at_all(llama: Path):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="pickled"):
        load(llama)


def test_a_missing_shard(sharded: Path):
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CorruptWeights, match=shard.name):
        load(sharded)


NORM = "model.norm.weight"


@pytest.mark.parametrize("weight_map", [{NORM: "../elsewhere.safetensors"}, {NORM: "/etc/passwd"}, [NORM], None])
def test_an_index_that_can_not_be_trusted(weight_map: object, sharded: Path):
    edit(sharded / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CorruptWeights, match=r"model\.safetensors\.index\.json"):
        load(sharded)


def test_an_index_that_promises_too_much(sharded: Path):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, {"weight_map": weight_map | {"model.extra": next(iter(weight_map.values()))}})
    with pytest.raises(CorruptWeights, match=r"model\.extra"):
        load(sharded)


def test_an_unknown_dtype(checkpoint: Checkpoints):
    with pytest.raises(ModelError, match="int4"):
        load(checkpoint("llama"), dtype="int4")


def test_a_pool_that_does_not_fit(checkpoint: Checkpoints):
    with pytest.raises(NotEnoughMemory, match="pages"):
        load(checkpoint("llama"), num_pages=2**40)


def test_pages_for_a_budget(checkpoint: Checkpoints):
    layout = load(checkpoint("llama")).layout
    assert Engine.pages_for(layout.page_bytes * 3 + 1, layout) == 3
    assert Engine.pages_for(layout.page_bytes - 1, layout) == 0
