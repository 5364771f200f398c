"""Two models behind one router: each answers with its own tokens, and loses nothing when the other's worker dies."""

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton.client import Client
from baton.config import CascadeConfig, Config, FurtherModel
from baton.errors import BatonError, InvalidRequest, ModelMismatch, PermissionDenied
from deploy.cli import app
from deploy.local import LocalCluster
from tests.processes.test_failures import LONG, expected
from tests.support import checkpoints, workload
from tests.support.browser import Watched, launched
from tests.support.cluster import Streams, at_rest
from tests.support.eventually import DEADLINE, eventually

PROMPTS = [LONG[:300], LONG[300:450], LONG[500:540]]
TOKENS = 100


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint of the same shape, with other weights and another context."""
    return checkpoints.make("llama", tmp_path / "other", seed=5)


def settings(path: Path, other: Path) -> Config:
    quick = {"cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000, **workload.SLOW_ENGINE}
    first = workload.settings(path, 1, 1, **quick, **{"model.served_model_name": "first"})
    model = msgspec.structs.replace(first.model, path=str(other), served_model_name="second")
    cascades = {"both": CascadeConfig(small="first", large="second", tokens=4, min_logprob=0.0, classes=[-1])}
    return msgspec.structs.replace(first, models=(FurtherModel(model=model, prefill=1, decode=1),), cascades=cascades)


def post(cluster: LocalCluster, model: str, prompt: list[int]) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    url, kind = f"http://{cluster.api_of('router')}/v1/completions", {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        return json.load(answer)


def test_each_model_answers_while_a_worker_of_the_other_dies(path: Path, other: Path, tmp_path: Path) -> None:
    paths = {"first": path, "second": other}
    with LocalCluster(settings(path, other), tmp_path) as cluster:
        assert set(cluster.pids) == {
            "router", "store-0", "prefill-0", "decode-0", "store-m1-0", "prefill-m1-0", "decode-m1-0"
        }  # fmt: skip
        streams = Streams(cluster)
        futures = {
            (name, number): streams.start(prompt, TOKENS, model=name)
            for number, prompt in enumerate(PROMPTS)
            for name in paths
        }
        eventually(lambda: all(len(seen) > 5 for seen in streams.seen), what="all streams under way")
        cluster.kill("decode-m1-0")
        for (name, _), future in futures.items():
            if name == "first":
                assert future.result(DEADLINE).work.attempts == 1, "it should not have noticed"
        cluster.start("decode-m1-0")
        for ((name, number), future), seen in zip(futures.items(), streams.seen, strict=True):
            work = future.result(DEADLINE).work
            assert seen == expected(paths[name], PROMPTS[number], TOKENS)
            assert set(work.decode_workers) == {"decode-0" if name == "first" else "decode-m1-0"}
            assert work.prefill_worker in ("", "prefill-0" if name == "first" else "prefill-m1-0")
        for name, folder in paths.items():  # over HTTP, and no page of one model serves the other
            answer = post(cluster, name, LONG[600:700])
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == expected(folder, LONG[600:700], 8)
        for script, names in (("several_models", ()), ("cascade", ("both", "first"))):
            path_of = Path(__file__).parents[2] / "examples" / f"{script}.py"
            command = [sys.executable, str(path_of), f"http://{cluster.api_of('router')}", *names]
            printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
            assert [line.partition(":")[0] for line in printed.splitlines()] == [
                *(names or ("first", "second", "both"))
            ]
        answer = post(cluster, "both", LONG[300:350])  # of random weights, no model is sure
        assert answer["choices"][0]["token_ids"] == expected(other, LONG[300:350], 8)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post(cluster, "third", PROMPTS[0])
        with Client(cluster.address, cluster.operator) as client:
            with pytest.raises(ModelMismatch, match="this cluster serves 'first', 'second', 'both'"):
                client.generate(PROMPTS[0], model="third", timeout=DEADLINE).result()
            assert client.explain(client.requests(1)[0].name).request.name
            with pytest.raises(BatonError, match="decode worker"):  # of this model, whatever the other one has
                client.set_role("decode-m1-0", "prefill")
        with urllib.request.urlopen(f"http://{cluster.api_of('router')}/metrics", timeout=DEADLINE) as page:
            text = page.read().decode()
        assert all(f'model_name="{name}"' in text for name in paths)
        eventually(lambda: at_rest(cluster), what="everything freed")


@pytest.fixture(scope="module")
def both(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("both")
    with LocalCluster(settings(path, checkpoints.make("llama", folder / "other", seed=5)), folder) as cluster:
        yield cluster


def test_pins_and_weights_are_of_the_model_that_is_named(both: LocalCluster, path: Path, tmp_path: Path) -> None:
    third = checkpoints.make("llama", tmp_path / "third", seed=6)
    prompt = LONG[:100]
    with Client(both.address, both.operator) as client:
        pins = {name: client.pin_prefix(prompt, id=name, model=name, timeout=DEADLINE) for name in ("first", "second")}
        assert {pin.tokens_computed for pin in pins.values()} == {96}, "one has found the other's pages"
        assert [pin.id for pin in client.pins()] == ["first", "second"]
        before = {each.name: each.incarnation for each in client.status().processes if each.model == "first"}
        assert {"prefill-0", "decode-0", "store-0"} == before.keys()
        command = ["reload", str(third), "--model", "second", "--operator", both.operator]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        after = {each.name: each.incarnation for each in client.status().processes if each.model == "first"}
        assert before == after
        for name, folder in (("first", path), ("second", third)):
            assert post(both, name, prompt)["choices"][0]["token_ids"] == expected(folder, prompt, 8)
        with pytest.raises(ModelMismatch, match="'third'; there are those of 'first', 'second'"):
            client.reload_weights(str(third), model="third")
        with pytest.raises(ModelMismatch, match="'both'"):  # a cascade has no workers
            client.pin_prefix(prompt, model="both")
        with pytest.raises(InvalidRequest, match="a name of the model 'first'"):
            client.load_adapter("first", str(third), model="second")
        with pytest.raises(PermissionDenied, match="max_loras"):
            client.load_adapter("poet", str(third), model="second")
        assert not client.adapters()


@pytest.mark.alone  # a browser draws with the processor
def test_the_page_shows_the_model_that_is_chosen(both: LocalCluster) -> None:
    with launched() as browser, contextlib.closing(Watched(browser)) as watched:
        watched.page.goto(f"http://{both.api_of('router')}/dashboard")
        watched.page.locator(".proc[data-key='decode-0'][data-state='live']").wait_for()
        watched.page.locator("#models").select_option("second")
        watched.page.locator(".proc[data-key='decode-m1-0'][data-state='live']").wait_for()
        assert watched.page.locator("#model").inner_text() == "second"
        assert watched.page.locator(".proc[data-key='decode-0']").count() == 0
        assert not watched.mistakes
