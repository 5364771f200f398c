"""The commands that watch and use a running cluster, on one that is described as `baton up` describes it."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from deploy.cli import app
from deploy.control_plane import state_file
from deploy.control_plane.state_file import RayLink, State
from deploy.load import presets
from deploy.local import LocalCluster
from tests.support import workload
from tests.support.eventually import eventually

NAME = "watched"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def home(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home in which `baton` finds a cluster of 1P+1D."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("home")
    for file in path.iterdir():
        (model / file.name).symlink_to(file)
    (model / "tokenizer_config.json").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with pytest.MonkeyPatch.context() as patch, LocalCluster(workload.settings(model, 1, 1), folder / "run") as cluster:
        patch.setenv("HOME", str(folder))
        patch.delenv("XDG_STATE_HOME", raising=False)
        assert cluster.addresses is not None
        logs = cluster.config.cluster.log_dir
        link = RayLink("127.0.0.1:1", "token")
        state_file.write(
            folder / ".local" / "state" / "baton" / NAME,
            State(NAME, link, logs, {"router": cluster.addresses}, model="m"),
        )
        yield folder


@pytest.fixture(autouse=True)
def _at_home(home: Path) -> None:
    """Every test speaks to the cluster of `home`."""


def call(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--name", NAME], input=stdin)


def test_a_chat_remembers_and_forgets() -> None:
    lines = "hello\n/system be brief\nhello again\n/retry\n/timing\nand again\n/reset\n/nonsense\n/exit\nnever sent\n"
    result = call("chat", "--max-tokens", "4", "--temperature", "0", stdin=lines)
    assert result.exit_code == 0, result.output
    shown = result.output.splitlines()
    assert shown[1] == shown[2], "a greedy answer, asked for again, is the same"
    assert sum("prompt tokens" in line for line in shown) == 1
    assert "/retry" in result.output
    assert "never sent" not in result.output


def test_one_message_as_json() -> None:
    result = call("chat", "hello", "--max-tokens", "4", "--json")
    answer = json.loads(result.stdout)
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4


def test_a_chat_goes_on_after_an_error() -> None:
    result = call("chat", "--max-tokens", "2", stdin=f"{'too long ' * 5_000}\nhello\n/retry\n")
    assert "error" in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize("preset", list(presets.PRESETS))
def test_every_preset_runs_to_its_end(preset: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = call("bench", preset, "-n", "6", "-u", "2", "--time-scale", "0.001", "--json", "--report", str(page))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["errors"] == {}
    assert summary["load"]["requests"] == "6, 0 failed"
    assert summary["figures"]["ttft p50"]["value"] > 0
    text = page.read_text()
    assert text.count("<svg") >= 3
    assert "<script" not in text


def test_later_turns_find_earlier_ones_in_the_cache() -> None:
    result = call("bench", "agentic-trace-replay", "-n", "8", "-u", "1", "--time-scale", "0.001", "--json")
    assert json.loads(result.stdout)["figures"]["cached prompt tokens"]["value"] > 0.3


def test_bench_prints_a_table() -> None:
    result = call("bench", "batch-synthetic-data", "-n", "2", "-u", "1")
    assert "TTFT" in result.output
    assert all(len(line) <= 100 for line in result.output.splitlines())


def test_bench_says_why_it_sent_fewer_requests() -> None:
    result = call("bench", "batch-synthetic-data", "-n", "100000", "-u", "2", "--duration", "1")
    assert result.exit_code == 0, result.output
    assert re.search(r"requests +\d+ of 100000: none is sent after --duration, 1 s, 0 failed", result.output)
    assert re.search(r"output tokens +[\d.,]+ tokens/s", result.output)
    assert re.search(r"errors +0\n", result.output)


def test_top_shows_processes_and_requests() -> None:
    call("chat", "hello", "--max-tokens", "4")
    result = call("top", "--count", "2", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    for part in ("router", "prefill-0", "decode-0", "store-0", "length", "output tokens"):
        assert part in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_logs_are_filtered_and_merged() -> None:
    every = call("logs", "-n", "1000").output.splitlines()
    times = [line[:23] for line in every if line.startswith("2")]
    assert times == sorted(times)
    assert {line.split()[1] for line in every if line.startswith("2")} >= {"router", "decode-0", "prefill-0"}
    assert all(" decode-0 " in line for line in call("logs", "decode-0").output.splitlines() if line.startswith("2"))
    assert call("logs", "--level", "CRITICAL").output == ""
    assert len(call("logs", "-n", "3").output.splitlines()) == 3
    wrong = call("logs", "nobody")
    assert wrong.exit_code == 1
    assert "no log of nobody" in wrong.output


def test_logs_follow(home: Path) -> None:
    argv = [sys.executable, "-m", "deploy", "logs", "router", "-f", "-n", "1", "--name", NAME]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        call("chat", "followed", "--max-tokens", "2")
        try:
            eventually(lambda: "finished: length" in process.stdout.readline(), "the new record is shown")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
