"""The engine of the tests' clusters: our own or, with `BATON_TEST_ENGINE=vllm`, vLLM's model runner. That
takes the environment of `make test-vllm`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineUnderTest:
    """What of a cluster and its checkpoint the engine decides."""

    name: str
    page_size: int  # tokens
    head_dim: int  # of tests' checkpoints
    checkpoint: Mapping[str, Any] = field(default_factory=dict)  # on top of each recipe in tests/support/checkpoints.py
    wide: Mapping[str, Any] = field(default_factory=dict)  # the same of the wider kind
    settings: Mapping[str, object] = field(default_factory=dict)  # of a cluster


_ENGINES = {
    "native": EngineUnderTest("native", page_size=16, head_dim=16),
    # Its kernels on a CPU take heads of 32 dimensions and more, and pages of a multiple of 32 tokens.
    "vllm": EngineUnderTest(
        "vllm",
        page_size=32,
        head_dim=32,
        checkpoint={"hidden_size": 128, "head_dim": 32},
        wide={"head_dim": 64},
        settings={"model.engine": "vllm", "model.enforce_eager": True, "pages.page_size": 32},
    ),
}
ENGINE = _ENGINES[os.environ.get("BATON_TEST_ENGINE", "native")]
