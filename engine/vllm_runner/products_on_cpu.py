"""Products of vLLM on a CPU with AMX, by our own kernels: their bits depend on no other row. For the child alone."""

# pyright: reportMissingImports=false

import functools
import itertools
from typing import Any
from weakref import WeakValueDictionary

from baton.errors import UnsupportedModel


def take_products() -> None:
    """Have the kernels of our own engine compute the unquantized products of each step.

    With AMX, oneDNN divides the sum of a row by the number of all rows and of threads, so a row's last bits would
    depend on both. Ours add up each row in one order. Raises UnsupportedModel where they can't be compiled.
    """
    import torch
    from vllm.model_executor.layers import utils

    from engine.cpu.build import library as kernels
    from engine.cpu.forward import Memory, Product
    from engine.cpu.packed_linear import PackedLinear
    from engine.cpu.thread_pool import ThreadPool

    if (native := kernels()) is None:
        raise UnsupportedModel(
            "model.numerics is exact, which needs a C++ compiler on this CPU; install g++, or set mixed"
        )

    global _library
    library = _library = torch.library.Library("baton", "FRAGMENT")  # what it defines ends with it
    library.define("product(Tensor rows, Tensor? bias, Tensor number, int width) -> Tensor")
    products, numbers, memory = WeakValueDictionary[int, Product](), itertools.count(), Memory()
    # Each rank makes its own, for it is forked later.
    threads = functools.cache(lambda: ThreadPool(native, torch.get_num_threads(), openmp=True))

    def product(rows: torch.Tensor, bias: torch.Tensor | None, number: torch.Tensor, width: int) -> torch.Tensor:
        return products[int(number)](rows, bias)

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight: torch.Tensor = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
            before(layer, remove_weight)
            return
        own = Product(native, threads(), memory, PackedLinear(weight.detach()))
        number, width = torch.tensor(next(numbers)), len(weight)
        products[int(number)] = layer.baton_product = own

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = torch.ops.baton.product(x.reshape(-1, x.shape[-1]), bias, number, width)
            return rows.view(*x.shape[:-1], width)

        layer.cpu_linear = linear
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    before, utils.dispatch_cpu_unquantized_gemm = utils.dispatch_cpu_unquantized_gemm, dispatch
    library.impl("product", product, "CPU")
    torch.library.register_fake("baton::product", lambda rows, *more: rows.new_empty(rows.shape[0], more[-1]))
