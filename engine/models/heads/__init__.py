"""Heads of a checkpoint, in the forms that vLLM reads: an MLP speculator, Medusa or EAGLE.

A new form is one file here and its type below.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint_files import read_config
from baton.errors import UnsupportedModel
from engine.models.heads import eagle, medusa, mlp_speculator
from engine.models.heads.seam import Embeddings, Heads, HeadsSpec
from engine.models.linear import LinearMaker

__all__ = ["Heads", "HeadsSpec", "load", "load_spec"]

_FORMS: Mapping[str, Callable[[Path, Mapping[str, Any]], HeadsSpec]] = {
    mlp_speculator.TYPE: mlp_speculator.read_spec,
    medusa.TYPE: medusa.read_spec,
    **dict.fromkeys(eagle.TYPES, eagle.read_spec),
}


def load_spec(path: Path) -> HeadsSpec:
    """Read the sizes of the heads in the directory `path`. Raises ModelError."""
    raw = read_config(path)
    if (read := _FORMS.get(str(raw.get("model_type")))) is None:
        raise UnsupportedModel(
            f"{path} holds a model of the type {raw.get('model_type')!r}; heads are of {', '.join(map(repr, _FORMS))}"
        )
    return read(path, raw)


def load(path: Path, dtype: torch.dtype, maker: LinearMaker, model: Embeddings) -> Heads:
    """Load the checkpoint in the directory `path` beside `model`. Raises ModelError."""
    match load_spec(path):
        case mlp_speculator.MlpSpec() as spec:
            return mlp_speculator.MlpSpeculator.load(path, spec, dtype, maker)
        case medusa.MedusaSpec() as spec:
            return medusa.Medusa.load(path, spec, dtype, maker)
        case spec:
            assert isinstance(spec, eagle.EagleSpec)
            return eagle.Eagle.load(path, spec, dtype, maker, model)
