"""A worker of two ranks on Ray: vLLM's runner on a CPU, in the environment of `make test-vllm`."""

import sys

import pytest

pytest.importorskip("vllm")

from tests.cluster import test_ray_gpus
from tests.cluster.machine import MODEL, Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

START = ["ray", "start", "--head", "--include-dashboard=false", "--object-store-memory=100000000", "--num-gpus=1"]
GREEDY = ["--temperature", 0, "--max-tokens", 8, "--ignore-eos"]
RANKS = ["model.engine=vllm", "model.enforce_eager=true", "pages.page_size=32", "decode.tensor_parallel_size=2"]
MAKE = f"""
import pathlib
from tests.support import checkpoints
checkpoints.make("llama", pathlib.Path("{MODEL}"), hidden_size=128, head_dim=32)
"""


def below(machine: Machine, pid: int) -> list[int]:
    return [int(line) for line in machine.run("pgrep", "-P", pid).out.split()]


def test_a_worker_whose_rank_is_lost_is_replaced(machine: Machine) -> None:
    """Its ranks compute on the CPU of a node that has a GPU, so they wait for none."""
    assert machine.run(*START).status == 0
    assert machine.run("sh", "-c", f"rm -r {MODEL}").status == 0
    result = machine.run(sys.executable, "-c", MAKE, timeout=120)
    assert result.status == 0, result
    settings = [part for setting in (*RANKS, "decode.device=cpu") for part in ("--set", setting)]
    up = machine.up("--prefill", 0, *settings, timeout=300)
    assert up.status == 0, up
    expected = machine.generate("--token-ids", "5,6,7", *GREEDY)["token_ids"]
    before = {each["name"]: each["pid"] for each in machine.status()["processes"]}["decode-0"]
    (vllm,) = below(machine, before)
    ranks = below(machine, vllm)
    machine.kill(ranks[-1])

    def replaced() -> bool:
        now = machine.status()
        entry = {each["name"]: each for each in now["processes"]}["decode-0"]
        return now["serving"] and entry["state"] == "live" and entry["pid"] != before

    machine.wait("decode-0 is replaced", replaced, 200)
    assert not {before, vllm, *ranks} & set(machine.processes())
    assert machine.generate("--token-ids", "5,6,7", *GREEDY)["token_ids"] == expected
    assert machine.baton("down").status == 0


def test_a_worker_whose_gpus_others_hold_is_given_up_with_the_reason(machine: Machine) -> None:
    """Two others hold two GPUs each; one of them goes."""
    assert machine.run(*test_ray_gpus.START, "--num-gpus=4").status == 0
    lent = machine.run(sys.executable, "-c", test_ray_gpus.LEND, timeout=90)
    assert lent.status == 0, lent
    assert machine.run("sh", "-c", f"rm -r {MODEL}").status == 0
    make = MAKE.replace("head_dim=32", "head_dim=32, num_key_value_heads=4")
    result = machine.run(sys.executable, "-c", make, timeout=120)
    assert result.status == 0, result
    settings = [part for setting in (*RANKS[:-1], "decode.tensor_parallel_size=4") for part in ("--set", setting)]
    up = machine.up("--prefill", 0, *settings, timeout=120)
    assert up.status == 1
    error = up.json["error"]["message"]
    assert "decode-0: Ray has not lent it 4 GPUs of " in error
    assert "2 are free, and others hold the rest" in error
