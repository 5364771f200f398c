"""A checkpoint's name is a path or a hub id. The hub of these tests is a server of their own, if any."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints import hub
from baton.errors import ModelNotFound


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_why_silent", lambda: "")


@pytest.fixture(params=["refuses", "is silent", "has no name"])
def no_hub(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a hub that can't be had."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if request.param == "refuses":
            listener.close()
        yield "https://hub.invalid" if request.param == "has no name" else f"http://127.0.0.1:{port}"


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/model") == Path("owner/model")


@pytest.mark.parametrize("model", ["/no/such/directory", "./here", "../up", "~/nothing", "a/b/c", "", "own er/model"])
def test_what_is_neither_path_nor_id(model: str):
    with pytest.raises(ModelNotFound, match="is not a directory, and no hub id"):
        hub.resolve(model)


@pytest.mark.usefixtures("answers")
def test_an_id_is_fetched_without_code_or_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patterns: dict[str, Any] = {}

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        patterns[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.resolve("owner/model") == tmp_path
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns["owner/model"])


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("error", [OSError("connection refused"), ValueError("bad id"), RuntimeError(), TimeoutError()])
def test_whatever_the_hub_raises_has_our_type(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelNotFound, match="owner/model"):
        hub.resolve("owner/model")


_COMMANDS = {
    "size": ["-m", "deploy", "size", "models/typo"],
    "up": ["-m", "deploy", "up", "--model", "models/typo", "--ray", "own"],
    "doctor": ["-m", "deploy", "doctor", "models/typo"],
    "router": ["-m", "router", "--name", "router", "--config", "cluster.yaml"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", _COMMANDS)
def test_no_command_tries_a_hub_for_long_that_does_not_answer(command: str, no_hub: str, tmp_path: Path):
    environment = {**os.environ, "HF_ENDPOINT": no_hub, "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    (tmp_path / "cluster.yaml").write_text("model: {path: models/typo}\n")
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    program = [sys.executable, *_COMMANDS[command]]
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Retrying" not in done.stderr
    assert done.stderr.splitlines()[-1].count("models/typo") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_that_was_fetched_is_used_while_the_hub_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(hub, "_why_silent", lambda: "no route")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.resolve("owner/model") == tmp_path
