"""The class of a runner's arithmetic: what shares it, and what does not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import numerics
from engine.cpu import build
from engine.engine import Engine

native = pytest.mark.skipif(build.library() is None, reason="no native kernels")


def class_of(path: Path, *, head: bool = True, threads: int = 1, native: bool = True, dtype: str = "float32") -> str:
    return Engine.load(path, dtype, "cpu", 4, 16, head, threads, native).numerics


@native
def test_a_prefill_worker_has_the_class_of_a_decode_worker(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama")
    assert class_of(path).startswith("native-")
    assert class_of(path) == class_of(path, head=False) == class_of(path, threads=2)


@pytest.mark.parametrize(("dtype", "native"), [("float32", False), ("float16", True)])
def test_where_torch_computes_the_class_is_torchs(dtype: str, native: bool, checkpoint: Callable[[str], Path]) -> None:
    name = class_of(checkpoint("llama"), native=native, dtype=dtype)
    assert name == class_of(checkpoint("llama"), native=native, dtype=dtype, head=False)
    assert name.startswith("torch-")


def test_another_release_or_processor_is_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {numerics.torch_digest("cpu")}
    for target, name, value in (
        (torch, "__version__", "0.0.1"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "other"),
        (numerics, "cpu_description", lambda: "amx_bf16 avx2"),
        (numerics, "cpu_description", lambda: "avx2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            digests.add(numerics.torch_digest("cpu"))
    assert len(digests) == 5
    assert numerics.torch_digest("cpu") in digests


def test_parts_of_a_digest_do_not_run_together() -> None:
    assert numerics.digest("ab", "c") != numerics.digest("a", "bc")
