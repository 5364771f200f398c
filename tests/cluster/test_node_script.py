"""The script of a container, without the container: it brings a cluster up on a Ray of its own, and takes both down."""

import json
import signal

import pytest
import yaml

from tests.cluster.machine import HOME, MODEL, ROOT, Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

SCRIPT = ROOT / "deploy" / "manifests" / "docker" / "node.sh"
API = "http://127.0.0.1:8000/v1/models"


def write(machine: Machine, path: str, text: str) -> str:
    assert machine.run("sh", "-c", f"umask 077; cat > {path} <<'END'\n{text}\nEND").status == 0
    return path


def status_of(machine: Machine, *headers: str) -> str:
    """The HTTP status that a client gets; 000: none."""
    options = [part for header in headers for part in ("-H", header)]
    return machine.run("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *options, API).out


def test_a_head_serves_with_the_keys_that_it_is_given_and_leaves_nothing_behind(machine: Machine) -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "manifests" / "docker" / "baton.yaml").read_text())
    settings["model"]["path"] = MODEL
    settings["store"]["host_cache_bytes"] = "32MiB"
    settings |= {role: {"kv_cache_bytes": "32MiB", "threads": 1} for role in ("prefill", "decode")}
    result = machine.baton("keys", "add", "first", "--tenant", "acme", "--json", HOME="/tmp/elsewhere")
    assert result.status == 0, result
    secret = "/tmp/elsewhere/.local/state/baton/baton/api-keys.json"
    environment = {
        "BATON_CONFIG": write(machine, f"{HOME}/baton.yaml", json.dumps(settings)),
        "BATON_API_KEYS": secret,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": write(machine, f"{HOME}/token", "0123456789abcdef" * 4),
    }
    log = f"{HOME}/node.log"
    command = f"bash {SCRIPT} head > {log} 2>&1; echo status $? >> {log}"
    with machine.start("sh", "-c", command, **environment):
        bearer = f"Authorization: Bearer {result.json['key']}"
        try:
            machine.wait("the head serves", lambda: "baton serves" in machine.run("cat", log).out, seconds=120)
            assert status_of(machine, bearer) == "200"
            assert status_of(machine) == "401"
            names = {process["name"] for process in machine.status()["processes"]}
            assert names == {"router", "store-0", "prefill-0", "decode-0"}
            later = machine.baton("keys", "add", "later", "--tenant", "acme", "--json", HOME="/tmp/elsewhere").json
            bearer = f"Authorization: Bearer {later['key']}"
            machine.wait("a new key is known", lambda: status_of(machine, bearer) == "200")
            script = min(pid for pid, line in machine.processes().items() if line == f"bash {SCRIPT} head")
            machine.kill(script, signal.SIGTERM)
            machine.wait("the script has ended", lambda: "status" in machine.run("tail", "-n1", log).out, seconds=60)
            assert machine.run("tail", "-n1", log).out == "status 0\n"
            assert machine.run("rm", f"{HOME}/.local/state/baton/baton/api-keys.json").status == 0
            assert machine.left_behind() == []
        finally:
            print(machine.run("cat", log).out)
            machine.close()  # and the script with it


def test_a_node_without_a_token_does_not_start(machine: Machine) -> None:
    done = machine.run("bash", SCRIPT, "worker")
    assert done.status == 1
    assert "RAY_AUTH_MODE" in done.err
