"""Several rows of a sequence with latents (MLA) on a CPU, each computed as a single one. For the child alone.

vLLM's kernel for single rows takes one row of each sequence, and a sequence with more rows takes another kernel, with
other bits. The latents of a step are written before any row attends. So each row may stand for a sequence of its own
that ends with it.
"""

# pyright: reportMissingImports=false

from typing import Any

import torch

MOST = 17  # rows of a sequence: its last token, and as many proposals as one may have


def take_several_rows() -> None:
    """Compute at most `MOST` rows of a sequence like this from now on. A prompt's first ones are left to vLLM."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    class Rows(mla_attention.MLACommonMetadataBuilder):
        query_len_support = mla_attention.QueryLenSupport.VARLEN
        reorder_batch_threshold = MOST

        def _build_decode(self, **batch: Any) -> Any:
            ends, blocks = batch["query_start_loc_device"], batch["block_table_tensor"]
            counts = ends.diff()
            behind = ends[1:].repeat_interleave(counts) - torch.arange(1, batch["num_decode_tokens"] + 1)
            lengths = batch["seq_lens_device"].repeat_interleave(counts) - behind
            rows = {"block_table_tensor": blocks.repeat_interleave(counts, 0), "seq_lens_device": lengths}
            return super()._build_decode(**{**batch, **rows})

    CPUMLABackend.get_builder_cls = staticmethod(lambda: Rows)
    mla_attention.split_decodes_and_prefills = _split


def _split(batch: Any, decode_threshold: int, **_: object) -> tuple[int, int, int, int]:
    """The sequences and rows of the batch whose rows are single ones, which come first, and the others. vLLM's own rule
    lets the first rows of a short prompt take either kernel, as others of the batch do."""
    ends = batch.query_start_loc_cpu
    counts = ends.diff()
    others = (counts > decode_threshold) | (batch.seq_lens_cpu_upper_bound[: len(counts)] <= counts)
    first = int(others.int().argmax()) if others.any() else len(counts)
    rows = int(ends[first])
    return first, batch.num_reqs - first, rows, batch.num_actual_tokens - rows
