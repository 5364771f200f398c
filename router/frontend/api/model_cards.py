"""The served model as the clients' APIs list it: a card for each of its names, and one for each LoRA adapter.

OpenAI's and Anthropic's clients ask at the same path. Anthropic's send a header of their own.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from router.frontend.served_model import ServedModel

_ANTHROPIC = "anthropic-version"


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a client of Anthropic's API."""
    return _ANTHROPIC in headers


class ModelCards:
    """The cards of one model. `created` is when its names were first served, in seconds since the epoch."""

    def __init__(self, model: ServedModel, created: int) -> None:
        self._model = model
        self._created = created

    def all(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """The cards of all names, the one that answers have first."""
        names = (self._model.name, *self._model.aliases, *self._model.adapters)
        cards = [self.one(name, headers) for name in names]
        if is_anthropic(headers):
            return {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": cards}

    def one(self, name: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """The card of a name. Raises ModelMismatch."""
        self._model.check(name)
        context = self._model.limits.max_context
        if is_anthropic(headers):
            return {
                "id": name,
                "type": "model",
                "display_name": name,
                "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
                "lifecycle": "active",
                "max_input_tokens": context,
                "max_tokens": context,
            }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": self._model.adapters.get(name, self._model.name),
            "parent": self._model.name if name in self._model.adapters else None,
            "max_model_len": context,
            "permission": [],
        }
