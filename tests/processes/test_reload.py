"""The weights of a running cluster are replaced: the same processes, tokens of the new weights, no page of the old."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.client import Client
from baton.errors import InvalidRequest, Unavailable
from deploy.cli import app
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest
from tests.support.eventually import eventually
from tests.support.fork_server import LOADS

PROMPTS = [prompt for prompt in workload.prompts() if 2 * workload.PAGE < len(prompt) <= 300][:8]
PROMPT = PROMPTS[0]
DEADLINE = 120.0


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `path` with other weights."""
    return checkpoints.make("llama", tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    # Without proposals, so that a text of 1,500 tokens takes its time.
    settings = workload.settings(path, 1, 2, **{"cluster.routers": 2, "model.speculation": "off"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOADS, "3")
        with LocalCluster(settings, tmp_path_factory.mktemp("reload")) as cluster:
            yield cluster


def load(cluster: LocalCluster, path: Path, *more: str) -> None:
    result = CliRunner().invoke(app, ["reload", str(path), *more, "--operator", cluster.operator])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == f"all workers serve the weights of {path}"


def digest(cluster: LocalCluster) -> bytes:
    with Client(cluster.address, cluster.operator) as client:
        model = client.status().model
    assert model is not None
    return model.namespace.model


def pinned(cluster: LocalCluster) -> list[str]:
    with Client(cluster.address, cluster.operator) as client:
        return [pin.node for pin in client.pins()]


def test_new_weights_and_back(cluster: LocalCluster, path: Path, other: Path) -> None:
    pids, first = cluster.pids, digest(cluster)
    right = {each: workload.references(each, PROMPTS) for each in (path, other)}
    assert right[path] != right[other]
    workload.compare(path, PROMPTS, workload.ask_all(cluster.address, PROMPTS), right[path])
    assert workload.ask(cluster.address, PROMPT).usage.cached_tokens
    with Client(cluster.address, cluster.operator) as client:
        client.pin_prefix(PROMPT[::-1], id="kept", timeout=30)
    for model in (other, path):
        load(cluster, model)
        answer = workload.ask(cluster.address, PROMPT)
        assert not answer.usage.cached_tokens, "pages of the weights before"
        eventually(lambda: pinned(cluster) == ["local"], what="the pin, made anew")
        workload.compare(model, PROMPTS, workload.ask_all(cluster.address, PROMPTS), right[model])
        assert (digest(cluster) == first) == (model == path)
    assert cluster.pids == pids
    with Client(cluster.address, cluster.operator) as client:
        client.unpin("kept")
    eventually(lambda: at_rest(cluster), what="everything freed")


@pytest.mark.native
def test_requests_that_run_end_first_and_others_wait(cluster: LocalCluster, path: Path, other: Path) -> None:
    streams = Streams(cluster)
    long = [streams.start(PROMPT, 200) for _ in range(4)]
    eventually(lambda: all(streams.seen), what="tokens of all")
    with Client(cluster.address, cluster.operator) as client:
        client.reload_weights(str(other))
        late = [streams.start(prompt, workload.OUTPUT) for prompt in PROMPTS]
        for future in long:
            future.result(DEADLINE)
        for future in late:
            future.result(DEADLINE)
    expected = checkpoints.reference(path).generate(PROMPT, 200)[0]
    assert streams.seen[:4] == [expected] * 4
    assert streams.seen[4:] == [workload.references(other, PROMPTS)[tuple(prompt)] for prompt in PROMPTS]
    load(cluster, path)


@pytest.mark.native
def test_after_the_patience_a_text_of_two_models_is_refused(cluster: LocalCluster, path: Path, other: Path) -> None:
    streams = Streams(cluster)
    running = streams.start(PROMPT, 1_500)
    eventually(lambda: all(streams.seen), what="a token")
    load(cluster, other, "--patience", "0")
    with pytest.raises(Unavailable, match="the model was replaced while this request was being served"):
        running.result(DEADLINE)
    load(cluster, path)


@pytest.mark.native
def test_another_model_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    before = digest(cluster)
    wide = checkpoints.make("llama", tmp_path / "wide", num_hidden_layers=2)
    with Client(cluster.address, cluster.operator) as client:
        for path, message in (
            (str(wide), "is of another model than the served one"),
            (str(tmp_path / "none"), "does not exist; is .* the directory of a checkpoint"),
            ("model", "give the absolute path"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                client.reload_weights(path)
    assert digest(cluster) == before
    assert len(workload.ask(cluster.address, PROMPT).token_ids) == workload.OUTPUT
