"""The checkpoints that come with Baton: a model worth talking to, and a small sibling and heads that draft for it.

Owns where they are. `tools/demo_model` makes them; `docs/demo-model.md` says what they can do and what not.
"""

from pathlib import Path

import msgspec

from baton.config import Config

DEMO_MODEL = Path(__file__).parent / "baton-demo"
"""What `baton up` serves unless a model is named."""

DRAFT_MODEL = DEMO_MODEL.with_name("baton-demo-draft")
"""Its smaller sibling with the same tokenizer, which may draft for it."""

HEADS = DEMO_MODEL.with_name("baton-demo-heads")
"""Heads that guess its next tokens from its hidden states."""


def with_demo_model(config: Config) -> Config:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(DEMO_MODEL)))
