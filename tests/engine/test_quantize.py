"""Rounding a checkpoint to 8 and 4 bits: what is written, what is lost, and that it is what is computed with."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton.errors import CorruptWeights, InvalidRequest
from deploy.cli import app
from engine.checkpoint import rounding
from engine.engine import Engine
from engine.models.config import load_spec
from engine.models.quantize import LayerError, quantize
from engine.step.batch import Chunk, TokenDraw
from tests.engine.driver import prompt_of
from tests.support import checkpoints

LOST = {(8, 32): 0.006, (8, 128): 0.008, (4, 32): 0.09, (4, 128): 0.11}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}
    return checkpoints.make("llama", tmp_path_factory.mktemp("plain"), **sizes)


def logits(path: Path, native: bool = True) -> torch.Tensor:
    engine = Engine.load(path, "float32", "cpu", 9, 16, True, threads=1, native=native)
    chunk = Chunk(prompt_of(50), 0, range(4), TokenDraw(temperature=0, logprobs=engine.vocab_size))
    (sampled,) = engine.step([chunk])
    assert sampled is not None
    tokens, values = zip(*sampled.top, strict=True)
    return torch.empty(engine.vocab_size).scatter_(0, torch.tensor(tokens), torch.tensor(values))


@pytest.mark.parametrize(("bits", "group"), LOST)
@pytest.mark.parametrize("head", [False, True])
def test_a_rounded_checkpoint_is_near_the_plain_one(bits: int, group: int, head: bool, model: Path, tmp_path: Path):
    errors: list[LayerError] = []
    quantize(model, tmp_path / "out", bits, group, head, errors.append)
    spec = load_spec(tmp_path / "out")
    assert [error.layer for error in errors] == [*range(spec.num_layers), *([None] if head else [])]
    assert all(0 < error.mean <= error.worst < LOST[bits, group] for error in errors)
    assert (spec.stored.bits, spec.stored.group, spec.tied_embeddings) == (bits, group, not head)
    plain, ours = logits(model), logits(tmp_path / "out")
    assert (ours - plain).square().mean().sqrt() < 8 * LOST[bits, group] * plain.std()
    assert not torch.equal(ours, plain)


def test_all_else_stays_as_it_is(model: Path, tmp_path: Path):
    quantize(model, tmp_path / "out", 4, 32, False, lambda _: None)
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    others = {name for name in before if "_proj." not in name}
    assert others == before.keys() & after.keys()
    assert all(torch.equal(before[name], after[name]) for name in others)
    for file in model.glob("*.json"):
        if file.name != "config.json":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_a_checkpoint_of_few_bits_can_be_rounded_again(model: Path, tmp_path: Path):
    quantize(model, tmp_path / "int8", 8, 32, True, lambda _: None)
    quantize(tmp_path / "int8", tmp_path / "int4", 4, 32, True, lambda _: None)
    plain = logits(model)
    assert (logits(tmp_path / "int4") - plain).square().mean().sqrt() < 0.5 * plain.std()


def test_a_rounded_checkpoint_has_as_many_parameters(model: Path, tmp_path: Path):
    quantize(model, tmp_path / "out", 4, 32, False, lambda _: None)
    counts = set[int]()
    for path in (model, tmp_path / "out"):
        answer = CliRunner().invoke(app, ["size", str(path), "--context", "64", "--memory", "1GiB", "--json"])
        counts.add(json.loads(answer.stdout)["parameters"])
    assert counts == {sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())}


def test_products_that_make_no_whole_groups_stay_plain(tmp_path: Path):
    path = checkpoints.make("llama", tmp_path / "plain", hidden_size=64, head_dim=16, intermediate_size=160)
    quantize(path, tmp_path / "out", 4, 64, False, lambda _: None)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight" in tensors
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "out", native=False), atol=1e-3, rtol=1e-3)


def test_products_that_stay_plain_are_told_and_have_no_part_in_the_mean(tmp_path: Path):
    path = checkpoints.make("llama", tmp_path / "plain", hidden_size=64, head_dim=16, intermediate_size=256)
    result = CliRunner().invoke(app, ["quantize", str(path), "--format", "int4", "--head", "-o", str(tmp_path / "out")])
    layers = [line for line in result.stdout.splitlines() if ": error " in line]
    assert len(layers) == load_spec(path).num_layers  # none of the head
    for line in layers:
        mean, worst = re.findall(r"([\d.]+)%", line)
        assert mean == worst
        assert "down_proj" in line
    plain, names = len(layers) * 6 + 1, "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, lm_head"
    message = f"{plain} of {len(layers) * 7 + 1} products have no whole groups of 128 inputs and stay plain: {names}"
    assert message in " ".join(result.stdout.split())


def test_a_model_without_whole_groups_is_refused(tmp_path: Path):
    path = checkpoints.make("llama", tmp_path / "plain", hidden_size=64, head_dim=16, intermediate_size=160)
    with pytest.raises(InvalidRequest, match=r"multiple of 128 inputs, but 64, 160: take a smaller group"):
        quantize(path, tmp_path / "out", 4, 128, False, lambda _: None)
    assert not (tmp_path / "out").exists()


def test_experts_are_rounded_and_routers_are_not(checkpoint: Callable[[str], Path], tmp_path: Path):
    quantize(checkpoint("qwen3-moe"), tmp_path / "out", 8, 32, False, lambda _: None)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert any(".experts.0.up_proj.weight_packed" in name for name in names)
    assert any(name.endswith("mlp.gate.weight") for name in names)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "out", native=False), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_search_loses_less_than_the_largest_number_s_scale(bits: int):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    groups = weight.unflatten(1, (-1, 128))
    most = (1 << bits - 1) - 1
    scale = groups.abs().amax(2, keepdim=True) / most
    simple = ((groups / scale).round() * scale - groups).square().sum().sqrt() / weight.square().sum().sqrt()
    result = rounding.rounded(weight, bits, 128)
    assert result.error < simple
    assert result.error == pytest.approx(float((result.groups.dense() - weight).norm() / weight.norm()), rel=1e-3)


def test_an_empty_group_is_zero():
    weight = torch.zeros(4, 64)
    weight[0] = 1
    assert torch.equal(rounding.rounded(weight, 4, 32).groups.dense()[1:], weight[1:])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(number: float, model: Path, tmp_path: Path):
    broken = shutil.copytree(model, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = number
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CorruptWeights, match=r"layers\.1\.mlp\.up_proj has numbers that are not finite"):
        quantize(broken, tmp_path / "out", 8, 32, False, lambda _: None)
    with pytest.raises(CorruptWeights, match=r"up_proj has numbers that are not finite"):
        Engine.load(broken, "float32", "cpu", 9, 16, True, threads=1, quantization="int8")


def test_an_output_that_can_not_be_written_is_named(model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    result = CliRunner().invoke(app, ["quantize", str(model), "-o", str(tmp_path / "file" / "out")])
    assert (result.exit_code, "(invalid_request)" in result.stderr, "File exists" in result.stderr) == (1, True, True)


def test_a_directory_that_is_there_is_left_alone(model: Path, tmp_path: Path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidRequest, match="mine is there already"):
        quantize(model, tmp_path / "mine", 8, 32, False, lambda _: None)


def test_nothing_is_left_of_one_that_fails(model: Path, tmp_path: Path):
    (tmp_path / "broken").mkdir()
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    (tmp_path / "broken" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(Exception, match=r"model\.safetensors"):
        quantize(tmp_path / "broken", tmp_path / "out", 8, 32, False, lambda _: None)
    assert [file.name for file in tmp_path.iterdir()] == ["broken"]
