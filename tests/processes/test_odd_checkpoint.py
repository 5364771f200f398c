"""A checkpoint that is odd in every way that transformers reads, served by real processes."""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from deploy.local import LocalCluster
from tests.support import checkpoints, workload

PROMPT = "bonfan korles dimin taras"


@pytest.fixture
def odd(path: Path, tmp_path: Path) -> Path:
    """GPT-2's tokenizer files, another head than the tied one, a tensor too many, and an end that the tokenizer names
    alone."""
    folder = Path(shutil.copytree(path, tmp_path / "odd"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(7, 0).contiguous()
    save_file(tensors | {"left.over": torch.ones(3)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 998}))
    return folder


def settings(folder: Path, eos: str) -> None:
    fields = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": eos, "unk_token": None, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_it_is_served_as_transformers_reads_it(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings(odd, "<pad>")
    theirs = AutoTokenizer.from_pretrained(odd)
    prompt = theirs(PROMPT)["input_ids"]
    output, gaps = checkpoints.reference(odd).generate(prompt, 30)
    assert min(gaps) > 1e-3
    last = next(at for at in range(8, 30) if output.index(output[at]) == at)  # its first, so the output ends there
    settings(odd, theirs.convert_ids_to_tokens(output[last]))
    with LocalCluster(workload.settings(odd, 1, 1), tmp_path / "cluster") as cluster:

        def complete(**fields: Any) -> Any:
            basis = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "logprobs": 5, "return_token_ids": True}
            url, body = f"http://{cluster.api_of('router')}/v1/completions", json.dumps(basis | fields).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]

        choice = complete()
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == output[: last + 1]
        assert choice["finish_reason"] == "stop"
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == theirs.decode(output[:last])
        assert complete(ignore_eos=True)["token_ids"] == output
        later = complete(min_tokens=last + 3)["token_ids"]
        assert len(later) >= last + 3
        assert output[last] not in later[: last + 2]
        assert complete(structured_outputs={"regex": "[a-z]{3}"})["finish_reason"] == "stop"
