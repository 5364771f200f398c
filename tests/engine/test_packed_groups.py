"""Products of weights in 8 and 4 bits, against the matrix that they mean."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.formats.affine_groups import AffineGroups, stacked
from engine.cpu import build, numerics
from engine.cpu.forward import NativeForward
from engine.cpu.packed_groups import PackedGroups, knows
from engine.cpu.packed_linear import PackedLinears
from engine.cpu.thread_pool import ThreadPool
from engine.models.config import parse_spec
from engine.models.linear import Dense
from engine.models.weights import LayerWeights, MlpWeights, ModelWeights
from kvstore.layout import PageLayout
from tests.support.thorough import examples

native = pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch does the work here")
EXACT = {torch.float32: 3e-6, torch.bfloat16: 3e-6}
"""Of a sum of absolute products. Codes and inputs are exact, and sums are float32 in both."""


class Shape(NamedTuple):
    outputs: int
    group: int
    groups: int
    bits: int
    unsigned: bool
    minimums: bool
    wide: bool  # scales that float16 can't hold
    floats: bool = False
    ordered: bool = False

    def matrix(self, seed: int) -> AffineGroups:
        generator = torch.Generator().manual_seed(seed)
        least, most = (0, 1 << self.bits) if self.unsigned else (-(1 << self.bits - 1), 1 << self.bits - 1)
        codes = torch.randint(least, most, (self.outputs, self.group * self.groups), generator=generator)
        if self.floats:
            codes = codes.where(codes & 127 != 127, 0).to(torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.randn(self.outputs, self.groups, generator=generator)
        scale = scale if self.wide else scale.half().float()
        minimum = torch.randn(self.outputs, self.groups, generator=generator) if self.minimums else None
        whole = codes if self.floats else codes.to(torch.uint8 if self.unsigned else torch.int8)
        group_of = torch.arange(codes.shape[1])[torch.randperm(codes.shape[1], generator=generator)] // self.group
        return AffineGroups(whole, scale, minimum, self.bits, group_of if self.ordered else None)


shapes = st.builds(
    Shape,
    outputs=st.integers(1, 200),
    group=st.sampled_from([16, 32, 48, 64, 128, 256]),
    groups=st.integers(1, 5),
    bits=st.sampled_from([4, 8]),
    unsigned=st.booleans(),
    minimums=st.booleans(),
    wide=st.booleans(),
    floats=st.just(False),
    ordered=st.booleans(),
)
shapes |= st.builds(
    Shape,
    outputs=st.integers(1, 200),
    group=st.sampled_from([16, 48, 64, 256]),
    groups=st.integers(1, 5),
    bits=st.just(8),
    unsigned=st.just(True),
    minimums=st.just(False),
    wide=st.booleans(),
    floats=st.just(True),
)


def product(weight: AffineGroups, x: torch.Tensor, threads: int) -> torch.Tensor:
    """The kernels' product with [rows, in], in float32: that with the head of a model of one layer."""
    spec = parse_spec(numerics._CONFIG | {"hidden_size": x.shape[1], "vocab_size": len(weight.codes)})
    spec = replace(spec, layers=spec.layers[:1])
    maker = PackedLinears()

    def zeros(outputs: int, inputs: int) -> Dense:
        return Dense(torch.zeros(outputs, inputs, dtype=x.dtype), None)

    hidden = x.shape[1]
    mlp = MlpWeights(*maker.mlp(zeros(128, hidden), zeros(128, hidden), zeros(hidden, 128)))
    norm = torch.ones(hidden, dtype=x.dtype)
    layer = LayerWeights(
        norm,
        maker.linear(zeros(256, hidden)),
        torch.ones(6, 32),
        maker.linear(zeros(hidden, 128)),
        None,
        norm,
        mlp,
        None,
    )
    head = PackedGroups(weight, None, x.dtype)
    embedding = torch.zeros(len(weight.codes), hidden, dtype=x.dtype)
    weights = ModelWeights(embedding, (layer,), None, norm, head)
    layout = PageLayout(1, 2, 32, 16, str(x.dtype).removeprefix("torch."))
    library = build.library()
    assert library is not None
    pool = torch.zeros((1, *layout.shape), dtype=x.dtype)
    return NativeForward(library, ThreadPool(library, threads), spec, weights, layout, pool).logits(x).clone()


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(60)
@given(shape=shapes, rows=st.integers(1, 80), threads=st.integers(1, 3), seed=st.integers(0, 2**20))
def test_a_product_is_that_with_the_dense_matrix(shape: Shape, rows: int, threads: int, seed: int, dtype: torch.dtype):
    """And a row has the same bits alone."""
    weight = shape.matrix(seed)
    x = torch.randn(rows, weight.codes.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype)
    ours, dense = product(weight, x, threads), weight.dense().double()
    error = (ours - x.double() @ dense.T).abs()
    whole = weight.codes.double().abs() @ x.double().abs().T * weight.scale.abs().amax(1, keepdim=True)
    whole += 256 * x.double().abs().sum(1) * weight.scale.abs().amax(1, keepdim=True)
    assert (error <= EXACT[dtype] * (whole.T + 1)).all()
    row = seed % rows
    assert torch.equal(product(weight, x[row : row + 1], 1)[0], ours[row])


def test_groups_that_no_kernel_knows():
    odd = AffineGroups(torch.ones(4, 24, dtype=torch.int8), torch.ones(4, 3), None, 8)
    assert not knows(odd)
    ordered = AffineGroups(torch.ones(4, 32, dtype=torch.int8), torch.ones(4, 2), None, 8, torch.arange(32) % 2)
    assert knows(ordered)
    assert not knows(replace(ordered, group_of=torch.arange(32) // 20))
    assert stacked([ordered, replace(ordered, group_of=torch.arange(32) // 16)]) is None
    assert knows(AffineGroups(odd.codes[:, :16], odd.scale[:, :1], None, 8))


@pytest.mark.parametrize(("bits", "group", "share"), [(8, 128, 0.51), (4, 128, 0.26), (4, 32, 0.29)])
def test_memory_is_that_of_the_codes(bits: int, group: int, share: float):
    weight = Shape(256, group, 1024 // group, bits, False, False, False).matrix(1)
    packed = PackedGroups(weight, None, torch.bfloat16)
    assert packed.nbytes <= share * weight.codes.numel() * 2
    meta = AffineGroups(weight.codes.to("meta"), weight.scale.to("meta"), None, bits)
    assert PackedGroups(meta, None, torch.bfloat16).nbytes == packed.nbytes
