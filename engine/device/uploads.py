"""Arrays on their way to a device and back, without a wait of the host's in between."""

from typing import Any

import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array on the device; on a CPU itself. On CUDA the copy is from pinned memory and lies in the current
    stream, where a pageable one would wait for all that lies there already."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


class Download:
    """A copy of a tensor to the host, which lies in the current stream. It does not wait for what is queued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied: Any = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> npt.NDArray[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.cpu().numpy()
