"""Checkpoints without a tokenizer.json: made once of older files, as transformers reads them."""

import base64
import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from baton import tokenizer_files
from baton.errors import ModelError
from baton.messages import Grammar
from baton.tokenizer_files import tokenizer_folder
from engine.sampling.grammars import GrammarCompiler
from tests.router import tokenizers
from tests.support.eventually import eventually

TEXTS = ["the hello world", " Größe  🙂\n\n\tx", "</s>stop<s> 12 345", "<|im_end|>a<|im_end|> b", "東京 don't"]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "tokenizers"


def settings(folder: Path, kind: str, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500}))
    added = {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    added |= {"single_word": False}
    fields = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    fields |= {"added_tokens_decoder": {"450": added}}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | more))


def vocabulary_and_merges(folder: Path) -> None:
    model = json.loads(tokenizers.byte_level().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    settings(folder, "Qwen2Tokenizer")


def sentencepiece_model(folder: Path) -> None:
    model = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.escape_whitespaces = True
    vocabulary = tokenizers.byte_fallback().get_vocab()
    for piece, number in sorted(vocabulary.items(), key=lambda one: one[1]):
        kind = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(piece, 6 if piece.startswith("<0x") else 1)
        model.pieces.add(piece=piece, score=-float(number), type=kind)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    settings(folder, "LlamaTokenizer", add_bos_token=True)


def tekken(folder: Path) -> None:
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"he", b"llo", b"hello"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode(errors="replace")}
        for rank, word in enumerate(words)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(["<unk>", "<s>", "</s>"])
    ]
    shape = {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": len(words), "default_vocab_size": len(words) + 3}
    shape |= {"default_num_special_tokens": 3, "version": "v3"}
    (folder / "tekken.json").write_text(json.dumps({"config": shape, "vocab": vocab, "special_tokens": special}))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 500}))


@pytest.mark.parametrize("make", [vocabulary_and_merges, sentencepiece_model, tekken])
def test_older_files_are_read_as_transformers_reads_them(make: Callable[[Path], None], tmp_path: Path, cache: Path):
    make(tmp_path)
    folder = tokenizer_folder(tmp_path)
    assert folder.parent == cache
    ours, theirs = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token") == theirs.eos_token


def test_a_conversion_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vocabulary_and_merges(tmp_path)
    first = tokenizer_folder(tmp_path)
    monkeypatch.setattr(tokenizer_files, "_convert", lambda *_: pytest.fail("it was made a second time"))
    assert tokenizer_folder(tmp_path) == first
    copy = Path(shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("cache")))
    assert tokenizer_folder(copy) == first  # what is in them names it, not where they are
    tokenizers.byte_level().save(str(copy / "tokenizer.json"))
    assert tokenizer_folder(copy) == copy


def test_a_decode_workers_grammars_find_it(tmp_path: Path):
    vocabulary_and_merges(tmp_path)
    compiler = GrammarCompiler(tmp_path, 500, lambda: None)
    try:
        text = Tokenizer.from_file(str(tokenizer_folder(tmp_path) / "tokenizer.json"))
        ends = [1, text.token_to_id("<|im_end|>")]
        grammar = compiler.follow(Grammar("regex", "the( hello)?", ends[1]), ends, [5], 1)
        eventually(lambda: grammar.ready, what="the grammar", seconds=120)
        for output, may in (("", False), ("the", True), ("the hello", True)):
            mask = grammar.mask([5, *text.encode(output).ids])
            assert mask.begin()
            mask.compute()
            assert mask.allowed is not None, mask.failure
            assert mask.allowed[ends].tolist() == [may, may]  # whichever file names them
    finally:
        compiler.close()


def missing(*names: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError
        return "5"

    return version


@pytest.mark.parametrize(
    ("files", "lacking", "says"),
    [
        ((), (), "nor files to make one of; add it, or serve token ids alone: --set model.skip_tokenizer_init=true"),
        (("vocab.json", "merges.txt"), ("transformers",), "of merges.txt, vocab.json: pip install 'baton[convert]'"),
        (("tokenizer.model",), ("sentencepiece",), "of tokenizer.model: pip install 'baton[convert]'"),
        (("qwen.tiktoken",), ("tiktoken",), "of qwen.tiktoken: pip install 'baton[convert]'"),
    ],
)
def test_what_is_lacking_is_said(
    files: tuple[str, ...], lacking: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in files:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(importlib.metadata, "version", missing(*lacking))
    with pytest.raises(ModelError) as refused:
        tokenizer_folder(tmp_path)
    assert says in str(refused.value)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path):
    settings(tmp_path, "Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ModelError, match=r"transformers can't make it of vocab\.json"):
        tokenizer_folder(tmp_path)
    assert not (tmp_path / "ran").exists()
