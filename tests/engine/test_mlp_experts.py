"""Mixtures of experts as a device computes them: the host's numbers, and not a word to the host."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import engine as engine_module
from engine.engine import Engine
from engine.models import mlp
from engine.models.linear import Dense, PlainLinears
from engine.models.weights import ExpertsWeights, MlpWeights, StackedExperts
from engine.spec import Activation, ExpertsSpec
from tests.engine.driver import assert_same_tokens, generate, prompt_of
from tests.engine.test_device_sampler import counted
from tests.support.checkpoints import Reference
from tests.support.thorough import examples

ways = pytest.mark.parametrize("kernel", [False, True], ids=["blocks", "groups"])


def expert_layer(
    experts: ExpertsSpec, hidden: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[ExpertsWeights, ExpertsWeights]:
    """Random weights, as a host has them and as a device has them."""
    count, inner = experts.count, experts.intermediate_size
    router = torch.randn(count, hidden, dtype=dtype, device=device)
    gate_up = torch.randn(count, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.randn(count, hidden, inner, dtype=dtype, device=device)
    linear = PlainLinears().linear
    each = tuple(MlpWeights(linear(Dense(a, None)), linear(Dense(b, None))) for a, b in zip(gate_up, down, strict=True))
    return ExpertsWeights(router, each), ExpertsWeights(router, StackedExperts(gate_up, down))


@ways
@examples(300)
@given(data=st.data())
def test_a_device_computes_what_a_host_computes(kernel: bool, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, 2, 3, 17, 64, 150, 700]), "rows")
    count = data.draw(st.integers(1, 9), "experts")
    spec = ExpertsSpec(count, data.draw(st.integers(1, count), "top_k"), 8, data.draw(st.booleans(), "renormalise"))
    torch.manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    host, device = expert_layer(spec, 16)
    x = torch.randn(rows, 16)
    match data.draw(st.sampled_from(["random", "ties", "one likes all", "in turns"]), "choice"):
        case "ties":
            host.router.zero_()
        case "one likes all":  # so others have no rows
            x[:, 0] = 30.0
            host.router[:, 0] = torch.arange(count).flip(0)
        case "in turns":
            x[:, 0] = torch.where(torch.arange(rows) % 2 == 0, 30.0, -30.0)
            host.router[:, 0] = torch.arange(count)
        case _:
            pass
    activation: Activation = data.draw(st.sampled_from(["silu", "gelu_tanh"]), "activation")
    before = x.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "_has_kernel", lambda device, dtype: kernel)
        patch.setattr(mlp, "_BLOCK", (1, 4) if data.draw(st.booleans(), "small blocks") else mlp._BLOCK)
        patch.setattr(mlp, "_GATHERED_BYTES", data.draw(st.sampled_from([1, 3_000, 2**28]), "gathered"))
        output = mlp.mixed(device, spec, activation, x)
        if rows > 1:  # a row that is not finite touches no other
            x[0] = float("nan")
            beside = mlp.mixed(device, spec, activation, x)
            assert beside[0].isnan().all()
            torch.testing.assert_close(beside[1:], output[1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output, mlp.mixed(host, spec, activation, before), atol=1e-3, rtol=1e-4)


@ways
def test_nothing_of_a_device_is_read(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers stand for those of a GPU. Whatever needs a number of theirs raises, and so does whatever
    mixes them with the host's."""
    monkeypatch.setattr(mlp, "_has_kernel", lambda device, dtype: kernel)
    spec = ExpertsSpec(128, 8, 48, renormalise=True)
    with FakeTensorMode():
        _, device = expert_layer(spec, 32, torch.bfloat16, "cuda")
        for rows in (1, 7, 2_000):
            output = mlp.mixed(device, spec, "silu", torch.empty(rows, 32, dtype=torch.bfloat16, device="cuda"))
            assert (output.shape, output.dtype, output.device.type) == ((rows, 32), torch.bfloat16, "cuda")


@ways
def test_nothing_waits_for_a_device(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "_has_kernel", lambda device, dtype: kernel)
    spec = ExpertsSpec(8, 2, 16, renormalise=False)
    host, device = expert_layer(spec, 16)
    x = torch.randn(40, 16)
    with counted() as copied:
        mlp.mixed(device, spec, "silu", x)
    assert copied == []
    with pytest.raises(AssertionError, match="waits for the device"), counted():
        mlp.mixed(host, spec, "silu", x)


def test_the_most_blocks_are_enough_and_few() -> None:
    """The number of blocks follows from that of the rows. Here the worst choices of experts are counted."""
    rng = random.Random(4)
    for _ in range(300):
        count, total = rng.randint(1, 40), rng.randint(1, 500)
        size = mlp._block_size(total, count)
        assert size & (size - 1) == 0
        used = min(count, total)
        bound = used + (total - used) // size
        worst = [1] * used
        worst[0] += total - used
        assert sum(-(-rows // size) for rows in worst) <= bound <= 2 * count + total // size
        shares = [rng.randint(0, total) for _ in range(count - 1)]
        cuts = [0, *sorted(shares), total]
        assert sum(-(-(b - a) // size) for a, b in itertools.pairwise(cuts)) <= bound


def test_only_the_kernel_that_takes_its_groups_from_the_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(major: int, minor: int) -> None:
        mlp._has_kernel.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    def multiplies(hidden: int = 32, inner: int = 48, count: int = 8, dtype: torch.dtype = torch.bfloat16) -> bool:
        with FakeTensorMode():
            _, device = expert_layer(ExpertsSpec(count, 2, inner, renormalise=False), hidden, dtype, "cuda")
        assert isinstance(device.experts, StackedExperts)
        return mlp._multiplies_groups(device.experts)

    on(9, 0)
    assert multiplies()
    assert not multiplies(dtype=torch.float32)
    assert not multiplies(dtype=torch.float16)
    assert not multiplies(hidden=36)
    assert not multiplies(inner=44)
    assert not multiplies(count=1_024)
    for other in ((8, 0), (8, 9), (12, 0)):
        on(*other)
        assert not multiplies()
    on(10, 3)
    assert multiplies()
    mlp._has_kernel.cache_clear()
    _, here = expert_layer(ExpertsSpec(4, 2, 16, renormalise=False), 16, torch.bfloat16)
    assert isinstance(here.experts, StackedExperts)
    assert not mlp._multiplies_groups(here.experts)


@pytest.mark.technique("Mixture of experts")
@ways
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_greedy_tokens_are_those_of_transformers(
    name: str,
    kernel: bool,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "linear_maker", lambda device, spec, quantization: PlainLinears())
    monkeypatch.setattr(mlp, "_has_kernel", lambda device, dtype: kernel)
    engine = Engine.load(checkpoint(name), "float32", "cpu", 64, 16, True, 1, native=False)
    layers = [layer.mlp for layer in engine._model._weights.layers]
    assert any(isinstance(each, ExpertsWeights) and isinstance(each.experts, StackedExperts) for each in layers)
    for length in (3, 40, 77):
        prompt = prompt_of(length, seed=length)
        expected, gaps = reference(name).generate(prompt, 40)
        assert_same_tokens(generate(engine, prompt, 40), expected, gaps)
        assert_same_tokens(generate(engine, prompt, 40, sizes=[30, 1, 17, 16]), expected, gaps)
