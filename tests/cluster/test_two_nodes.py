"""A cluster over two nodes of a Ray, each in a network of its own: its processes speak over CURVE, with keys that
`baton up` made and handed over.
"""

import re

import pytest

from tests.cluster.machine import HOME, ONE, TWO, Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

START = ["ray", "start", "--object-store-memory=100000000"]
KEYS = f"{HOME}/.local/state/baton/baton/cluster.key"


def test_prefill_on_one_node_decode_on_the_other(machine: Machine, there: list[str]):
    head = machine.run(*START, "--head", "--include-dashboard=false", f"--node-ip-address={ONE}")
    assert head.status == 0, head
    joined = machine.run(*there, *START, f"--address={ONE}:6379", f"--node-ip-address={TWO}")
    assert joined.status == 0, joined

    up = machine.up("--prefill", 1, "--decode", 1, "--set", f"router.host={ONE}")
    assert up.status == 0, up
    assert up.json["grpc"] == "127.0.0.1:50051"
    assert machine.run("stat", "--format=%a", KEYS).out == "600\n"
    status = machine.status()
    processes = {process["name"]: process for process in status["processes"]}
    assert set(processes) == {"router", "store-0", "store-1", "prefill-0", "decode-0"}
    assert {process["state"] for process in processes.values()} == {"live"}
    assert processes["router"]["node"] == processes["decode-0"]["node"] == processes["store-0"]["node"]
    assert processes["prefill-0"]["node"] == processes["store-1"]["node"] != processes["router"]["node"]
    assert processes["decode-0"]["metrics"].startswith(f"{ONE}:")
    assert processes["prefill-0"]["metrics"].startswith(f"{TWO}:")
    result = machine.generate("--token-ids", ",".join(map(str, range(3, 60))), "--temperature", 0, "--max-tokens", 8)
    assert result["finish_reason"] == "length"
    for store in ("store-0", "store-1"):  # the metrics pages of the other node are read as well
        assert set(processes[store]["tiers"]) == {"host", "disk", "remote"}, processes[store]

    # The secret is in memory only: in no command line, environment, log or state of any process.
    secret = machine.run("cat", KEYS).out.strip()
    assert re.fullmatch(r"\S{40}", secret)
    everything = "cat /proc/*/cmdline /proc/*/environ ~/.local/state/baton/baton/*.json ~/.local/state/baton/*/logs/*"
    assert secret not in machine.run("sh", "-c", f"{everything} 2>/dev/null | tr '\\0' ' '").out

    # A supervisor that is restarted still has it: a worker that dies on the other node comes back.
    supervisor, before = status["supervisor"]["pid"], processes["prefill-0"]["pid"]
    machine.kill(supervisor)
    machine.kill(before)

    def repaired() -> bool:
        now = {process["name"]: process for process in machine.status()["processes"]}
        return now["prefill-0"]["state"] == "live" and now["prefill-0"]["pid"] != before

    machine.wait("prefill-0 is replaced on the other node", repaired)
    assert machine.baton("down").status == 0
    assert machine.run("ls", KEYS).status != 0
