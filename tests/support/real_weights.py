"""SmolLM2 for tests that need a model that speaks English, and the reason to skip them where it is not here."""

from pathlib import Path

import pytest

from baton.checkpoints import named

_PATH = named.MODELS["smollm2"].cached()
needs_smollm2 = pytest.mark.skipif(_PATH is None, reason="SmolLM2 is not in the cache: `make smollm2` fetches it")


def smollm2() -> Path:
    assert _PATH is not None, "marked with needs_smollm2"
    return _PATH
