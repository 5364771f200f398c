"""Odd checkpoints: `baton doctor MODEL`, the check of `baton up`, and what the processes then do are of one mind.

The processes' own loading is the truth here. Doctor and `up` must say the same, in the same words and in one line.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from baton.config import Config
from baton.config import load as load_config
from baton.errors import BatonError, StartupError
from bench import random_model
from deploy.cli import app
from deploy.control_plane import bring_up
from engine.engine import Engine
from engine.vllm_runner import requirements
from router.frontend.served_model import load as load_model
from worker import load_runner

_PASSED = "the checkpoint is fine; nothing was started"
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("router.grpc_port", "router.internal_port", "router.http_port", "api.port"), 0),
    **dict.fromkeys(("store.host_cache_bytes", "prefill.kv_cache_bytes", "decode.kv_cache_bytes"), "16MB"),
    "model.device": "cpu",
    "model.native": False,
}


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({key: one for key, one in (old | changes).items() if one is not ...}))

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return edit("config.json", **changes)


def content(file: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(data) and None


def without(*files: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / file).unlink() for file in files] and None


def link(file: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return change


def weights(change: Callable[[dict[str, Any]], Any], **settings: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        config(**settings)(folder)

    return apply


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


def with_a_new_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|beyond|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def older_files(settings: str) -> Callable[[Path], None]:
    """The tokenizer as GPT-2 stored it."""

    def change(folder: Path) -> None:
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
        (folder / "tokenizer.json").unlink()
        edit("tokenizer_config.json", tokenizer_class=settings)(folder)

    return change


def index(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / "model.safetensors"), file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return change


HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


@dataclass(frozen=True)
class Odd:
    """A change to a good checkpoint, a part of what is said of it, and whether it is refused."""

    change: Callable[[Path], None]
    says: str = ""
    refused: bool = True
    settings: str = ""


def fine(change: Callable[[Path], None], says: str = "", settings: str = "") -> Odd:
    return Odd(change, says, False, settings)


CASES = {
    "nothing odd": fine(config()),
    # config.json
    "no config": Odd(without("config.json"), "holds no config.json"),
    "config is no JSON": Odd(content("config.json", b"{"), "config.json can't be read"),
    "config is a list": Odd(content("config.json", b"[]"), "JSON list"),
    "config is nested deeply": Odd(content("config.json", b'{"a":' * 90_000), "config.json can't be read"),
    "config leads in a circle": Odd(link("config.json", "config.json"), "config.json can't be read"),
    "config leads nowhere": Odd(link("config.json", "gone"), "config.json does not exist"),
    "no positions": Odd(config(max_position_embeddings=...), "max_position_embeddings"),
    "positions are null": Odd(config(max_position_embeddings=None), "max_position_embeddings"),
    "positions are a text": Odd(config(max_position_embeddings="4096"), "max_position_embeddings"),
    "no vocabulary": Odd(config(vocab_size=...), "vocab_size"),
    "unknown rotation": Odd(config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "'spiral'"),
    "unknown dtype": Odd(config(torch_dtype="int3"), "'int3'"),
    "dtype beside torch_dtype": fine(config(dtype="bfloat16")),
    "unknown architecture": Odd(config(architectures=["NobodyForCausalLM"]), "NobodyForCausalLM"),
    "architectures is a text": Odd(config(architectures="LlamaForCausalLM"), "architectures"),
    "unknown quantization": Odd(config(quantization_config={"quant_method": "aqlm"}), "'aqlm'"),
    "settings nested as well": fine(config(text_config={"vocab_size": 624, "max_position_embeddings": 4_096})),
    # what ends an output
    "ends are null": fine(
        both(
            config(eos_token_id=None),
            edit("generation_config.json", eos_token_id=None),
            edit("tokenizer_config.json", eos_token=None),
        ),
        "no end-of-sequence token",
    ),
    "ends are a list": fine(config(eos_token_id=[1, 5])),
    "an end beyond the vocabulary": fine(config(eos_token_id=[1, 70_000]), "70000 is beyond the vocabulary"),
    "an end is negative": Odd(config(eos_token_id=-1), "eos_token_id is -1"),
    "an end is a text": Odd(edit("generation_config.json", eos_token_id="x"), "eos_token_id is 'x'"),
    "an end that is no token": fine(edit("tokenizer_config.json", eos_token="<|nobody|>"), "'<|nobody|>'"),
    "an end of the wrong type": Odd(edit("tokenizer_config.json", eos_token=5), "eos_token is 5"),
    # generation_config.json
    "no generation config": fine(without("generation_config.json")),
    "generation config is no JSON": Odd(content("generation_config.json", b"\xff\xfe{"), "generation_config.json"),
    "generation config leads nowhere": Odd(link("generation_config.json", "gone"), "generation_config.json"),
    "generation config makes no sense": Odd(edit("generation_config.json", do_sample=True, top_p=7), "top_p"),
    # the tokenizer
    "a token beyond the vocabulary": fine(with_a_new_token),
    "tokenizer is broken": Odd(content("tokenizer.json", b'{"model": {}}'), "tokenizer.json is no tokenizer"),
    "tokenizer leads in a circle": Odd(link("tokenizer.json", "tokenizer.json"), "tokenizer.json is no tokenizer"),
    "no tokenizer": Odd(without("tokenizer.json"), "skip_tokenizer_init"),
    "no tokenizer, token ids alone": fine(without("tokenizer.json"), settings="model.skip_tokenizer_init=true"),
    "older files of a known class": fine(older_files("GPT2Tokenizer")),
    "older files of no class": Odd(older_files("NobodysTokenizer"), "transformers can't make it of merges.txt"),
    "a SentencePiece model that is broken": Odd(
        both(without("tokenizer.json"), content("tokenizer.model", b"no model")), "make it of tokenizer.model"
    ),
    "tokenizer settings are no JSON": Odd(content("tokenizer_config.json", b"{,}"), "tokenizer_config.json"),
    "tokenizer settings are a list": Odd(content("tokenizer_config.json", b"[]"), "JSON list"),
    "special tokens are no JSON": Odd(
        both(content("special_tokens_map.json", b"{"), edit("tokenizer_config.json", eos_token=None)), "special_tokens"
    ),
    # the chat template
    "template is a number": Odd(edit("tokenizer_config.json", chat_template=5), "chat_template"),
    "template is an object": Odd(edit("tokenizer_config.json", chat_template={"a": "b"}), "chat_template"),
    "template is broken": fine(edit("tokenizer_config.json", chat_template="{% if %}"), "no template"),
    "template is no text": Odd(content("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja can't be read"),
    "template leads nowhere": Odd(link("chat_template.jinja", "gone"), "chat_template.jinja can't be read"),
    # the weights
    "no weights": Odd(without("model.safetensors"), "pickled"),
    "weights are cut off": Odd(lambda folder: os.truncate(folder / "model.safetensors", 90_000), "can't be read"),
    "weights lead in a circle": Odd(link("model.safetensors", "model.safetensors"), "pickled"),
    "a shard is missing": Odd(index("model-00001.safetensors"), "model-00001.safetensors, which is missing"),
    "a shard elsewhere": Odd(index("../model.safetensors"), "not a file beside it"),
    "a tensor is missing": Odd(weights(lambda all_: all_.pop(NORM)), f"no tensor {NORM}"),
    "a tensor of another shape": Odd(weights(lambda all_: all_.update({NORM: np.ones(3, np.float32)})), "shape [3]"),
    "a tensor of another kind": Odd(weights(lambda all_: all_.update({NORM: np.ones(128)})), "is F64"),
    "vocabulary above the embedding's rows": Odd(config(vocab_size=700), "shape [624, 128]"),
    "vocabulary below the embedding's rows": Odd(config(vocab_size=600), "shape [624, 128]"),
    "no head": Odd(weights(lambda all_: all_.pop(HEAD)), f"no tensor {HEAD}"),
    "a tied head": fine(weights(lambda all_: all_.pop(HEAD), tie_word_embeddings=True)),
    "a tied copy": fine(weights(lambda all_: all_.update({HEAD: all_[EMBEDDING].copy()}), tie_word_embeddings=True)),
    "a tied head that differs": fine(config(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "a head that stands for the embedding": fine(weights(lambda all_: all_.pop(EMBEDDING), tie_word_embeddings=True)),
    "left over": fine(weights(lambda all_: all_.update({"visual.x": np.ones(3, np.float32)})), "such as visual.x"),
    "left over since always": fine(
        weights(lambda all_: all_.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}))
    ),
}


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is refused, and what is said of it."""

    refused: bool
    says: list[str]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(requirements, "_find", lambda: None)

    def stop(*_: object) -> None:
        raise StartupError(_PASSED)

    monkeypatch.setattr(bring_up, "_compile_kernels", stop)  # the first that `up` does after its checks


def settings_of(odd: Odd) -> list[str]:
    overrides = [
        f"{name}={json.dumps(value) if isinstance(value, bool) else value}" for name, value in _SETTINGS.items()
    ]
    return [part for one in (*overrides, odd.settings) if one for part in ("--set", one)]


def of_doctor(folder: Path, odd: Odd) -> Verdict:
    result = CliRunner().invoke(app, ["doctor", str(folder), *settings_of(odd), "--json"])
    report = json.loads(result.stdout)
    if "error" in report:
        return Verdict(result.exit_code == 1, [report["error"]["message"]])
    texts = [report["why"], *(part for one in report["findings"] for part in (one["found"], one["advice"]))]
    return Verdict(result.exit_code == 1, texts)


def of_up(folder: Path, odd: Odd) -> Verdict:
    result = CliRunner().invoke(app, ["up", "--model", str(folder), *settings_of(odd), "--json"])
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]["message"]
    notes = [line.removeprefix("note: ") for line in result.stderr.splitlines()]
    return Verdict(error != _PASSED, [error] if error != _PASSED else notes)


def of_processes(chosen: Config) -> Verdict:
    """What routers and workers do with it."""
    refused: list[str] = []
    for start in (lambda: load_model(chosen.model), lambda: load_runner.load(chosen, "decode")):
        try:
            started = start()
            assert not isinstance(started, Engine) or started.has_lm_head
        except BatonError as error:
            refused.append(str(error))
    return Verdict(bool(refused), refused)


@pytest.mark.parametrize("name", CASES)
def test_the_verdicts_agree(name: str, tmp_path: Path):
    odd, folder = CASES[name], random_model.write(tmp_path / "model")
    odd.change(folder)
    chosen = load_config(overrides=_SETTINGS)
    skip = bool(odd.settings)
    model = msgspec.structs.replace(chosen.model, path=str(folder), skip_tokenizer_init=skip)
    processes = of_processes(msgspec.structs.replace(chosen, model=model))
    doctor, up = of_doctor(folder, odd), of_up(folder, odd)
    assert (processes.refused, doctor.refused, up.refused) == (odd.refused,) * 3, (processes, doctor, up)
    if odd.refused:
        assert set(up.says) <= set(doctor.says)
        assert "\n" not in up.says[0]
        if name != "no config":  # `up` need not begin to read
            assert set(up.says) <= set(processes.says)
    if odd.says:
        assert any(odd.says in one for one in up.says), up.says
        assert any(odd.says in one for one in doctor.says), doctor.says
