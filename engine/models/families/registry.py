"""All families, and which of them a checkpoint's config belongs to."""

from typing import Any

from baton.errors import ModelError, UnsupportedModel
from engine.models.config_file import ConfigFile
from engine.models.families.family import Family
from engine.models.families.gemma3 import GEMMA3
from engine.models.families.llama import LLAMA
from engine.models.families.mistral import MISTRAL
from engine.models.families.mixtral import MIXTRAL
from engine.models.families.phi3 import PHI3
from engine.models.families.qwen2 import QWEN2
from engine.models.families.qwen3 import QWEN3
from engine.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA3, MIXTRAL, QWEN3_MOE)
_BY_NAME = {family.name: family for family in FAMILIES}
_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}


def by_name(name: str) -> Family:
    return _BY_NAME[name]


def family_of(config: ConfigFile) -> Family:
    """The family by the config's architecture, or by its model_type where no architecture is named. Raises ModelError
    or UnsupportedModel."""
    architectures: Any = config.raw.get("architectures") or []
    known = ", ".join(_BY_ARCHITECTURE)
    if not isinstance(architectures, list):
        raise ModelError(f"architectures is {architectures!r}; it must be a list of names")
    named = [str(name) for name in architectures]
    for name in named:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    if named:
        raise UnsupportedModel(
            f"architecture {', '.join(named)} is not served by the native runner, which knows {known}"
        )
    model_type = config.raw.get("model_type")
    if model_type in _BY_NAME:
        return _BY_NAME[model_type]
    raise UnsupportedModel(f"model_type {model_type!r} is not served by the native runner, which knows {known}")
