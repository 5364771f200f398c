"""Workers on a Ray that has GPUs and labels, as far as a machine without GPUs can show: Ray takes our word for them."""

from __future__ import annotations

import pytest

from tests.cluster.machine import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

START = ["ray", "start", "--head", "--include-dashboard=false", "--object-store-memory=100000000", "--num-gpus=1"]


def test_gpus_and_labels_of_nodes_are_heeded(machine: Machine) -> None:
    assert machine.run(*START, "--labels=kind=small").status == 0

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
