"""Requests' own rules and grammars' masks on many rows of logits at once, where the logits are.

The same changes in the same order as `host_sampler.apply`, with the same rounding: one operation for all rows that have
a change of a kind, not one for each row.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.packed_upload import PackedUpload
from engine.step.batch import TokenDraw

NUMBERS_AT_ONCE = 1 << 23
"""Rows are computed in blocks of so many logits. A temporary of 64-bit numbers then takes 64 MiB at most."""


class BatchEdits:
    """The changes that a step's draws make to their logits. Construct it, send the upload, apply it."""

    def __init__(self, draws: Sequence[TokenDraw], vocab_size: int, upload: PackedUpload) -> None:
        self._vocab = vocab_size
        edits = [(row, draw.edits) for row, draw in enumerate(draws) if draw.edits is not None]
        masks = [
            (row, mask, mask.allowed)
            for row, draw in enumerate(draws)
            if (mask := draw.mask) is not None and mask.allowed is not None
        ]
        self.any = bool(edits or masks)

        def pairs(rows: Iterable[tuple[int, npt.NDArray[Any]]]) -> int | None:
            """Places in the flattened logits."""
            places = [row * vocab_size + ids for row, ids in rows]
            return upload.add_array(np.concatenate(places)) if places else None

        def joined(parts: Sequence[npt.NDArray[np.float32]]) -> int | None:
            return upload.add_array(np.concatenate(parts)) if parts else None

        only = [(row, edit.allowed) for row, edit in edits if edit.allowed is not None]
        self._only_rows = upload.add_array(np.array([row for row, _ in only], np.int64)) if only else None
        self._only = pairs(only)
        self._forbidden = pairs((row, edit.forbidden) for row, edit in edits if edit.forbidden is not None)
        biases = [(row, edit.bias) for row, edit in edits if edit.bias is not None]
        self._biased = pairs((row, ids) for row, (ids, _) in biases)
        self._bias = joined([values for _, (_, values) in biases])
        repeated = [(row, edit.repeated, edit.repetition) for row, edit in edits if edit.repeated is not None]
        self._repeated = pairs((row, ids) for row, ids, _ in repeated)
        self._repetition = joined([np.full(len(ids), by, np.float32) for _, ids, by in repeated])
        lowered = [(row, edit.lowered) for row, edit in edits if edit.lowered is not None]
        self._lowered = pairs((row, ids) for row, (ids, _) in lowered)
        self._lowering = joined([values for _, (_, values) in lowered])

        self._mask_rows = self._bits = self._ends = None
        if masks:
            self._mask_rows = upload.add_array(np.array([row for row, _, _ in masks], np.int64))
            allowed = np.stack([allowed for _, _, allowed in masks])
            self._bits = upload.add_array(np.packbits(allowed, axis=-1, bitorder="little"))
            ends = [
                (place, row, np.array([one for one in mask.ends if one < vocab_size], np.int64))
                for place, (row, mask, _) in enumerate(masks)
                if mask.may_end
            ]
            self._ends = pairs((row, ids) for _, row, ids in ends)
            if ends:
                self._ending = upload.add_array(np.concatenate([np.full(len(ids), place) for place, _, ids in ends]))

    def applied(self, raw: torch.Tensor, sent: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return changed logits; `raw` [rows, vocab], float32, stays. `sent` is the upload on the device. A row without
        any token left is −∞ everywhere."""

        def of(place: int | None) -> torch.Tensor:
            assert place is not None
            return sent[place]

        if not self.any:
            return raw
        logits = raw.clone()
        flat = logits.view(-1)
        if self._only is not None:
            only = flat[of(self._only)]
            logits.index_fill_(0, of(self._only_rows), -math.inf)
            flat.index_copy_(0, of(self._only), only)
        if self._forbidden is not None:
            flat.index_fill_(0, of(self._forbidden), -math.inf)
        if self._biased is not None:
            flat.index_add_(0, of(self._biased), of(self._bias))
        if self._repeated is not None:
            before, by = flat[of(self._repeated)], of(self._repetition)
            flat.index_copy_(0, of(self._repeated), torch.where(before > 0, before / by, before * by))
        if self._lowered is not None:
            flat.index_add_(0, of(self._lowered), -of(self._lowering))
        if self._mask_rows is not None:
            empty = self._mask(logits, of(self._mask_rows), of(self._bits))
            if self._ends is not None:
                ends, ending = of(self._ends), empty[of(self._ending)]
                flat.index_copy_(0, ends, torch.where(ending, raw.reshape(-1)[ends], flat[ends]))
        return logits

    def _mask(self, logits: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Mask rows in place. Returns which of them have no token left: where the output may end, those tokens come
        back that end it."""
        places = torch.arange(8, dtype=torch.uint8, device=packed.device)
        empty: list[torch.Tensor] = []
        step = max(1, NUMBERS_AT_ONCE // self._vocab)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            bits = (packed[first : first + step, :, None] >> places) & 1
            masked = torch.where(bits.flatten(1)[:, : self._vocab].bool(), logits[part], -math.inf)
            empty.append(masked.amax(-1) == -math.inf)
            logits.index_copy_(0, part, masked)
        return torch.cat(empty)
