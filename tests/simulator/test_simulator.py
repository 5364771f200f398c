"""The simulator's own parts: time, loads, figures; and that a seed decides everything."""

import json
import os
import subprocess
import sys
from itertools import islice, pairwise
from math import inf, nan
from pathlib import Path

import pytest

from baton.errors import ConfigError
from deploy.load.workload import Lengths
from simulator import timing
from simulator.clock import Agenda, Body, VirtualProcess
from simulator.cluster import Layout
from simulator.measure import longest_tenth
from simulator.mooncake import TraceLine
from simulator.workloads import Bursts, Random, Wishes, trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_what_is_planned_for_one_instant_happens_in_order() -> None:
    agenda, seen = Agenda(), []
    agenda.at(2.0, seen.append, "late")
    agenda.at(1.0, seen.append, "first")
    agenda.at(1.0, lambda: agenda.after(0.0, seen.append, "third"))
    agenda.at(1.0, seen.append, "second")
    agenda.run(lambda: False)
    assert seen == ["first", "second", "third", "late"]
    assert agenda.now == 2.0


def test_a_process_sleeps_until_it_is_woken_or_its_time_has_come() -> None:
    agenda = Agenda()
    woke: list[float] = []

    def body() -> Body:
        while True:
            yield inf if len(woke) == 1 else agenda.now + 1.0
            woke.append(agenda.now)

    process = VirtualProcess(agenda, body())
    agenda.at(0.5, process.wake, 3.0)  # no sooner than it wakes by itself
    agenda.at(4.0, process.wake, 4.5)
    agenda.at(6.0, process.end)
    agenda.run(lambda: False)
    assert woke == [1.0, 4.5, 5.5]


def test_the_models_can_be_read_and_say_where_they_are_from() -> None:
    for path in timing.MODELS.glob("*.yaml"):
        model = timing.read_timing(path.stem)
        assert model.about
        assert model.configuration(512, {"router.max_queued": 7}).router.max_queued == 7
    with pytest.raises(ConfigError, match="a800_70b"):
        timing.read_timing("abacus")


def test_layouts() -> None:
    assert Layout.parse("2P+1D", 2) == Layout(2, 1, 2)
    assert [node for _, _, node in Layout.parse("3D").workers] == ["node-0000", "node-0001", "node-0002"]
    for text in ("8P", "P+D", "0D", "8P8D"):
        with pytest.raises(ConfigError, match="8P"):
            Layout.parse(text)


def test_a_trace_at_twice_its_speed_shares_what_it_shared() -> None:
    lines = [TraceLine(1_000, 700, 5, (3, 4)), TraceLine(3_000, 1_200, 0, (3, 9, 10))]
    first, second = trace(lines, 2.0, Wishes(max_tokens=100), seed=1)
    assert (first.at, second.at) == (0.0, 1.0)
    assert (first.prompt, second.prompt, second.output, second.max_tokens) == (700, 1_200, 1, 100)
    ours, theirs = first.tokens(), second.tokens()
    assert (len(ours), len(theirs)) == (2_800, 4_800)
    assert ours[:2_048] == theirs[:2_048]
    assert ours[2_048:2_800] != theirs[2_048:2_800]


@pytest.mark.parametrize("bursts", [Bursts(), Bursts(factor=8.0, share=0.2, spell=5.0)])
def test_arrivals_come_at_their_rate(bursts: Bursts) -> None:
    load = Random(10.0, Lengths("fixed", 600), Lengths("fixed", 9), groups=2, prefix=512, bursts=bursts)
    arrivals = list(islice(load.arrivals(None, Wishes(), seed=3), 20_000))
    assert arrivals[-1].at == pytest.approx(2_000, rel=0.1)
    gaps = [late.at - early.at for early, late in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
    assert spread == pytest.approx(1.0, rel=0.1) if bursts.factor == 1 else spread > 1.5
    assert {arrival.blocks[0] for arrival in arrivals[:50]} == {2**29, 2**29 + 1}
    assert arrivals[0].prompt == 512 + 600


def test_the_longest_tenth_of_gaps() -> None:
    assert longest_tenth([(0.1, 18), (0.5, 1), (0.3, 1)]) == pytest.approx(0.4)
    assert longest_tenth([(0.1, 3), (0.2, 1)]) == pytest.approx(0.2)
    assert longest_tenth([]) is nan


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    def run(seed: int, hashes: str) -> dict[str, object]:
        out = tmp_path / "result.json"
        arguments = ["--cluster", "2P+2D", "--poisson", "4", "--requests", "25", "--deaths", "60", "--loss", "0.01"]
        arguments += ["--set", "cluster.heartbeat_ms=500", "--seed", str(seed), "--json", str(out)]
        command = [sys.executable, "-m", "bench.router.simulate", *arguments]
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT)
        result = json.loads(out.read_text())
        del result["simulator"]
        return result

    assert run(1, "1") == run(1, "2")
    assert run(1, "1") != {**run(2, "1"), "arguments": run(1, "1")["arguments"]}
