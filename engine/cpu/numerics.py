"""The class of the native kernels' arithmetic (`engine.numerics`)."""

from __future__ import annotations

import hashlib

from engine.cpu.build import Library, cpu_description

VERSION = 2
"""Raised whenever the kernels make other bits of the same input. `probe` tells machines and compilers apart."""


def probe(library: Library) -> str:
    """Return the class of the library's arithmetic on this machine."""
    vectors = b"avx512bf16" if "avx512_bf16" in cpu_description().split() else b"avx2"
    return f"native-{VERSION}/{hashlib.blake2b(vectors, digest_size=4).hexdigest()}"
