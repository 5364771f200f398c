"""A cluster on a Ray that the user started: repaired when hit, and gone without a trace while Ray stays."""

import signal

import pytest

from tests.cluster.machine import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

GREEDY = ["--temperature", 0, "--max-tokens", 24, "--ignore-eos"]
START = ["ray", "start", "--head", "--include-dashboard=false", "--object-store-memory=100000000"]


def pids(machine: Machine) -> dict[str, int]:
    """Of the processes that are live."""
    return {p["name"]: p["pid"] for p in machine.status()["processes"] if p["state"] == "live"}


def actors(machine: Machine) -> list[str]:
    """Every named actor of that Ray."""
    script = (
        "import os, ray, sys; ray.init('127.0.0.1:6379', log_to_driver=False, logging_level='critical');"
        "print(*(a['name'] for a in ray.util.list_named_actors(all_namespaces=True)))"
    )
    return machine.run("python", "-c", script).out.split()


def test_without_authentication_every_process_is_repaired(machine: Machine):
    assert machine.run(*START).status == 0
    ray = set(machine.processes())
    up = machine.up("--prefill", 1, "--decode", 2, "--set", "cluster.restart_patience_ms=12000")
    assert up.status == 0, up
    assert "asks nobody for a token" in up.err
    assert "joining the Ray at 127.0.0.1:6379" in up.err
    expected = machine.generate("The store holds a prefix", *GREEDY)["token_ids"]
    names = set(pids(machine))
    assert names == {"router", "store-0", "prefill-0", "decode-0", "decode-1"}

    # One that is stopped for a moment comes back with its weights: nothing is restarted.
    before = pids(machine)
    machine.kill(before["decode-0"], signal.SIGSTOP)
    machine.wait("decode-0 is silent", lambda: "decode-0" not in pids(machine))
    machine.kill(before["decode-0"], signal.SIGCONT)
    machine.wait("decode-0 is back", lambda: "decode-0" in pids(machine))
    assert pids(machine) == before

    for victim, number in (
        ("decode-0", signal.SIGKILL),
        ("prefill-0", signal.SIGKILL),
        ("store-0", signal.SIGKILL),
        ("decode-1", signal.SIGSTOP),
        ("router", signal.SIGKILL),
    ):
        before = pids(machine)
        machine.kill(before[victim], number)

        def repaired(victim: str = victim, before: dict[str, int] = before) -> bool:
            now = machine.status()
            live = {p["name"]: p["pid"] for p in now["processes"] if p["state"] == "live"}
            return now["serving"] and set(live) == names and live[victim] != before[victim]

        machine.wait(f"{victim} is replaced after signal {number}", repaired)
        assert before[victim] not in machine.processes()
        assert machine.generate("The store holds a prefix", *GREEDY)["token_ids"] == expected
    restarts = {p["name"]: p["restarts"] for p in machine.status()["processes"]}
    assert all(count >= 1 for count in restarts.values()), restarts

    # The supervisor itself: Ray restarts it, it finds the others, and goes on watching.
    before, supervisor = pids(machine), machine.status()["supervisor"]["pid"]
    machine.kill(supervisor)
    machine.wait(
        "the supervisor is back", lambda: (s := machine.status()["supervisor"])["alive"] and s["pid"] != supervisor
    )
    assert pids(machine) == before
    machine.kill(before["decode-0"])
    machine.wait("decode-0 is replaced", lambda: pids(machine).get("decode-0", 0) not in (0, before["decode-0"]))

    assert machine.baton("down").status == 0
    assert actors(machine) == []
    assert not [name for name in machine.unix_sockets() if name.startswith("@")]
    assert ray <= set(machine.processes()), "a Ray that Baton did not start must stay up"
    assert machine.run("ray", "stop").status == 0
    machine.wait("Ray is gone", lambda: not machine.processes() and not machine.unix_sockets(), 15)
    assert machine.left_behind() == []


def test_in_token_mode_and_after_ray_stop(machine: Machine):
    assert machine.run("ray", "get-auth-token", "--generate").status == 0
    assert machine.run(*START, RAY_AUTH_MODE="token").status == 0
    wrong = machine.up(RAY_AUTH_TOKEN="not-the-token")
    assert wrong.status == 1
    assert "refuses the token" in wrong.json["error"]["message"]

    up = machine.up("--prefill", 0)
    assert up.status == 0, up
    assert "asks nobody" not in up.err
    assert machine.status()["ray"] == {"address": "127.0.0.1:6379", "mode": "token", "started_by_baton": False}
    assert machine.generate("The store holds a prefix", *GREEDY)["finish_reason"] == "length"

    assert machine.run("ray", "stop").status == 0
    machine.wait("everything is gone", lambda: not machine.processes() and not machine.unix_sockets(), 20)
    status = machine.baton("status", "--json")
    assert status.status == 1
    assert "has died" in status.json["problem"]
    assert machine.baton("down").status == 0
    assert machine.left_behind() == []
