"""Requests' own rules and grammars' masks on many rows of logits at once, where the logits are.

The same changes in the same order as `host_sampler.apply`, with the same rounding: one operation for all rows that have
a change of a kind, not one for each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import TokenDraw
from engine.sampling.parcel import Parcel


class Edits:
    """The changes that a step's draws make to their logits. Construct it, send the parcel, apply it."""

    def __init__(self, draws: Sequence[TokenDraw], vocab_size: int, parcel: Parcel) -> None:
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
            found = [row * vocab_size + ids for row, ids in rows]
            return parcel.add(np.concatenate(found)) if found else None

        def joined(parts: Sequence[npt.NDArray[np.float32]]) -> int | None:
            return parcel.add(np.concatenate(parts)) if parts else None

        only = [(row, edit.allowed) for row, edit in edits if edit.allowed is not None]
        self._only_rows = parcel.add(np.array([row for row, _ in only], np.int64)) if only else None
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
            self._mask_rows = parcel.add(np.array([row for row, _, _ in masks], np.int64))
            self._bits = parcel.add(
                np.packbits(np.stack([allowed for _, _, allowed in masks]), axis=-1, bitorder="little")
            )
            self._ends = pairs(
                (place, np.array([one for one in mask.ends if one < vocab_size], np.int64))
                for place, (_, mask, _) in enumerate(masks)
                if mask.may_end
            )

    def applied(self, raw: torch.Tensor, sent: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return changed logits; `raw` [rows, vocab], float32, stays. `sent` is the parcel on the device. A row without
        any token left is −∞ everywhere."""

        def of(place: int | None) -> torch.Tensor:
            assert place is not None
            return sent[place]

        if not self.any:
            return raw
        logits = raw.clone()
        flat = logits.view(-1)
        if self._only is not None:
            kept = flat[of(self._only)]
            logits.index_fill_(0, of(self._only_rows), -math.inf)
            flat.index_copy_(0, of(self._only), kept)
        if self._forbidden is not None:
            flat.index_fill_(0, of(self._forbidden), -math.inf)
        if self._biased is not None:
            flat.index_add_(0, of(self._biased), of(self._bias))
        if self._repeated is not None:
            found, by = flat[of(self._repeated)], of(self._repetition)
            flat.index_copy_(0, of(self._repeated), torch.where(found > 0, found / by, found * by))
        if self._lowered is not None:
            flat.index_add_(0, of(self._lowered), -of(self._lowering))
        if self._mask_rows is not None:
            rows = of(self._mask_rows)
            logits.index_copy_(0, rows, self._masked(logits[rows], raw[rows], of(self._bits), sent))
        return logits

    def _masked(
        self, logits: torch.Tensor, raw: torch.Tensor, packed: torch.Tensor, sent: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The rows that a grammar masks. Where rules and mask together leave no token, and the output may end, those
        tokens are left that end it."""
        bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
        allowed = bits.view(len(packed), -1)[:, : self._vocab].bool()
        masked = torch.where(allowed, logits, -math.inf)
        if self._ends is None:
            return masked
        ends = sent[self._ends]
        ending = torch.full_like(raw, -math.inf)
        ending.view(-1).index_copy_(0, ends, raw.reshape(-1)[ends])
        return torch.where(masked.amax(-1, keepdim=True) > -math.inf, masked, ending)
