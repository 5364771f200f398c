"""Loads: the same for the same seed, and of the shape that was asked for."""

import json
from pathlib import Path

import numpy as np
import pytest

from baton.errors import ConfigError
from deploy.load.workload import Workload, expand, from_trace, poisson
from simulator import mooncake
from simulator.lengths import Lengths
from simulator.workloads import Wishes, trace

VOCAB = 1_000


def lengths(text: str, count: int = 2_000) -> list[int]:
    return Lengths.parse(text).draw(count, np.random.default_rng(0))


def test_poisson_arrivals_follow_from_the_seed() -> None:
    assert poisson(5.0, 100, seed=1) == poisson(5.0, 100, seed=1)
    assert poisson(5.0, 100, seed=1) != poisson(5.0, 100, seed=2)


def test_poisson_arrivals_come_at_the_rate_and_as_irregularly_as_chance() -> None:
    gaps = np.diff(poisson(5.0, 20_000, seed=1))
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # an exponential's deviation is its mean


def test_lengths_have_the_distribution_they_name() -> None:
    assert set(lengths("128")) == {128}
    uniform = lengths("uniform:3:6")
    assert set(uniform) == {3, 4, 5, 6}
    drawn = lengths("lognormal:200:0.5:300")
    assert max(drawn) == 300
    assert np.median(drawn) == pytest.approx(200, rel=0.05)
    assert min(lengths("lognormal:1:3")) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "many", "uniform:5", "uniform:9:3", "lognormal:0:1", "lognormal:9:1:5", "lognormal:9:1:inf"]
)
def test_a_length_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no length"):
        Lengths.parse(text)


def test_a_plan_follows_from_its_seed() -> None:
    workload = Workload(Lengths.parse("uniform:1:50"), Lengths.parse("lognormal:20:1"), VOCAB)
    assert workload.plan(20, seed=1) == workload.plan(20, seed=1)
    assert workload.plan(20, seed=1) != workload.plan(20, seed=2)


def test_arrivals_do_not_change_what_is_sent() -> None:
    prompt, output = Lengths.parse("uniform:1:50"), Lengths.parse("8")
    closed = Workload(prompt, output, VOCAB).plan(5, seed=1)
    arrivals = poisson(3.0, 5, seed=1)
    opened = Workload(prompt, output, VOCAB, arrivals=arrivals).plan(5, seed=1)
    assert [request.at for request in opened] == arrivals
    assert [request.prompt for request in opened] == [request.prompt for request in closed]


def test_groups_share_their_prefix_and_nothing_else() -> None:
    workload = Workload(Lengths.parse("16"), Lengths.parse("8"), VOCAB, groups=3, prefix=32)
    plan = workload.plan(60, seed=1)
    assert {len(request.prompt) for request in plan} == {48}
    assert len({request.prompt[:32] for request in plan}) == 3
    assert len({request.prompt[32:] for request in plan}) == 60


def test_equal_hash_ids_make_equal_prefixes() -> None:
    one = expand([7, 8, 9], 16, 40, VOCAB, seed=1)
    other = expand([7, 8, 11], 16, 48, VOCAB, seed=1)
    assert len(one) == 40
    assert len(other) == 48
    assert one[:32] == other[:32]
    assert one[32:] != other[32:40]


def test_hash_ids_that_do_not_suffice_go_on_with_the_last() -> None:
    short, long = expand([7, 8], 16, 20, VOCAB, seed=1), expand([7, 8], 16, 90, VOCAB, seed=1)
    assert len(long) == 90
    assert long[:20] == short
    assert len(expand([], 16, 5, VOCAB, seed=1)) == 5


def test_a_trace_keeps_its_times_lengths_and_shared_parts_when_scaled(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3_000, "input_length": 1_100, "output_length": 10, "hash_ids": [1, 2, 4]},
        {"timestamp": 1_000, "input_length": 1_500, "output_length": 0, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = from_trace(mooncake.read_trace(path), VOCAB, seed=1, time_scale=0.5, length_scale=0.1)
    assert (first.at, second.at) == (0.0, 1.0)
    assert (len(first.prompt), len(second.prompt)) == (150, 110)
    assert (first.output, second.output) == (1, 1)
    assert first.prompt[:102] == second.prompt[:102]  # two hash ids of 51 tokens
    assert first.prompt[102:110] != second.prompt[102:110]


def test_a_trace_can_be_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]})
    path.write_text(f"{line}\n{line}\nnot json\n")
    assert len(mooncake.read_trace(path, 2)) == 2
    with pytest.raises(ConfigError, match="line 3"):
        mooncake.read_trace(path)
    with pytest.raises(ConfigError, match="can't read"):
        mooncake.read_trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="at least one"):
        mooncake.read_trace(path, 0)
    path.write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        mooncake.read_trace(path)
    path.write_text('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}')
    with pytest.raises(ConfigError, match="1 hash_ids"):
        trace(mooncake.read_trace(path), 1.0, Wishes(), 1)
