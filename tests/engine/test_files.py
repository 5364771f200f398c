"""A checkpoint's name is a path or a hub id; the hub itself is never asked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints import hub
from baton.errors import ModelNotFound


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/model") == Path("owner/model")


@pytest.mark.parametrize("model", ["/no/such/directory", "./here", "../up", "~/nothing", "a/b/c", "", "own er/model"])
def test_what_is_neither_path_nor_id(model: str):
    with pytest.raises(ModelNotFound, match="is not a directory, and no hub id"):
        hub.resolve(model)


def test_an_id_is_fetched_without_code_or_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.resolve("owner/model") == tmp_path
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked["owner/model"])


@pytest.mark.parametrize("error", [OSError("connection refused"), ValueError("bad id"), RuntimeError(), TimeoutError()])
def test_whatever_the_hub_raises_has_our_type(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelNotFound, match="owner/model"):
        hub.resolve("owner/model")
