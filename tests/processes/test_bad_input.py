"""Bad input from clients, peers, files and the machine: a clear typed error each, and the cluster goes on."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton import config
from baton.client import Client
from baton.errors import BatonError, NonFiniteLogits, StartupError
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually


def refused(cluster: LocalCluster, prompt: Sequence[int], **settings: Any) -> BatonError:
    with Client(cluster.address) as client, pytest.raises(BatonError) as caught:
        client.generate(prompt, timeout=20, **settings).result()
    return caught.value


@pytest.mark.parametrize("prefill", [0, 1], ids=["colocated", "split"])
def test_a_model_that_computes_nan_fails_those_requests_alone(tmp_path: Path, prefill: int) -> None:
    """The embedding of one token is NaN. Prompts with it get an error, and the requests beside them their tokens."""
    path = checkpoints.make("llama", tmp_path / "model", tie_word_embeddings=False)
    whole = [[*range(10 + i, 60 + i)] for i in range(3)]
    reference = checkpoints.reference(path)
    expected = [reference.generate(prompt, 24)[0] for prompt in whole]
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][300] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    settings = workload.settings(path, prefill, 1, **{"model.max_model_len": 200})
    with LocalCluster(settings, tmp_path / "cluster") as cluster:
        assert "maximum context length is 200" in str(refused(cluster, [5] * 201))
        with ThreadPoolExecutor(5) as pool:
            broken = pool.map(lambda at: refused(cluster, [*whole[at], 300], max_tokens=24), range(2))
            answers = list(pool.map(lambda prompt: workload.ask(cluster.address, prompt, 24).token_ids, whole))
            for error in broken:
                assert type(error) is NonFiniteLogits, error
        assert answers == expected
        # Pages of the broken prompts may be cached. What goes on from them breaks as well, and is no wrong token.
        assert type(refused(cluster, [*whole[0], 300, 5], max_tokens=4)) is NonFiniteLogits
        assert workload.ask(cluster.address, whole[0], 24).token_ids == expected[0]
        eventually(lambda: at_rest(cluster), what="everything freed")


def failing(settings: config.Config, folder: Path) -> str:
    """What the cluster says when it can't start; nothing of it may be left."""
    running = LocalCluster(settings, folder)
    with pytest.raises(StartupError) as caught, running:
        pass
    assert not running.pids
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_model_path(tmp_path: Path) -> None:
    assert "/nowhere" in failing(workload.settings(Path("/nowhere/at/all")), tmp_path)


def test_corrupt_safetensors(path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(path, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1_000])
    assert "model.safetensors" in failing(workload.settings(model, 0, 1), tmp_path / "cluster")


def test_too_little_memory_for_a_page_pool(path: Path, tmp_path: Path) -> None:
    error = failing(workload.settings(path, 0, 1, **{"decode.kv_cache_bytes": "4TiB"}), tmp_path)
    assert "decode-0" in error
    assert "page pool" in error


@pytest.mark.parametrize("module", ["router", "kvstore", "worker prefill", "worker decode"])
def test_a_bad_configuration_file_ends_each_process_with_one_line(module: str, tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("nonsense: 1\n")
    command = [sys.executable, "-m", *module.split(), "--config", str(file), "--name", "x"]
    command += [] if module == "router" else ["--router", "tcp://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr
