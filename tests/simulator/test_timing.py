"""The timing models that come with the simulator: figures follow from what the files say."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from router.placement.step_costs import PrefillCost
from simulator.timing import MODELS, read_timing


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_model_configures_a_cluster(name: str) -> None:
    timing = read_timing(name)
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
    timing = read_timing(name)
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
    step = read_timing("a800_70b").prefill
    ours = PrefillCost(step.fixed, step.token, step.pair).seconds(tokens, chunk=8_192)
    theirs = 80 * (4 * tokens**2 / 2 * 8_192 + 22 * tokens * 8_192**2) / (0.5 * 8 * 312e12)
    assert ours == pytest.approx(theirs, rel=0.2)


def test_a_worker_without_a_gpu_is_none(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    file.write_text((MODELS / "a800_70b.yaml").read_text().replace("gpus: 8", "gpus: 0"))
    with pytest.raises(ConfigError, match="gpus"):
        read_timing(str(file))


def test_a_disk_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="no times of a disk"):
        read_timing("a800_70b").configuration(512, {"disk.path": "/somewhere"})


def test_formats_of_weights_and_pages_change_bytes_and_step_times() -> None:
    plain = read_timing("h100_8b")
    config = plain.configuration(512, {"model.quantization": "int4", "model.kv_cache_dtype": "fp8"})
    fewer = plain.in_formats(config.model)
    assert fewer.token_bytes == 131_072 * (128 + 4) // 256
    for step, other in ((fewer.prefill, plain.prefill), (fewer.decode, plain.decode)):
        assert step.fixed == pytest.approx(other.fixed - 0.75 * 16e9 / (0.7 * 3.35e12), rel=0.01)
        assert step.context == pytest.approx(other.context * (128 + 4) / 256)
        assert (step.token, step.pair, step.row) == (other.token, other.pair, other.row)
    assert plain.in_formats(plain.configuration(512, {}).model) == plain
    cpu = read_timing("cpu_100m")
    config = cpu.configuration(16, {"model.kv_cache_dtype": "int8"})
    assert cpu.in_formats(config.model).token_bytes == cpu.token_bytes * (64 + 4) // 128
    assert cpu.in_formats(config.model).decode == cpu.decode  # measured: the kernels don't wait for K and V


@pytest.mark.parametrize(
    ("file", "quantization", "error"),
    [("h100_8b", "awq", "quantization is awq, and only int8, int4, fp8"), ("none.yaml", "int8", "add `formats:`")],
)
def test_formats_without_figures_are_refused(file: str, quantization: str, error: str, tmp_path: Path) -> None:
    lines = (MODELS / "h100_8b.yaml").read_text().splitlines()
    (tmp_path / "none.yaml").write_text("\n".join(line for line in lines if not line.startswith("formats:")))
    timing = read_timing(str(tmp_path / file) if file.endswith(".yaml") else file)
    with pytest.raises(ConfigError, match=error):
        timing.in_formats(timing.configuration(512, {"model.quantization": quantization}).model)
