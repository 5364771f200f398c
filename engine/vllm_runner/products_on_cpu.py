"""Products of vLLM on a CPU with AMX, whose bits depend on no other row. For the child alone."""

# pyright: reportMissingImports=false

ROWS = 32
"""The rows of every product: AMX computes 32 in little more time than one, and weights are read once for each 32."""


def take_rows_in_blocks() -> None:
    """Have oneDNN compute the unquantized products of each step by `ROWS` rows, the last of them padded with zeros.

    With AMX it divides the sum of a row by the number of all rows and of threads, so a row's last bits would depend on
    both. Every product of as many rows and the same weight is divided alike.
    """
    import torch
    from torch.nn.functional import pad
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    global _library
    library = _library = torch.library.Library("baton", "FRAGMENT")  # what it defines ends with it
    library.define("product(Tensor rows, Tensor? bias, Tensor handler, int width) -> Tensor")

    def product(rows: torch.Tensor, bias: torch.Tensor | None, handler: torch.Tensor, width: int) -> torch.Tensor:
        count = len(rows)
        padded = pad(rows, (0, 0, 0, -count % ROWS))
        result = rows.new_empty(len(padded), width)
        for begin in range(0, count, ROWS):
            block = slice(begin, begin + ROWS)
            torch.ops._C.onednn_mm(result[block], padded[block], bias, handler)
        return result[:count]

    def onednn_mm(handler: _custom_ops.CPUDNNLGEMMHandler, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # A compiler takes the operation as it is. Calling the function costs less.
        compute = torch.ops.baton.product if torch.compiler.is_compiling() else product
        rows = compute(x.reshape(-1, handler.k), bias, handler.handler_tensor, handler.n)
        return rows.view(*x.shape[:-1], handler.n)

    library.impl("product", product, "CPU")
    torch.library.register_fake("baton::product", lambda rows, *more: rows.new_empty(rows.shape[0], more[-1]))
    _custom_ops.onednn_mm = onednn_mm
    utils.check_cpu_sgl_kernel = lambda *_: False  # another kernel for small weights, which divides by the rows, too
