"""Arrays that go to a device in one copy. Each copy of its own would cost a launch, and wait if memory is pageable."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 8  # bytes, of the widest number
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class PackedUpload:
    """Collects arrays. Send it once."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._starts = [0]

    def add_array(self, array: npt.NDArray[Any]) -> int:
        """Return the place of this array among those that `send` returns."""
        self._arrays.append(array)
        self._starts.append(self._starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[torch.Tensor]:
        """Return the arrays on the device. On CUDA the copy is from pinned memory, and nothing here waits for it."""
        if not self._arrays:
            return []
        packed = torch.empty(self._starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        room = packed.numpy()
        for array, start in zip(self._arrays, self._starts, strict=False):
            room[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        there = packed.to(device, non_blocking=True)
        return [
            there[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, start in zip(self._arrays, self._starts, strict=False)
        ]
