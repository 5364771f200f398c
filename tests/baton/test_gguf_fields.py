"""The configs of transformers that a GGUF file's fields mean, where no file of the other tests says so."""

from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints.gguf_fields import Fields, config
from baton.errors import UnsupportedModel
from engine.models.config import parse_spec
from engine.spec import ModelSpec

MODEL = {
    "context_length": 512, "embedding_length": 96, "block_count": 7, "feed_forward_length": 128,
    "attention.head_count": 4, "attention.key_length": 32, "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}  # fmt: skip


def config_of(architecture: str, *, factors: dict[str, list[float]] | None = None, **fields: Any) -> dict[str, Any]:
    own = {f"{architecture}.{name}": value for name, value in {**MODEL, **fields}.items()}
    whole = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a", "b"], **own}
    return config(Fields(Path("model.gguf"), whole), False, factors or {})


def spec(architecture: str, **fields: Any) -> ModelSpec:
    return parse_spec(config_of(architecture, **fields))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"attention.sliding_window": 64}, [64] * 5 + [None, 64]),
        ({"attention.sliding_window": 64, "attention.sliding_window_pattern": 3}, [64, 64, None] * 2 + [64]),
        (
            {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True] * 3 + [False] * 4},
            [64] * 3 + [None] * 4,
        ),
        ({}, [None] * 7),
    ],
)
def test_windows_of_gemma_3(fields: dict[str, Any], windows: list[int | None]):
    assert list(spec("gemma3", **fields).windows) == windows


def test_scores_of_gemma_3_are_divided_as_in_its_largest_size_or_in_all_others():
    assert spec("gemma3").query_scale == 32**-0.5
    assert spec("gemma3", block_count=62).query_scale == 24**-0.5


def test_a_soft_cap_is_refused():
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping 30"):
        spec("gemma3", final_logit_softcapping=30.0)


def test_factors_of_phi_3_are_its_own():
    factors = {"long_factor": [2.0] * 12, "short_factor": [1.0] * 12}
    more = {"rope.dimension_count": 24, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25}
    rope = spec("phi3", factors=factors, **more).layers[0].rope
    assert (rope.rotated, rope.factors, rope.attention_factor) == (24, (2.0,) * 12, 1.25)


def test_a_number_is_the_shortest_that_means_it():
    assert config_of("llama")["rms_norm_eps"] == 1e-05


def test_a_llama_with_a_window_is_a_mistral():
    assert spec("llama").family == "llama"
    mistral = spec("llama", **{"attention.sliding_window": 64})
    assert (mistral.family, mistral.widest_window) == ("mistral", 64)
