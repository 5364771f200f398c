"""Workers on a Ray that has GPUs and labels, as far as a machine without GPUs can show: Ray takes our word for them."""

import json
import sys

import pytest

from tests.cluster.machine import ONE, TWO, Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

NODE = ["ray", "start", "--object-store-memory=100000000"]
START = [*NODE, "--head", "--include-dashboard=false"]

LEND = """
import json, os, ray
from deploy.placement.gpu_sharing import actor_options
from engine.vllm_runner.child_environment import child_environment

class Worker:
    def seen(self):
        lent = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ",".join(lent), child_environment(os.environ, "cuda", 2, 2)["CUDA_VISIBLE_DEVICES"]

ray.init("auto", namespace="others", log_to_driver=False)
options = actor_options("auto", 2.0, 4) | {"num_cpus": 0, "lifetime": "detached"}
workers = [ray.remote(Worker).options(name=name, **options).remote() for name in ("one", "two")]
print(json.dumps(ray.get([worker.seen.remote() for worker in workers], timeout=60)))
ray.kill(workers[1])
"""
"""Has Ray lend two GPUs to each of two actors. One of them stays."""


def test_gpus_and_labels_of_nodes_are_heeded(machine: Machine) -> None:
    assert machine.run(*START, "--num-gpus=1", "--labels=kind=small").status == 0

    # No node has the label: nothing is started for this worker, and the reason is told.
    nowhere = machine.up("--prefill", 0, "--set", "decode.node_selector={kind: large}")
    assert nowhere.status == 1
    assert "no node has the labels of decode.node_selector: kind=large" in nowhere.json["error"]["message"]

    # Ray's GPU is given to the worker, which finds that there is none.
    on_gpu = machine.up("--prefill", 0, "--set", "decode.node_selector={kind: small}")
    assert on_gpu.status == 1
    assert "the device is cuda and there is no GPU" in on_gpu.json["error"]["message"]

    on_cpu = machine.up("--prefill", 0, "--set", "decode.device=cpu", "--set", "decode.node_selector={kind: small}")
    assert on_cpu.status == 0, on_cpu
    assert {row["name"]: row["gpu"] for row in machine.status()["processes"]}["decode-0"] == ""
    assert machine.generate("On the CPU", "--max-tokens", 2, "--ignore-eos")["token_ids"]
    assert machine.baton("down").status == 0


def test_a_worker_has_all_gpus_of_its_ranks_on_one_node_or_a_reason(machine: Machine, there: list[str]) -> None:
    """Two nodes have enough GPUs together, and each too few. Nothing waits for a third."""
    assert machine.run(*START, "--num-gpus=2", f"--node-ip-address={ONE}").status == 0
    assert machine.run(*there, *NODE, "--num-gpus=1", f"--address={ONE}:6379", f"--node-ip-address={TWO}").status == 0
    up = machine.up("--prefill", 0, "--set", f"router.host={ONE}", "--set", "decode.tensor_parallel_size=3")
    assert up.status == 1
    error = up.json["error"]["message"]
    assert "the 3 ranks of a decode worker need 3 GPUs of one node, and there are 2 on " in error
    assert ", 1 on " in error


def test_ranks_see_the_gpus_that_ray_has_lent(machine: Machine) -> None:
    assert machine.run(*START, "--num-gpus=4").status == 0
    lent = machine.run(sys.executable, "-c", LEND, timeout=90)
    assert lent.status == 0, lent
    pairs = json.loads(lent.out)
    assert all(grant == seen for grant, seen in pairs), pairs
    assert sorted(",".join(seen for _, seen in pairs).split(",")) == ["0", "1", "2", "3"]
