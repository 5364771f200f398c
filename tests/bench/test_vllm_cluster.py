"""How a cluster on vLLM's runner is compared with vLLM itself. vLLM is not needed: lines of Python stand for a side."""

import sys

import pytest

from bench.cluster import vllm_cluster
from bench.cluster.vllm_cluster import BARE, OURS, THEIRS, Run
from bench.peers import environments
from bench.peers.adapter import PeerProcess
from bench.peers.cases import Case
from bench.peers.steps import Course, Decoding

CASE = Case("decode-2", sequences=2, prompt=3, output=4)
SIDE = """
from bench.peers import steps

def load():
    print("noise that a library makes while it loads")
    # A step with prompts, then three of a second each, half of which is the model's.
    ends, model = [9.0, 10, 11, 12], [7, 0.5, 0.5, 0.5]
    return lambda prompts, count: steps.Course([prompt[:1] * count for prompt in prompts], ends, model)

steps.serve(load)
"""


def test_steps_with_prompts_do_not_count_as_decoding() -> None:
    course = Course([[1, 1, 1]], ends=[5.0, 9.0, 10.0, 11.5], model=[4.0, 3.0, 0.5, 0.7])
    assert Decoding.of(course, 3) == Decoding(1.25, 0.6)


def test_a_side_in_a_process_of_its_own_tells_the_course_of_its_steps() -> None:
    with PeerProcess("side", [sys.executable, "-c", SIDE], environments.variables({})) as process:
        run = vllm_cluster.alone(process)([[5, 6, 7], [8, 9, 10]], 4)
    assert (run.gap, run.host) == (1.0, 0.5)
    assert run.tokens == [[5] * 4, [8] * 4]


def rounds(*seconds: tuple[float, float, float]) -> list[vllm_cluster.Round]:
    """The seconds of vLLM and of the decode worker, and the cores that others used."""
    return [
        {
            THEIRS: Run(theirs, 0.012, 0.002, [[1], [2]]),
            BARE: Run(ours, 0.011, 0.001, [[1], [3]]),
            OURS: Run(ours, 0.013, 0.003, spent={"router": 0.0015}, others=others),
        }
        for theirs, ours, others in seconds
    ]


def test_ours_are_judged_by_the_same_round_and_disturbed_rounds_are_left_out() -> None:
    rounds_by_case = {CASE: rounds((1.0, 1.0, 0.0), (2.0, 2.5, 0.1), (1.0, 9.0, 1.7), (1.0, 9.0, 1.9))}
    results = {result.case: result for result in vllm_cluster.decode_results(rounds_by_case)}
    ours = results[f"decode-2, {OURS}: tokens/s"]
    assert ours.ratio == pytest.approx((1.0 + 0.8) / 2)
    assert ours.ok is False
    assert results[f"decode-2, {BARE}: tokens/s"].ok is None
    assert results[f"decode-2, {THEIRS}: tokens/s"].ratio is None
    assert results[f"decode-2, {OURS}: a step outside the model"].value == pytest.approx(3.0)
    assert results[f"decode-2, {OURS}: a step's CPU time, router"].value == pytest.approx(1.5)
    assert results["decode-2: first tokens of both as one"].value == 0.5


def test_each_round_is_begun_by_another_side_and_the_first_only_warms_up() -> None:
    order: list[str] = []

    def side(name: str) -> vllm_cluster.Side:
        def run(prompts: list[list[int]], count: int) -> Run:
            order.append(name)
            return Run(1.0, 0.1, 0.1)

        return run

    rounds_by_case = vllm_cluster.take_turns({"a": side("a"), "b": side("b")}, [CASE], 2, 100)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert len(rounds_by_case[CASE]) == 2
