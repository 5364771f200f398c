"""The small model is the same every time, and a real one."""

import hashlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from bench import random_model

TOKENIZER = random_model.tokenizer(random_model.text())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_bytes_every_time(tmp_path: Path):
    assert digests(random_model.write(tmp_path / "one")) == digests(random_model.write(tmp_path / "two"))


def test_its_files_agree(tmp_path: Path):
    folder = random_model.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == config["vocab_size"]
    assert 900_000 < sum(tensor.size for tensor in tensors.values()) < 1_100_000
    spread = float(tensors["model.layers.0.mlp.up_proj.weight"].std())
    assert abs(spread - random_model.INITIALIZER_RANGE) < 0.002


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_goes_in_and_comes_out(text: str):
    ids = TOKENIZER.encode(text).ids
    assert ids[0] == 0
    assert TOKENIZER.decode(ids[1:], skip_special_tokens=False) == text
