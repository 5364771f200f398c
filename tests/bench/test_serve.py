"""The load generator's command line, and against real processes."""

import json
from pathlib import Path

import pytest

from bench import clusters, models
from bench.cluster import serve


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "x4 256->64"),
        (["--quick"], "x4 uniform:32:256->32"),
        (["--quick", "--concurrency", "2", "--output", "5"], "x2 uniform:32:256->5"),
        (["--rate", "2.5", "--prefix-groups", "3", "--prefix-tokens", "64"], "2.5/s 3(64)+256->64"),
        (["--trace", "t/toolagent.jsonl", "--length-scale", "0.1"], "toolagent time x1 length x0.1"),
    ],
)
def test_flags_win_over_defaults_and_name_the_load(argv: list[str], name: str) -> None:
    assert serve.load_name(serve.parse(argv)) == name


def test_a_trace_takes_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["--trace", "t.jsonl", "--rate", "1"])
    assert "a trace has its own times" in capsys.readouterr().err


def test_a_silent_address_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--address", "127.0.0.1:1", "--operator", "127.0.0.1:1"]) == 1
    assert "no router answers at 127.0.0.1:1" in capsys.readouterr().err


def test_open_and_closed_loops_against_a_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where the model is made
    trace = tmp_path / "small.jsonl"
    lines = [{"timestamp": 50 * i, "input_length": 1_200, "output_length": 80, "hash_ids": [1, i]} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    small = ["--runs", "1", "--warmup", "1", "--requests", "4", "--prompt", "40", "--output", "6"]
    with clusters.local(models.directory("tiny"), prefill=1, decode=1) as running:
        loads = (
            ["--concurrency", "2", "--prefix-groups", "1", "--prefix-tokens", "64"],
            ["--rate", "20"],
            ["--trace", str(trace), "--length-scale", "0.1"],
        )
        for argv in loads:
            assert serve.main(["--address", running.address, "--operator", running.operator, *small, *argv]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {result["bench"] for result in results} == {"serve"}
    assert [result["value"] for result in results if result["case"].endswith(": errors")] == [0, 0, 0]
    for start in ("1P+1D, x2 1(64)+40->6", "1P+1D, 20/s 40->6", "1P+1D, small time x1 length x0.1"):
        names = {r["case"].partition(": ")[2] for r in results if r["case"].partition(" ")[2].startswith(start)}
        assert {"ttft p99", "itl p50", "tpot p50", "e2e p90", "requests", "cached prompt tokens"} <= names
    cached = [result["value"] for result in results if result["case"].endswith(": cached prompt tokens")]
    assert cached[0] > 0
    assert cached[2] > 0
