"""Traces of real processes: what is in them, that spans nest, and that hardly anything of a loop is missing."""

import json
import random
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.client import Client
from baton.errors import TraceConflict
from deploy.cli import app
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.eventually import eventually

_RNG = random.Random(5)
PROMPT = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(200)]
STEPS = 20
FILES = 5
PROCESSES = ("prefill-0", "decode-0", "store-0")
SPANS = {
    *("turn", "wait", "read the routers", "read the store", "tell the router", "call the store", "heartbeat"),
    *("handle Decode", "handle StepDone", "take copies", "plan"),
    *("step", "inputs", "sampling"),
}


@dataclass(frozen=True)
class Span:
    """Times in microseconds."""

    name: str
    category: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


def read(path: Path) -> list[Span]:
    """The spans of one file, in the order in which they began; outer ones first."""
    events = json.loads(path.read_text())["traceEvents"]
    spans = [Span(e["name"], e["cat"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def depths(spans: Sequence[Span]) -> list[int]:
    """How deep each one lies. Fails where two overlap and neither holds the other."""
    result: list[int] = []
    open_spans: list[Span] = []
    for span in spans:
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        assert not open_spans or span.end <= open_spans[-1].end + 0.002, (open_spans[-1], span)  # it is rounded
        result.append(len(open_spans))
        open_spans.append(span)
    return result


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("trace")
    path = checkpoints.make("llama", folder / "model")
    settings = workload.SLOW_ENGINE | {"cluster.trace_steps": 2, "cluster.trace_files": FILES}
    with LocalCluster(workload.settings(path, 1, 1, **settings), folder / "cluster") as cluster:
        workload.ask(cluster.address, PROMPT)
        for process in PROCESSES:
            eventually(lambda process=process: traces(cluster, process), what=f"the trace of {process}")
        yield cluster


def traces(cluster: LocalCluster, process: str) -> list[Path]:
    return sorted(cluster.config.cluster.traces.glob(f"{process}-*.json"))


def begin(client: Client, process: str, steps: int) -> Path:
    """Have a process trace its next steps, once the router has heard that no other trace is made."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Path(client.profile(process, steps).path)
        except TraceConflict:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def test_each_process_traces_its_first_steps_when_told_to(cluster: LocalCluster) -> None:
    for process in PROCESSES:
        (path,) = traces(cluster, process)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        depths(read(path))


def test_the_next_steps_of_a_decode_worker_that_runs(cluster: LocalCluster) -> None:
    command = ["profile", "decode-0", "--steps", str(STEPS), "--operator", cluster.operator, "--json"]
    outputs: list[str] = []

    def asks() -> bool:
        """Whether it is done; not while the router has yet to hear that the traces of the first steps are written."""
        result = CliRunner().invoke(app, command)
        outputs.append(result.output)
        return result.exit_code == 0

    eventually(asks, what="a trace to begin")
    answer = json.loads(outputs[-1])
    assert (answer["process"], answer["steps"], answer["node"]) == ("decode-0", STEPS, cluster.node)
    path = Path(answer["path"])
    # Other tokens than above: their pages are on no device yet, and come as copies.
    workload.ask(cluster.address, PROMPT[::-1], STEPS + 8)
    eventually(path.exists, what="the trace")
    spans = read(path)
    by_depth = list(zip(depths(spans), spans, strict=True))
    assert sum(span.name == "step" for span in spans) == STEPS
    assert {span.category for span in spans} == {"loop", "scheduler", "engine", "copies", "sockets"}
    assert {span.name for span in spans} >= SPANS
    turns = [span for depth, span in by_depth if depth == 0]
    assert {span.name for span in turns} == {"turn"}
    loop = turns[-1].end - turns[0].start
    named = sum(span.duration for depth, span in by_depth if depth == 1)
    assert named >= 0.9 * loop, f"{named / loop:.3f} of the loop's time has a name"


def test_the_next_calls_of_a_store(cluster: LocalCluster) -> None:
    with Client(cluster.address, cluster.operator) as client:
        path = begin(client, "store-0", 5)
    workload.ask(cluster.address, PROMPT[1:])
    eventually(path.exists, what="the trace")
    assert {"turn", "wait", "calls", "reply", "publish"} <= {span.name for span in read(path)}


def test_the_oldest_traces_are_removed(cluster: LocalCluster) -> None:
    folder = cluster.config.cluster.traces
    with Client(operator=cluster.operator) as client:
        paths: list[Path] = []
        for _ in range(FILES + 2):
            paths.append(begin(client, "prefill-0", 10_000))
            client.stop_profile("prefill-0")
            eventually(paths[-1].exists, what="the trace")
    eventually(lambda: len(list(folder.iterdir())) == FILES, what="the oldest to be removed")
    assert not any(path.exists() for path in paths[:2])
    assert paths[-1].exists()


def test_a_worker_that_is_told_to_stop_writes_what_it_has(cluster: LocalCluster) -> None:
    with Client(cluster.address, cluster.operator) as client:
        path = begin(client, "prefill-0", 10_000)
    log = cluster.config.cluster.logs / "prefill-0.log"
    eventually(lambda: path.name in log.read_text(), what="the word that it traces")
    cluster.kill("prefill-0", signal.SIGTERM)
    eventually(path.exists, what="the trace")
    assert all(span.name != "step" for span in read(path))
