"""Workers change their role in a running cluster: the same processes, no weights read again, and no token lost."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.client import Client
from deploy.cli import app
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, process
from tests.support.eventually import eventually

_RNG = random.Random(5)
PROMPT = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(200)]
OTHER = PROMPT[::-1]
OUTPUT = 150
DEADLINE = 60.0


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster with its weights deleted from the disk once it is up: a process that reads them again fails."""
    folder = tmp_path_factory.mktemp("roles")
    own = Path(shutil.copytree(path, folder / "model"))
    chosen = workload.settings(own, 1, 2, **workload.SLOW_ENGINE)
    with LocalCluster(chosen, folder / "cluster") as cluster:
        for weights in own.glob("*.safetensors"):
            weights.unlink()
        yield cluster


def role_of(cluster: LocalCluster, name: str) -> str:
    status = process(cluster, name)
    assert status.state == "live"
    return status.role


def change(cluster: LocalCluster, name: str, role: str, *more: str) -> None:
    result = CliRunner().invoke(app, ["role", name, role, *more, "--operator", cluster.operator])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == f"{name} is a {role} worker now"


@pytest.mark.technique("Roles that change under load")
def test_workers_change_their_roles_under_load(cluster: LocalCluster) -> None:
    pids, streams = cluster.pids, Streams(cluster)
    right = [workload.ask(cluster.address, prompt, OUTPUT).token_ids for prompt in (PROMPT, OTHER)]
    futures = [streams.start(PROMPT, OUTPUT) for _ in range(4)]
    eventually(lambda: all(streams.seen), what="tokens of all")
    change(cluster, "decode-1", "prefill")  # what it has it goes on with until its end
    assert [future.result(DEADLINE).work.attempts for future in futures] == [1] * 4
    assert role_of(cluster, "decode-1") == "prefill"
    change(cluster, "prefill-0", "decode")
    with Client(cluster.address, cluster.operator) as client:
        client.drain("prefill-0")  # so the next two go to the other one
        futures += [streams.start(OTHER, OUTPUT) for _ in range(2)]
        eventually(lambda: all(streams.seen), what="tokens of all")
        client.drain("prefill-0", undo=True)
    futures += [streams.start(OTHER, OUTPUT) for _ in range(2)]
    eventually(lambda: all(streams.seen), what="tokens of all")
    change(cluster, "decode-0", "prefill", "--patience", "0")  # what it has goes on at the other at once
    finished = [future.result(DEADLINE) for future in futures[4:]]
    decoders = [tuple(each.work.decode_workers) for each in finished]
    assert decoders[:2] == [("decode-0", "prefill-0")] * 2
    assert {*decoders[2:]} <= {("decode-0", "prefill-0"), ("prefill-0",)}
    assert role_of(cluster, "prefill-0") == "decode"
    answer = workload.ask(cluster.address, PROMPT[5:60], 8)
    assert list(answer.work.decode_workers) == ["prefill-0"]
    assert answer.work.prefill_worker in ("decode-0", "decode-1")
    assert streams.seen == [right[0]] * 4 + [right[1]] * 4
    change(cluster, "decode-1", "decode")
    assert role_of(cluster, "decode-1") == "decode"
    assert cluster.pids == pids, "nobody was started anew"
    eventually(lambda: at_rest(cluster), what="everything freed")
