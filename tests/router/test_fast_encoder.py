"""A faster library's tokens are those of Hugging Face's, or it is not used."""

import importlib
import importlib.util
import json
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tokenizers import Tokenizer as RawTokenizer

from deploy.models import DEMO_MODEL
from router.frontend import fast_encoder as fast_encoder_module
from router.frontend.detokenizer import Tokenizer
from router.frontend.fast_encoder import fast_encoder
from tests.router import tokenizers
from tests.router.test_token_cache import PIECES, RAW, SAFE, UNSAFE, with_tokens
from tests.support.real_weights import needs_smollm2, smollm2

INSTALLED = importlib.util.find_spec("fastokens") is not None
needs_fastokens = pytest.mark.skipif(not INSTALLED, reason="fastokens is not here: it has no wheel for Linux on Arm")
DEMO = DEMO_MODEL / "tokenizer.json"
TEXTS = st.lists(st.sampled_from([*PIECES, "'s", "\r\n", "\ufdd0"]) | st.text(max_size=5), max_size=12).map("".join)


class Slower:
    """A library that makes the tokens of Hugging Face's, but for a text."""

    def __init__(self, tokenizer: RawTokenizer, odd: str) -> None:
        self._tokenizer = tokenizer
        self._odd = odd
        self.calls = 0

    def encode_batch_flat(self, texts: list[str], *, add_special_tokens: bool) -> tuple[bytes, bytes]:
        self.calls += 1
        if "refused" in texts:
            raise ValueError("Max stack size exceeded for backtracking")
        tokens = [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        tokens = [[*ids, 1] if text == self._odd else ids for text, ids in zip(texts, tokens, strict=True)]
        offsets = np.cumsum([0, *map(len, tokens)])
        return np.array([*chain(*tokens)], "<u4").tobytes(), offsets.astype("<u8").tobytes()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What stands in for the library: the odd text, and the encoders that it has made."""
    monkeypatch.setattr(fast_encoder_module, "_shared", {})
    state: dict[str, Any] = {"odd": None, "encoders": []}

    def encoder(text: str) -> Slower:
        if json.loads(text)["model"]["type"] != "BPE":
            raise ValueError("it is no BPE")
        state["encoders"].append(Slower(RawTokenizer.from_str(text), state["odd"]))
        return state["encoders"][-1]

    module = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=encoder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    return state


def load(folder: Path, raw: RawTokenizer) -> Tokenizer:
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder / "tokenizer.json")


def test_it_encodes_where_it_makes_the_same_tokens(
    tmp_path: Path, library: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tokenizers.byte_level()
    tokenizer = load(tmp_path, raw)
    (fast,) = library["encoders"]
    tried = fast.calls
    for special in (False, True):
        for texts in (["hello 🙂", "", "x"], [""], ["refused", "\ufdd0"]):
            right = [one.ids for one in raw.encode_batch_fast(texts, add_special_tokens=special)]
            assert tokenizer.encode_all(texts, special_tokens=special) == right
    assert fast.calls == tried + 6
    monkeypatch.setattr(fast_encoder_module, "_shared", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load(tmp_path, raw).encode("x") == tokenizer.encode("x")
    assert len(library["encoders"]) == 1


@pytest.mark.parametrize("odd", ["'s7", "a</s>b", "</s"])
def test_it_is_left_out_where_a_text_has_other_tokens(
    tmp_path: Path, library: dict[str, Any], caplog: pytest.LogCaptureFixture, odd: str
) -> None:
    library["odd"] = odd
    tokenizer = load(tmp_path, tokenizers.byte_level())
    assert tokenizer.encode(odd) == tokenizers.byte_level().encode(odd).ids
    assert f"other tokens for {odd!a}" in caplog.text


def test_it_is_left_out_where_it_can_not_read_the_tokenizer(
    tmp_path: Path, library: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert load(tmp_path, RAW["word piece"]).encode("hello") == RAW["word piece"].encode("hello").ids
    assert "it is no BPE" in caplog.text


@cache
def both(name: str) -> tuple[RawTokenizer, Tokenizer]:
    raw = RawTokenizer.from_file(str(DEMO if name == "demo" else smollm2() / "tokenizer.json"))
    tokenizer = Tokenizer(raw, fast_encoder(raw))
    assert tokenizer._fast is not None
    return raw, tokenizer


@needs_fastokens
@pytest.mark.parametrize("name", ["demo", pytest.param("smollm2", marks=needs_smollm2)])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
def test_models_have_their_tokens(name: str, texts: list[str], special: bool) -> None:
    raw, tokenizer = both(name)
    right = [one.ids for one in raw.encode_batch_fast(texts, add_special_tokens=special)]
    assert tokenizer.encode_all(texts, special_tokens=special) == right
    assert tokenizer._fast is not None
    assert tokenizer._fast.encode_all(texts, special_tokens=special) == right


@needs_fastokens
@needs_smollm2
def test_a_text_that_it_refuses_is_encoded() -> None:
    raw, tokenizer = both("smollm2")
    text = " " * 1_000_000
    assert tokenizer._fast is not None
    assert tokenizer._fast.encode_all([text], special_tokens=False) is None
    assert tokenizer.encode(text) == raw.encode_batch_fast([text])[0].ids


@cache
def tried(kind: str, added: str) -> Tokenizer:
    raw = with_tokens(kind, added)._tokenizer
    return Tokenizer(raw, fast_encoder(raw))


@needs_fastokens
@pytest.mark.parametrize("added", SAFE | UNSAFE)
@given(kind=st.sampled_from([*RAW]), texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_a_tokenizer_of_any_kind_keeps_its_tokens(added: str, kind: str, texts: list[str]) -> None:
    raw = with_tokens(kind, added)._tokenizer
    right = [one.ids for one in raw.encode_batch_fast(texts, add_special_tokens=True)]
    assert tried(kind, added).encode_all(texts) == right
