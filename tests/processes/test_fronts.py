"""The HTTP APIs in processes of their own: the same answers, and the death of one costs its own streams alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from deploy.local import LocalCluster
from tests import checkpoints
from tests.support import workload
from tests.support.cluster import at_rest
from tests.support.eventually import DEADLINE, eventually

PROMPT = [5, 77, 400, 12, 9, 31]
GREEDY: Any = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = workload.settings(path, 0, 1, **{"api.processes": 2, **workload.SLOW_ENGINE})
    with LocalCluster(settings, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def base(cluster: LocalCluster) -> str:
    assert cluster.addresses is not None
    return f"http://{cluster.addresses.api}"


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base(cluster)}/v1", api_key="none", max_retries=0) as made:
        yield made


def fronts(cluster: LocalCluster) -> dict[int, int]:
    """Clients of each front, by process id. Fronts are children of the router."""
    listening = int(base(cluster).rpartition(":")[2])
    found: dict[int, int] = {}
    for child in psutil.Process(cluster.pids["router"]).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "router.frontend.front" in child.cmdline():
                clients = [c for c in child.net_connections() if c.status == "ESTABLISHED" and c.laddr[1] == listening]
                found[child.pid] = len(clients)
    return found


def test_answers_are_those_of_the_router(cluster: LocalCluster, client: openai.OpenAI, path: Path) -> None:
    right = checkpoints.reference(path).generate(PROMPT, 24)[0]
    answer: Any = client.completions.create(model="", prompt=PROMPT, max_tokens=24, logprobs=2, **GREEDY)
    assert answer.choices[0].token_ids == right
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == 24
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.metrics["hops_ms"]["first_token"] > 0
    scored: Any = client.completions.create(
        model="", prompt=PROMPT, max_tokens=1, temperature=0.0, extra_body={"prompt_logprobs": 1}
    )
    first, *others = scored.choices[0].prompt_logprobs
    assert first is None
    assert all(told[str(token)]["rank"] >= 1 for told, token in zip(others, PROMPT[1:], strict=True))
    streamed: Any = client.completions.create(model="", prompt=PROMPT, max_tokens=24, stream=True, n=2, **GREEDY)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for chunk in streamed:
        assert chunk.system_fingerprint == answer.system_fingerprint
        tokens[chunk.choices[0].index] += getattr(chunk.choices[0], "token_ids", None) or []
    assert tokens == {0: right, 1: right}


def test_the_dashboard_comes_through_a_front(cluster: LocalCluster, client: openai.OpenAI) -> None:
    client.completions.create(model="", prompt=PROMPT, max_tokens=2, extra_headers={"x-request-id": "mine"})
    with urllib.request.urlopen(f"{base(cluster)}/dashboard", timeout=DEADLINE) as page:
        assert "text/html" in page.headers["content-type"]

    def read(part: str) -> Any:
        with urllib.request.urlopen(f"{base(cluster)}/dashboard/api/{part}", timeout=DEADLINE) as answer:
            return json.load(answer)

    def rows() -> list[Any]:
        return [row for row in read("snapshot")["requests"] if row["request_id"] == "mine"]

    eventually(rows, "the request is listed")
    assert read("history")["samples"]
    assert read(f"request?name={rows()[0]['name']}")["request"]["request_id"] == "mine"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read("request?name=nothing")


def test_what_is_wrong_is_refused_and_health_is_the_routers(cluster: LocalCluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="", prompt=PROMPT, max_tokens=1_000_000)
    for page in ("/live", "/ready"):
        with urllib.request.urlopen(base(cluster) + page, timeout=DEADLINE) as answer:
            assert json.loads(answer.read())["status"]
    with urllib.request.urlopen(base(cluster) + "/metrics", timeout=DEADLINE) as answer:
        assert b"vllm:prompt_tokens_total" in answer.read()


def discovered(cluster: LocalCluster) -> dict[str, str]:
    """Metrics addresses of the fronts that the router tells Prometheus, by name."""
    assert cluster.addresses is not None
    with urllib.request.urlopen(f"http://{cluster.addresses.http}/discovery", timeout=DEADLINE) as answer:
        found = json.load(answer)
    return {each["labels"]["name"]: each["targets"][0] for each in found if each["labels"]["role"] == "front"}


def metrics_of(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_each_front_has_a_page_of_metrics(cluster: LocalCluster, client: openai.OpenAI) -> None:
    pages = discovered(cluster)
    assert sorted(pages) == ["router-front-0", "router-front-1"]

    def handed() -> float:
        return sum(metrics_of(address)["baton_front_requests_total"] for address in pages.values())

    before = handed()
    with client.completions.create(model="", prompt=PROMPT, max_tokens=400, stream=True, **GREEDY):
        eventually(lambda: handed() > before, "the request is counted")
        eventually(
            lambda: sum(metrics_of(address)["baton_front_requests_running"] for address in pages.values()) == 1,
            "it is counted as running",
        )
    eventually(
        lambda: not any(metrics_of(address)["baton_front_requests_running"] for address in pages.values()),
        "a request whose client is gone has ended",
    )
    for address in pages.values():
        assert metrics_of(address)["process_resident_memory_bytes"] > 0
        assert metrics_of(address)["baton_loop_age_seconds"] < 20


def test_a_front_that_is_killed_takes_its_own_streams_along_and_comes_back(
    cluster: LocalCluster, client: openai.OpenAI, path: Path
) -> None:
    right = checkpoints.reference(path).generate(PROMPT, 300)[0]
    assert len(fronts(cluster)) == 2
    with ThreadPoolExecutor(16) as pool:
        seen: list[list[int]] = []

        def stream(mine: list[int]) -> bool:
            try:
                with openai.OpenAI(base_url=f"{base(cluster)}/v1", api_key="none", max_retries=0) as own:
                    chunks: Any = own.completions.create(model="", prompt=PROMPT, max_tokens=300, stream=True, **GREEDY)
                    for chunk in chunks:
                        mine += getattr(chunk.choices[0], "token_ids", None) or []
            except Exception:  # noqa: BLE001 the connection breaks off in one way or another
                return False
            return len(mine) == 300

        running = []
        while len(running) < 2 or (0 in fronts(cluster).values() and len(running) < 16):
            seen.append([])
            running.append(pool.submit(stream, seen[-1]))
            eventually(lambda: len(seen[-1]) > 2, what="the stream under way")
        clients = fronts(cluster)
        victim = max(clients, key=lambda pid: clients[pid])
        os.kill(victim, signal.SIGKILL)
        whole = [future.result(DEADLINE) for future in running]
    assert sum(whole) >= sum(clients.values()) - clients[victim]
    assert not all(whole)
    for number, tokens in enumerate(seen):
        assert tokens == right[: len(tokens)]
        assert (len(tokens) == 300) == whole[number]
    eventually(lambda: len(fronts(cluster)) == 2 and victim not in fronts(cluster), what="another front")
    eventually(lambda: len(discovered(cluster)) == 2, what="the metrics of another front")
    assert all(metrics_of(address) for address in discovered(cluster).values())
    eventually(lambda: at_rest(cluster), what="everything freed")
    answer: Any = client.completions.create(model="", prompt=PROMPT, max_tokens=5, **GREEDY)
    assert answer.choices[0].token_ids == right[:5]
