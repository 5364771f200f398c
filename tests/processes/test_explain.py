"""Explain and drain with real processes: an explanation matches the events, and no request loses a token to a drain."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.client import Client, Generated
from baton.errors import ProcessNotFound, RequestNotFound
from deploy.cli import app
from deploy.local import LocalCluster
from tests.processes.test_failures import expected
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, process
from tests.support.eventually import eventually
from tests.support.metrics_page import metric

_RNG = random.Random(11)
PROMPT = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(200)]  # 12 full pages, and 8 tokens
DEADLINE = 60.0


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    chosen = workload.settings(path, 1, 2, **workload.SLOW_ENGINE)
    with LocalCluster(chosen, tmp_path_factory.mktemp("explain")) as cluster:
        yield cluster


def baton(cluster: LocalCluster, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--operator", cluster.operator, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def holders(finished: Generated) -> list[str]:
    return ["store-0", finished.work.decode_workers[0]]


@pytest.mark.technique("Requests explained")
def test_what_is_told_of_a_request_is_what_happened(cluster: LocalCluster) -> None:
    first = workload.ask(cluster.address, PROMPT, request_id="first")
    eventually(lambda: all((status := process(cluster, name)) and status.pages_known >= 12 for name in holders(first)))
    second = workload.ask(cluster.address, PROMPT, request_id="second")
    with Client(cluster.address, cluster.operator) as client:
        reports = {name: client.explain(name) for name in ("first", "second")}
    for name, finished in (("first", first), ("second", second)):
        request, (attempt,) = reports[name].request, reports[name].attempts
        assert request.state == "finished"
        assert (request.outcome, request.attempts) == ("length", finished.work.attempts)
        assert attempt.decode_worker == finished.work.decode_workers[0]
        assert attempt.prefill_worker == finished.work.prefill_worker
        assert request.cached_tokens == attempt.actual.cached_tokens == finished.usage.cached_tokens
        # The router counts full pages. The worker that computed the same prompt has the rest of it, too.
        assert 0 <= attempt.actual.cached_tokens - attempt.predicted.cached_tokens < 16
        assert attempt.predicted.ttft_ms > 0
        assert request.ttft_ms == attempt.actual.ttft_ms == finished.timing.first_token
        hops = attempt.hops
        known = [after for hop, after in hops.items() if hop != "prefilled"]
        assert known == sorted(known)
        if "prefilled" in hops:  # the prefill worker's own word, which may come after that of the decode worker
            assert hops["prefill_sent"] < hops["prefilled"] < hops["ended"]
        assert hops["ended"] == finished.timing.finished
    assert reports["first"].attempts[0].prefill_worker == "prefill-0"
    assert reports["first"].request.cached_tokens == 0
    assert reports["second"].attempts[0].predicted.cached_tokens == 192
    assert reports["second"].request.cached_tokens in (192, 199)  # where another worker decodes it, or the same one


@pytest.mark.technique("Prefixes shared within a page")
@pytest.mark.parametrize("rest", [3, 40])
def test_a_prompt_that_leaves_another_one_within_a_page_has_the_tokens_before_cached(
    cluster: LocalCluster, rest: int
) -> None:
    """A decode worker copies the page, and where a full page is missing a prefill worker does."""
    first = [rest, *PROMPT[:0:-1]]
    prompt = [*first[: 3 * workload.PAGE + 5], *PROMPT[:rest]]

    def known() -> dict[str, int]:
        return {name: at.pages_known for name in ("decode-0", "decode-1") if (at := process(cluster, name))}

    before = known()
    (decode,) = workload.ask(cluster.address, first).work.decode_workers
    eventually(lambda: known()[decode] >= before[decode] + 12, what="the router knows the pages")
    answer = workload.ask(cluster.address, prompt, request_id=f"leaves-{rest}")
    with Client(cluster.address, cluster.operator) as client:
        (attempt,) = client.explain(f"leaves-{rest}").attempts
    assert (attempt.prefill_worker == "prefill-0") == (rest == 40)
    assert attempt.predicted.cached_tokens == 48, "the router counts full pages"
    # The other decode worker has only what it fetches, full pages.
    copies = rest == 40 or list(answer.work.decode_workers) == [decode]
    assert attempt.actual.cached_tokens == answer.usage.cached_tokens == 48 + 5 * copies
    if copies:
        copied = attempt.prefill_worker or decode
        eventually(lambda: metric(cluster, copied, "prefix_tokens_copied_total") >= 5, what="the copy in the metrics")
    assert answer.token_ids == workload.ask(cluster.address, prompt, cache_salt="another cache").token_ids


def test_the_command_and_unknown_names(cluster: LocalCluster) -> None:
    workload.ask(cluster.address, PROMPT[:20], request_id="named")
    report = baton(cluster, "explain", "named")
    assert report["request"]["request_id"] == "named"
    listed = baton(cluster, "explain", "--last", "1")["requests"]
    assert [one["request_id"] for one in listed] == ["named"]
    shown = CliRunner().invoke(app, ["explain", "named", "--operator", cluster.operator])
    assert "attempt 1" in shown.stdout
    assert "cached tokens" in shown.stdout
    assert "received 0 → placed" in shown.stdout
    assert "named" in CliRunner().invoke(app, ["explain", "--last", "3", "--operator", cluster.operator]).stdout
    with Client(cluster.address, cluster.operator) as client, pytest.raises(RequestNotFound, match="nobody"):
        client.explain("nobody")


def test_the_turns_of_a_session_side_by_side(cluster: LocalCluster) -> None:
    rng = random.Random(12)
    head, line, rest, more = ([rng.randrange(3, checkpoints.VOCAB) for _ in range(count)] for count in (64, 8, 500, 90))
    prompts = {
        "turn-1": [*head, *line, *rest],
        "turn-2": [*head, *line, *rest, *more],
        "turn-3": [*head, *line[::-1], 7, *rest, *more],
    }
    for name, prompt in prompts.items():
        workload.ask(cluster.address, prompt, 4, request_id=name, affinity="agent")
        with Client(cluster.address, cluster.operator) as client:
            eventually(
                lambda prompt=prompt, client=client: client.status().processes[-1].pages_known >= len(prompt) // 16
            )
    turns = baton(cluster, "explain", "--session", "agent")["requests"][::-1]
    assert [one["request_id"] for one in turns] == list(prompts)
    assert [one["not_cached"]["reason"] for one in turns] == ["new", "new", "changed"]
    assert [one["not_cached"]["page"] for one in turns] == [0, 35, 4]
    for one in turns:
        assert sum(one["not_cached"]["tokens"].values()) == one["prompt_tokens"] - one["cached_tokens"]
    shown = CliRunner().invoke(app, ["explain", "--session", "agent", "--operator", cluster.operator])
    assert "seen, behind something that differs (as turn-2" in shown.stdout
    shown = CliRunner().invoke(app, ["explain", "turn-3", "--operator", cluster.operator])
    assert "not cached from page 4 (token 64)" in shown.stdout


def test_a_worker_is_drained_and_given_work_again(cluster: LocalCluster, path: Path) -> None:
    streams = Streams(cluster)
    future = streams.start(PROMPT, 400)
    eventually(lambda: streams.seen[0], what="tokens")
    busy = next(name for name in ("decode-0", "decode-1") if (status := process(cluster, name)) and status.attempts)
    assert baton(cluster, "drain", busy)["draining"]
    status = process(cluster, busy)
    assert status.state == "draining"
    for start in range(4):
        answer = workload.ask(cluster.address, PROMPT[start : start + 40], 4)
        assert list(answer.work.decode_workers) != [busy]
    finished = future.result(DEADLINE)
    stayed = list(finished.work.decode_workers) == [busy]
    assert stayed or metric(cluster, "router-0", "attempts_moved_total"), "only one that is slow loses what it had"
    assert baton(cluster, "drain", busy, "--wait", "30")["attempts"] == 0
    assert not baton(cluster, "drain", busy, "--undo")["draining"]
    status = process(cluster, busy)
    assert status.state == "live"
    assert streams.seen[0] == expected(path, PROMPT, 400)


def test_what_a_worker_has_moves_away_at_once(cluster: LocalCluster, path: Path) -> None:
    streams = Streams(cluster)
    future = streams.start(PROMPT, 400)
    eventually(lambda: len(streams.seen[0]) > 10, what="tokens")
    busy = next(name for name in ("decode-0", "decode-1") if (status := process(cluster, name)) and status.attempts)
    assert baton(cluster, "drain", busy, "--now", "--wait", "30")["attempts"] == 0
    finished = future.result(DEADLINE)
    assert len(finished.work.decode_workers) == 2
    assert streams.seen[0] == expected(path, PROMPT, 400)
    with Client(cluster.address, cluster.operator) as client:
        attempts = client.explain(finished.request_id).attempts
        assert attempts[0].ended_because == f"{busy} drains"
        client.drain(busy, undo=True)
        with pytest.raises(ProcessNotFound):
            client.drain("decode-7")
    eventually(lambda: at_rest(cluster), what="everything freed")
