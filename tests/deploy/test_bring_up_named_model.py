"""Every command and process means the same folder by a model's name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints import named
from baton.config import load
from deploy.control_plane.bring_up import _settle
from router.frontend import served_model
from tests.support.real_weights import needs_smollm2, smollm2

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a smollm2 that was fetched before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = named.MODELS["smollm2"].folder
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("host", "name_stays"), [("127.0.0.1", False), ("10.0.0.1", True)])
def test_other_nodes_are_passed_the_name(host: str, name_stays: bool, here: Path):
    """A node that joins has its own home: there the folder of this one says nothing."""
    texts: list[str] = []
    config = _settle(load(None, {"model.path": "smollm2", "router.host": host}), texts.append)
    assert config.model.path == ("smollm2" if name_stays else str(here))
    assert config.model.served_name == "smollm2"
    assert texts == []


def test_a_directory_of_that_name_is_passed_by_its_path(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    config = _settle(load(None, {"model.path": "smollm2", "router.host": "10.0.0.1"}), pytest.fail)
    assert config.model.path == str(tmp_path / "smollm2")


def baton(*arguments: str) -> Any:
    command = [sys.executable, "-m", "deploy", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@needs_smollm2
def test_doctor_and_size_know_it():
    assert baton("doctor", "smollm2")["engine"] == "native"
    assert baton("size", "smollm2", "--device", "cpu", "--memory", "8GiB")["parameters"] == 134_515_008


@needs_smollm2
def test_a_router_knows_it_and_what_its_authors_recommend():
    model = served_model.load(load(None, {"model.path": "smollm2"}).model)
    assert (model.name, model.folder, model.eos) == ("smollm2", smollm2(), (2,))
    assert (model.defaults.temperature, model.defaults.top_p) == (0.2, 0.5)
    assert model.tokenizer is not None
    assert model.chat_template is not None
