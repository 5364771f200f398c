"""The timing models that come with the simulator: figures follow from what the files say."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from router.placement.step_costs import PrefillCost
from simulator.timing import MODELS, read


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_model_configures_a_cluster(name: str) -> None:
    timing = read(name)
    config = timing.configuration(512, {})
    assert config.decode.kv_cache_bytes >= timing.token_bytes * timing.max_context, "the longest prompt fits"


@pytest.mark.parametrize(
    ("name", "flops", "memory", "all_reduces", "launching"),
    [
        ("a800_70b", 8 * 312e12, 8 * 2.0e12, 160 * 20e-6, 1.3e-3),
        ("h100_70b", 8 * 989e12, 8 * 3.35e12, 160 * 12e-6, 1.2e-3),
    ],
)
def test_data_sheets(name: str, flops: float, memory: float, all_reduces: float, launching: float) -> None:
    timing = read(name)
    assert timing.gpus == 8
    assert timing.token_bytes == 80 * 2 * 8 * 128 * 2
    for step in (timing.prefill, timing.decode):
        assert step.token == pytest.approx(2 * 70e9 / (0.5 * flops), rel=0.02)
        assert step.pair == pytest.approx(4 * 64 * 128 * 80 / (0.5 * flops), rel=0.02)
        assert step.context == pytest.approx(timing.token_bytes / (0.7 * memory), rel=0.02)
        assert step.fixed == pytest.approx(140e9 / (0.7 * memory) + all_reduces + launching, rel=0.02)


@pytest.mark.parametrize("tokens", [8_192, 16_384, 32_768, 65_536, 131_072])
def test_prompts_take_what_mooncakes_formula_says(tokens: int) -> None:
    """Equation 1 of the FAST '25 paper at half of the peak, with half of the pairs, since attention is causal."""
    step = read("a800_70b").prefill
    ours = PrefillCost(step.fixed, step.token, step.pair).seconds(tokens, chunk=8_192)
    theirs = 80 * (4 * tokens**2 / 2 * 8_192 + 22 * tokens * 8_192**2) / (0.5 * 8 * 312e12)
    assert ours == pytest.approx(theirs, rel=0.2)


def test_a_worker_without_a_gpu_is_none(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    file.write_text((MODELS / "a800_70b.yaml").read_text().replace("gpus: 8", "gpus: 0"))
    with pytest.raises(ConfigError, match="gpus"):
        read(str(file))


def test_a_disk_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="no times of a disk"):
        read("a800_70b").configuration(512, {"disk.path": "/somewhere"})
