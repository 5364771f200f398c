"""`baton size` against the memory that loading a model really takes."""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from deploy.cli import app
from engine.cpu.packed_linear import PackedLinears
from engine.models import mlp
from engine.models.config import parse_spec
from engine.models.linear import Dense, PlainLinears
from engine.models.memory import activation_bytes, weight_bytes
from engine.models.weights import MlpWeights, expected_tensors
from engine.spec import ExpertsSpec, ModelSpec
from tests.engine.test_mlp_experts import expert_layer
from tests.worker.test_engine_choice import GPT_OSS, GRANITE, MAMBA2

WINDOWS = {
    "architectures": ["GptOssForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 70,
}

BASE: dict[str, Any] = {
    "vocab_size": 4_000, "hidden_size": 512, "intermediate_size": 1_400, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4_096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
MODELS = [
    ("LlamaForCausalLM", False, "float32"), ("MistralForCausalLM", False, "bfloat16"),
    ("Qwen2ForCausalLM", True, "bfloat16"), ("Qwen3ForCausalLM", True, "float32"),
]  # fmt: skip
LOADS = """
import sys
from pathlib import Path
import psutil
from engine.engine import Engine
loaded, sizes = [], []
for path in sys.argv[2:]:
    loaded.append(Engine.load(Path(path), sys.argv[1], "cpu", 1, 16, True, 1))
    sizes.append(psutil.Process().memory_full_info().uss)
print(sizes[2] - sizes[1] - (sizes[1] - sizes[0]))
"""


def write(folder: Path, architecture: str, tied: bool, layers: int) -> ModelSpec:
    config = BASE | {"architectures": [architecture], "tie_word_embeddings": tied, "num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = parse_spec(config)
    save_file({name: torch.ones(shape) for name, shape in expected_tensors(spec).items()}, folder / "model.safetensors")
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "tied", "dtype"), MODELS)
def test_the_size_of_weights_is_what_a_process_takes_for_them(
    architecture: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    """Two models that differ in the number of layers: what else a process takes for a model cancels out."""
    small = write(tmp_path / "small", architecture, tied, 2)
    large = write(tmp_path / "large", architecture, tied, 30)  # other memory varies by 1 MB
    argv = [sys.executable, "-c", LOADS, dtype, *(str(tmp_path / name) for name in ("small", "small", "large"))]
    measured = int(subprocess.run(argv, capture_output=True, text=True, timeout=250, check=True).stdout)
    kind = getattr(torch, dtype)
    computed = weight_bytes(large, kind, PackedLinears()) - weight_bytes(small, kind, PackedLinears())
    assert measured == pytest.approx(computed, rel=0.02)


def test_on_a_gpu_nothing_is_padded_and_a_tied_head_is_shared():
    spec = parse_spec(
        BASE | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "num_hidden_layers": 2}
    )
    parameters = sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values())
    assert weight_bytes(spec, torch.float32, PlainLinears()) == parameters * 4
    padded = 2 * 3 * 512 * (-1_400 % 64) * 4  # down, gate and up of both layers
    head = (4_000 + -4_000 % 64) * 512 * 4
    assert weight_bytes(spec, torch.float32, PackedLinears()) >= parameters * 4 + padded + head


def test_experts_take_the_same_in_one_tensor():
    mixture = {"architectures": ["MixtralForCausalLM"], "tie_word_embeddings": False, "num_hidden_layers": 2}
    spec = parse_spec(BASE | mixture | {"num_local_experts": 4, "num_experts_per_tok": 2})
    parameters = sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values())
    assert weight_bytes(spec, torch.bfloat16, PlainLinears()) == parameters * 2


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            if key not in inputs and key not in self._sizes:
                self._sizes[key] = size
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key)
        return result

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


MIXTURES = [  # hidden size, experts
    (4_096, ExpertsSpec(8, 2, 14_336, renormalise=True)), (2_048, ExpertsSpec(128, 8, 768, renormalise=True)),
    (256, ExpertsSpec(16, 3, 96, renormalise=False)),
]  # fmt: skip


@pytest.mark.parametrize("rows", [32, 1_000, 8_192])
@pytest.mark.parametrize(("hidden", "experts"), MIXTURES)
@pytest.mark.parametrize("way", ["groups", "blocks"])
def test_experts_take_what_is_computed(
    way: mlp.Way, hidden: int, experts: ExpertsSpec, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row goes through several experts, and they are multiplied together. Tensors here have no numbers."""
    monkeypatch.setattr(mlp, "_has_kernel", lambda device, dtype: way == "groups")
    kind = torch.bfloat16
    with FakeTensorMode(), torch.inference_mode():
        _, device = expert_layer(experts, hidden, kind)
        x = torch.empty(rows, hidden, dtype=kind)
        with Live() as live:
            mlp.mixed(device, experts, "silu", x)
    assert 0.95 < mlp.mixed_bytes(experts, rows, hidden, kind.itemsize, way) / live.most < 1.3


def test_experts_on_a_host_take_what_is_computed() -> None:
    experts = ExpertsSpec(4, 2, 700, renormalise=True)
    host, _ = expert_layer(experts, 128)
    host.router.zero_()  # so that two experts have all rows
    with torch.inference_mode(), Live() as live:
        mlp.mixed(host, experts, "silu", torch.randn(300, 128))
    assert 0.95 < mlp.mixed_bytes(experts, 300, 128, 4, "host") / live.most < 1.3


def test_a_dense_mlp_takes_what_is_computed() -> None:
    linear = PlainLinears().linear
    dense = MlpWeights(linear(Dense(torch.randn(1_400, 128), None)), linear(Dense(torch.randn(128, 700), None)))
    with torch.inference_mode(), Live() as live:
        mlp.dense(dense, "silu", torch.randn(300, 128))
    assert 0.95 < mlp.dense_bytes(300, 700, 4) / live.most < 1.05


def test_a_step_of_a_mixture_takes_more_on_a_device() -> None:
    """What `baton size` says has room for all assignments of rows to experts."""
    mixture = {"architectures": ["MixtralForCausalLM"], "tie_word_embeddings": False, "num_hidden_layers": 2}
    spec = parse_spec(BASE | mixture | {"num_local_experts": 8, "num_experts_per_tok": 2})
    routed = 4_096 * 2 * (512 + 4 * 1_400) * 2
    host, device = (
        activation_bytes(spec, torch.bfloat16, 4_096, 1, maker) for maker in (PackedLinears(), PlainLinears())
    )
    assert routed < device < 1.3 * routed
    assert routed / 2 < host < device


def test_a_prefill_worker_without_a_head_is_smaller():
    spec = parse_spec(
        BASE | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "num_hidden_layers": 2}
    )
    whole, without = (weight_bytes(spec, torch.float32, PlainLinears(), head=head) for head in (True, False))
    assert whole - without > 4_000 * 512 * 4


def printed(*argv: str) -> str:
    return " ".join(CliRunner().invoke(app, argv).output.split())


def size(*argv: str) -> Any:
    return json.loads(CliRunner().invoke(app, argv).stdout)


def refusal(*argv: str) -> str:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 1
    return result.output


def test_what_fits(tmp_path: Path) -> None:
    write(tmp_path / "model", "LlamaForCausalLM", False, 2)
    argv = ["size", str(tmp_path / "model"), "--context", "1024", "--concurrency", "4", "--device", "cpu", "--json"]
    sizes = size(*argv, "--memory", "1GiB")
    assert sizes["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 4
    assert sizes["decode"]["pages"] == 4 * 1_024 * sizes["kv_bytes_per_token"]
    assert sizes["decode"]["total"] == sum(
        sizes["decode"][part] for part in ("weights", "pages", "activations", "process")
    )
    room = 2**30 - (sizes["decode"]["total"] - sizes["decode"]["pages"])
    assert sizes["fits"] == room // sizes["page_bytes"] // 64
    assert "more than the model's 4096" in refusal("size", str(tmp_path / "model"), "--context", "5000")


def test_what_fits_into_one_of_two_ranks(tmp_path: Path) -> None:
    write(tmp_path / "model", "LlamaForCausalLM", False, 2)
    argv = ["size", str(tmp_path / "model"), "--context", "1024", "--device", "cpu", "--memory", "1GiB", "--json"]
    whole, rank = (size(*argv, "--tensor-parallel-size", ranks) for ranks in ("1", "2"))
    for part in ("weights", "pages"):
        assert rank["decode"][part] * 2 == whole["decode"][part]
    assert rank["decode"]["activations"] == whole["decode"]["activations"]
    assert rank["fits"] > 2 * whole["fits"]
    assert "4 ranks can't share 2 KV heads" in refusal(*argv, "--tensor-parallel-size", "4")


@pytest.mark.parametrize("tied", [False, True])
def test_what_fits_into_the_largest_of_two_stages(tied: bool, tmp_path: Path) -> None:
    """Of five layers the first stage has three. The others' stage has the output head, too."""
    write(tmp_path / "model", "LlamaForCausalLM", tied, 5)
    argv = ["size", str(tmp_path / "model"), "--context", "1024", "--device", "cpu", "--memory", "1GiB", "--json"]
    whole, half, stage, rank = (
        size(*argv, *more)
        for more in (
            [], ["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"],
            ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"],
        )
    )  # fmt: skip
    write(tmp_path / "smaller", "LlamaForCausalLM", tied, 3)
    smaller = size(argv[0], str(tmp_path / "smaller"), *argv[2:])
    layer = (whole["decode"]["weights"] - smaller["decode"]["weights"]) // 2
    assert stage["decode"]["weights"] == 3 * layer + 4_000 * 512 * 4
    assert rank["decode"]["weights"] * 2 == stage["decode"]["weights"]
    assert stage["decode"]["pages"] * 5 == whole["decode"]["pages"] * 3
    assert rank["page_bytes"] * 2 == stage["page_bytes"]
    assert half["pool"] == stage["pool"] == rank["pool"] == whole["pool"] == whole["decode"]["pages"]
    assert (stage["ranks"], rank["ranks"]) == (2, 4)
    assert "6 stages can't share 5 layers" in refusal(*argv, "--pipeline-parallel-size", "6")


def test_what_fits_with_layers_in_groups(tmp_path: Path) -> None:
    """One layer of four attends to all positions, and three to 70: a token sees at most four pages of these."""
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    config = BASE | {
        "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 70,
        "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["size", str(tmp_path), "--device", "cpu", "--memory", "1GiB", "--page-size", "32", "--context", "1024"]
    whole, groups = (size(*argv, "--json", "--engine", engine) for engine in ("native", "vllm"))
    assert groups["page_bytes"] * 4 == whole["page_bytes"]
    assert groups["pages"] == 8 * (32 + 3 * 4)
    assert whole["pages"] == 8 * 32
    assert groups["prefill"]["pages"] == whole["prefill"]["pages"]
    assert groups["fits"] > 2.8 * whole["fits"]
    assert "--engine vllm --set" in printed(*argv, "--engine", "vllm")
    staged = [*argv, "--pipeline-parallel-size", "2"]
    assert "stages don't divide" in printed(*staged)
    assert "on a CPU only" in printed(*staged[:2], "--device", "cuda", *staged[4:])


@pytest.mark.parametrize(
    ("config", "ranks", "token", "page", "pages", "snapshot"),
    [
        (GRANITE, 1, 512, 64 * 512, 16 + 3 * 2, 3 * 64 * 512),
        (GRANITE, 2, 256, 64 * 256, 16 + 3 * 2, 3 * 64 * 256),
        (MAMBA2, 1, 0, 19_840, 16 + 63 * 2, 64 * 19_840),
        (GPT_OSS | WINDOWS, 1, 1024, 65_536, 19, 0),
    ],
    ids=["states", "states of two ranks", "states alone", "groups"],
)
def test_what_fits_of_models_that_vllm_alone_knows(
    config: dict[str, Any], ranks: int, token: int, page: int, pages: int, snapshot: int, tmp_path: Path
) -> None:
    """From config.json, and from the sizes of files. A decode worker keeps two states of a group."""
    more = {"max_position_embeddings": 4096, "num_key_value_heads": config.get("num_key_value_heads", 4)}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    (tmp_path / "model.safetensors").write_bytes(bytes(6_000))
    argv = ["size", str(tmp_path), "--device", "cpu", "--memory", "1GiB", "--context", "1000"]
    argv += ["--tensor-parallel-size", str(ranks)]
    sizes = size(*argv, "--page-size", "64", "--json")
    assert (sizes["kv_bytes_per_token"], sizes["page_bytes"], sizes["snapshot_bytes"]) == (token, page, snapshot)
    assert sizes["pages"] == 8 * pages
    assert sizes["decode"]["pages"] == 8 * pages * page
    assert sizes["pool"] == sizes["decode"]["pages"] * ranks
    assert sizes["decode"]["weights"] * ranks == 6_000
    assert sizes["fits"] == (2**30 - sizes["decode"]["total"] + sizes["decode"]["pages"]) // page // pages
    assert ("of states behind a page" in printed(*argv, "--page-size", "64")) == bool(snapshot)
    assert "--set pages.page_size=" in printed(*argv, "--page-size", "16")


def test_a_draft_is_counted(tmp_path: Path) -> None:
    """Its weights, as its files are large, and what it adds to pages or has for pages of its own."""
    write(tmp_path / "model", "LlamaForCausalLM", False, 2)
    write(tmp_path / "draft", "LlamaForCausalLM", False, 1)
    (tmp_path / "draft" / "model.safetensors").write_bytes(bytes(5_000))
    mtp = BASE | {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "mtp").mkdir()
    (tmp_path / "mtp" / "config.json").write_text(json.dumps(mtp))

    def sizes(model: str, *more: str) -> dict[str, Any]:
        argv = ["size", str(tmp_path / model), "--device", "cpu", "--memory", "1GiB", "--page-size", "32", "--json"]
        return json.loads(CliRunner().invoke(app, [*argv, *more]).stdout)

    def own(method: str, **more: str) -> Sequence[str]:
        return "--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3, **more})

    draft = str(tmp_path / "draft")
    plain, eagle = sizes("model"), sizes("model", *own("eagle", model=draft))
    assert (eagle["vllm"], eagle["page_bytes"] * 2) == (True, plain["page_bytes"] * 3)
    assert (eagle["decode"]["draft"], eagle["prefill"]["draft"]) == (5_000, 5_000)
    assert eagle["decode"]["total"] - plain["decode"]["total"] == 5_000 + plain["decode"]["pages"] // 2
    ours = sizes("model", "--draft-model", draft)
    assert ours["page_bytes"] == plain["page_bytes"]
    assert (ours["decode"]["draft"], ours["prefill"]["draft"]) == (5_000 + plain["decode"]["pages"] // 8, 0)
    assert sizes("model", "--speculation-heads", draft)["decode"]["draft"] == 5_000
    alone, layer = sizes("mtp"), sizes("mtp", *own("mtp"))
    assert layer["page_bytes"] * 2 == alone["page_bytes"] * 3
    assert layer["decode"]["draft"] == 0  # in the files of the model
    argv = ["size", str(tmp_path / "model"), "--device", "cpu", *own("eagle", model=draft)]
    assert "of the draft" in CliRunner().invoke(app, argv).output


def test_what_fits_with_pages_in_fp8(tmp_path: Path) -> None:
    write(tmp_path / "model", "LlamaForCausalLM", False, 2)
    argv = ["size", str(tmp_path / "model"), "--device", "cpu", "--memory", "1GiB", "--dtype", "bfloat16"]
    plain, fp8 = (size(*argv, "--json", "--kv-cache-dtype", held) for held in ("auto", "fp8_e5m2"))
    assert fp8["kv_dtype"] == "float8_e5m2"
    assert fp8["page_bytes"] * 2 == plain["page_bytes"]
    assert fp8["decode"]["pages"] * 2 == plain["decode"]["pages"]
    assert fp8["decode"]["weights"] == plain["decode"]["weights"]
    assert fp8["fits"] == pytest.approx(2 * plain["fits"], abs=1)
    output = printed(*argv, "--kv-cache-dtype", "fp8_e5m2", "--page-size", "32")
    settings = "--set model.dtype=bfloat16 --set model.kv_cache_dtype=fp8_e5m2 --set pages.page_size=32"
    assert f"--engine vllm {settings} --set decode.kv_cache_bytes=" in output
    for held in ("int8", "fp8"):
        coded = size(*argv, "--json", "--kv-cache-dtype", held)
        assert (coded["kv_dtype"], coded["page_bytes"]) == (held, plain["page_bytes"] * (64 + 4) // (64 * 2))
    ranks = [*argv, "--json", "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "2"]  # vLLM's, without scales
    assert size(*ranks)["page_bytes"] * 4 == plain["page_bytes"]
    assert "'fp4'" in refusal(*argv, "--kv-cache-dtype", "fp4")
