"""The served models as the clients' APIs list them: a card for each name, and one for each LoRA adapter.

OpenAI's and Anthropic's clients ask at the same path. Anthropic's send a header of their own.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from router.frontend.api.response_builder import Count
from router.frontend.served_model import ServedModel

_ANTHROPIC = "anthropic-version"


class Model(Struct, kw_only=True, tag_field="object", tag="model"):
    """A name of the served model, as OpenAI's clients and vLLM's read it."""

    id: str
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count
    permission: list[Any]


class AnthropicModel(Struct, kw_only=True, tag_field="type", tag="model"):
    """A name of the served model, as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"]
    max_input_tokens: Count
    max_tokens: Count


class ModelList(Struct, tag_field="object", tag="list"):
    """All names."""

    data: list[Model]


class AnthropicModelList(Struct):
    """All names."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a client of Anthropic's API."""
    return _ANTHROPIC in headers


class ModelCards:
    """The cards of some models. `created` is when their names were first served, in seconds since the epoch."""

    def __init__(self, models: Sequence[ServedModel], created: int) -> None:
        self._models = models
        self._created = created

    def all(self, headers: Mapping[str, str]) -> ModelList | AnthropicModelList:
        """The cards of all names, of each model the one that answers have first."""
        named = [(model, name) for model in self._models for name in (model.name, *model.aliases, *model.adapters)]
        if is_anthropic(headers):
            cards = [self._anthropic(*each) for each in named]
            return AnthropicModelList(cards, False, cards[0].id, cards[-1].id)
        return ModelList([self._openai(*each) for each in named])

    def one(self, name: str, headers: Mapping[str, str]) -> Model | AnthropicModel:
        """The card of a name. Raises ModelMismatch."""
        model = next((model for model in self._models if model.has(name)), self._models[0])
        model.check(name)
        return self._anthropic(model, name) if is_anthropic(headers) else self._openai(model, name)

    def _anthropic(self, model: ServedModel, name: str) -> AnthropicModel:
        context = model.limits.max_context
        created = datetime.fromtimestamp(self._created, UTC)
        return AnthropicModel(
            id=name, display_name=name, created_at=created, lifecycle="active", max_input_tokens=context,
            max_tokens=context,
        )  # fmt: skip

    def _openai(self, model: ServedModel, name: str) -> Model:
        root = model.adapters.get(name, model.name)
        parent = model.name if name in model.adapters else None
        return Model(
            id=name, created=self._created, owned_by="baton", root=root, parent=parent,
            max_model_len=model.limits.max_context, permission=[],
        )  # fmt: skip
