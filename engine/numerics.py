"""The class of a runner's arithmetic: a name, equal for runners that make the same bits of the same input.

It is a word and a version, then a digest of what else decides the bits. It is part of every page's key.
"""

import hashlib
import platform

import torch

from engine.cpu.build import cpu_description
from engine.device.gpus import visible_gpus

_VECTORS = ("avx", "amx", "fma", "sse4")


def digest(*parts: str | bytes) -> str:
    """Return eight hexadecimal digits that stand for all parts."""
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in map(_bytes, parts))
    return hashlib.blake2b(framed, digest_size=4).hexdigest()


def torch_digest(device: str) -> str:
    """Return the digest of what torch's results depend on: its release, and the GPU or the CPU's vector instructions.
    The kernels that it takes by the sizes of caches, or by the shape of a batch, are not told apart."""
    if (where := torch.device(device)).type == "cuda":
        return digest(torch.__version__, visible_gpus().gpus[where.index or 0].name)
    vectors = sorted(flag for flag in cpu_description().split() if flag.startswith(_VECTORS))
    return digest(torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), *vectors)


def _bytes(part: str | bytes) -> bytes:
    return part.encode() if isinstance(part, str) else part
