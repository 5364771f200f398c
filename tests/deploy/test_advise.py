"""`baton advise` on small clusters with round figures: what it says, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec import structs
from typer.testing import CliRunner, Result

from deploy.cli import app
from deploy.commands import chart
from simulator import trials
from simulator.cluster import SimulatedCluster
from tests.engine.test_memory import BASE, WINDOWS
from tests.worker.test_engine_choice import GPT_OSS, GRANITE

MODEL = """
about: round figures
gpus: 2
token_bytes: 1000
max_context: 100000
kv_cache_bytes: 100MB
host_cache_bytes: 200MB
prefill: &step {fixed: 0.01, token: 1.0e-4, pair: 0, row: 0.001, context: 1.0e-6}
decode: *step
copy: 256.0e+6
network: 1.0e+9
network_latency: 0.0005
message: 0.001
call: 0.0001
start: 3
config: {prefill.max_num_batched_tokens: 4096, prefill.step_ms: 100, decode.max_num_batched_tokens: 2048}
"""
GEMMA = BASE | {
    "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2, "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
LOOSE = ("--prompt", 200, "--output", 10, "--slo-ttft", 1, "--slo-tpot", 0.5)
TIGHT = ("--prompt", 3000, "--output", 20, "--slo-ttft", 2, "--slo-tpot", 0.03)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL)
    return file


def call(model: Path | str, *arguments: str | Path | float) -> Result:
    words = ["advise", "--model", model, "--jobs", 1, "--requests", 30, "--poisson", 5, *arguments]
    return CliRunner().invoke(app, [str(each) for each in words])


def answer(model: Path, *arguments: str | Path | float) -> dict[str, Any]:
    result = call(model, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_long_prompts_beside_a_tight_objective_are_split(model: Path) -> None:
    advice = answer(model, *TIGHT, "--gpus", 4)
    assert advice["splitting_pays"], advice["advice"]
    assert advice["advice"].startswith("Split: ")
    assert (advice["workers"], advice["gpus_per_worker"]) == (2, 2)
    colocated, split = advice["clusters"][:2]
    assert (colocated["prefill"], colocated["decode"]) == (0, 2)
    assert (split["prefill"], split["decode"]) == (1, 1)
    assert split["served"]["attained"] >= 0.9
    assert split["served"]["goodput"] > colocated["served"]["goodput"]


def test_formats_of_weights_and_pages_change_the_advice(model: Path) -> None:
    formats = ("--quantization", "int4", "--kv-cache-dtype", "int8")
    assert "add `formats:`" in call(model, *LOOSE, "--gpus", 2, *formats).output
    model.write_text(MODEL + "formats: {weights: 0.008, context: 1, head_dim: 64}\n")
    plain, fewer = (answer(model, *LOOSE, "--gpus", 2, *more)["clusters"][0]["speed"] for more in ((), formats))
    assert fewer > 1.1 * plain


@pytest.mark.parametrize(
    ("config", "page_size", "count"),
    [(GPT_OSS | WINDOWS, 32, 1), (GRANITE, 64, 3), (WINDOWS | GEMMA, 32, 1)],
    ids=["groups", "states", "groups of a model that our own engine knows"],
)
def test_pages_are_those_of_a_checkpoint(
    config: dict[str, Any], page_size: int, count: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `baton size` reads them from its config: on a CPU, layers with windows and states have their own."""
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": 2, **config}))
    model.write_text(MODEL.replace("config: {", "config: {model.device: cpu, "))
    argv = ["size", tmp_path, "--engine", "vllm", "--device", "cpu", "--page-size", page_size, "--json"]
    sizes = json.loads(CliRunner().invoke(app, [str(each) for each in argv]).stdout)
    assert sizes["groups"]["count"] == count
    served: list[SimulatedCluster] = []

    def begin(*arguments: Any, **named: Any) -> SimulatedCluster:
        served.append(SimulatedCluster(*arguments, **named))
        return served[-1]

    monkeypatch.setattr(trials, "SimulatedCluster", begin)
    options = (*LOOSE, "--gpus", 2, "--checkpoint", tmp_path, "--engine", "vllm")
    assert answer(model, *options, "--page-size", page_size)["clusters"][0]["speed"]
    for worker in served[0].workers.values():
        assert structs.asdict(worker.state._groups) == sizes["groups"]
    assert served[0].timing.token_bytes * page_size == sizes["page_bytes"]
    if config == GRANITE:
        assert "a recurrent state needs pages of 64 tokens" in call(model, *options, "--page-size", 32).output
        model.write_text(MODEL)
        assert "on a CPU only" in call(model, *options, "--page-size", 64).output


def test_short_prompts_beside_a_loose_one_are_not(model: Path) -> None:
    advice = answer(model, *LOOSE, "--gpus", 4)
    assert not advice["splitting_pays"]
    assert advice["advice"].startswith("Splitting does not pay here: ")


def test_a_person_reads_a_table_a_plot_and_a_sentence(model: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps({"timestamp": 200 * i, "input_length": 400, "output_length": 8, "hash_ids": [i]}) for i in range(30)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    picture = tmp_path / "plot.svg"
    result = call(model, trace, "--gpus", 2, "--slo-ttft", 1, "--slo-tpot", 0.1, "--plot", picture)
    assert result.exit_code == 0, result.output
    for words in ("highest rate", "1 colocated", "100 % │", "One worker can't be split: it serves"):
        assert words in result.stdout
    assert "meet both objectives" in result.stderr, "progress"
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/trace.jsonl"], "/no/such/trace.jsonl"),
        (["--gpus", 0], "--gpus 0 is no number of workers"),
        (["--gpus", 3], "one of .* has 2 GPUs"),
        (["--slo-ttft", 0], "more than 0"),
        (["--slo-tpot", -1], "more than 0"),
        (["--attainment", 1.5], "at most 1"),
        (["--prompt", "many"], "'many' is no length"),
        (["--poisson", 0], "more than 0"),
        (["--poisson", "nan"], "more than 0"),
        (["--slo-ttft", "nan"], "more than 0"),
        (["--plot", "/no/such/folder/plot.svg"], "there is no folder /no/such/folder"),
        (["--slo-tpot", 0.005], "only 0% of these requests would meet both objectives"),
    ],
)
def test_what_can_not_be_is_said(model: Path, arguments: list[str], says: str) -> None:
    result = call(model, "--gpus", 4, *arguments, "--json")
    assert result.exit_code == 1, result.output
    assert re.search(says, json.loads(result.stdout)["error"]["message"])


def test_an_empty_trace_and_an_unknown_model(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "has no requests" in call(model, empty, "--gpus", 4).stderr
    empty.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}')
    assert "no speed" in call(model, empty, "--gpus", 4).stderr
    unknown = call("h9000", "--gpus", 4)
    assert unknown.exit_code == 1
    assert "there are a800_70b" in unknown.stderr


def test_a_chart_shows_each_line_and_what_is_wanted() -> None:
    lines = [chart.ChartLine("a", [(1.0, 1.0), (2.0, 0.5)]), chart.ChartLine("b & c", [(4.0, 0.0)])]
    drawn = chart.text(lines, 0.9, "req/s").splitlines()
    assert drawn[0].index("*") == 8 + 16
    assert drawn[5].index("*") == 8 + 32
    assert drawn[10].index("o") == 8 + 64
    assert drawn[1].count("·") == 65
    assert drawn[-1].split() == ["*", "a", "o", "b", "&", "c"]
    ElementTree.fromstring(chart.svg(lines, 0.9, "rate", "share"))
    assert chart.text([], 0.9, "req/s")
