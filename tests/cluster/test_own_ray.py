"""A cluster on a Ray that Baton starts itself."""

import signal
import sys
import time

import pytest

from tests.cluster.machine import HOME, MODEL, Machine

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

GREEDY = ["--temperature", 0, "--max-tokens", 24, "--ignore-eos"]


def names(machine: Machine) -> set[str]:
    return {process["name"] for process in machine.status()["processes"]}


def pid_of(machine: Machine, name: str) -> int | None:
    return next(process["pid"] for process in machine.status()["processes"] if process["name"] == name)


def is_live(machine: Machine, name: str) -> int | None:
    """Return the pid of a process that is live."""
    listed = machine.status()["processes"]
    return next((one["pid"] for one in listed if one["name"] == name and one["state"] == "live"), None)


OTHER = "/tmp/other"
NEW_WEIGHTS = f"""
import pathlib, shutil
from safetensors.torch import load_file, save_file
shutil.copytree("{MODEL}", "{OTHER}")
(file,) = pathlib.Path("{OTHER}").glob("*.safetensors")
save_file({{name: tensor.flip(0) for name, tensor in load_file(file).items()}}, file)
"""


def test_a_day_with_a_cluster(machine: Machine):
    up = machine.up("--prefill", 1, "--decode", 1)
    assert up.status == 0, up
    assert up.json["grpc"] == "127.0.0.1:50051"
    key_file = machine.status()["key_file"]
    assert machine.run("stat", "--format=%a", key_file).out == "600\n", "loopback is encrypted, too"

    first = machine.generate("The router carries the prompt", *GREEDY)
    assert first["finish_reason"] == "length"
    assert len(first["token_ids"]) == first["usage"]["completion_tokens"] == 24
    ids = ",".join(str(token) for token in range(3, 100))
    one = machine.generate("--token-ids", ids, *GREEDY)
    two = machine.generate("--token-ids", ids, *GREEDY)
    assert one["token_ids"] == two["token_ids"]
    assert two["usage"]["cached_tokens"] > 0
    streamed = machine.baton("generate", "The router carries the prompt", *GREEDY)
    assert streamed.out == first["text"] + "\n"
    refused = machine.baton("generate", "x", "--temperature", "nan", "--json")
    assert refused.status == 1
    assert refused.json["error"]["reason"] == "invalid_request"

    status = machine.status()
    assert status["serving"]
    assert {process["state"] for process in status["processes"]} == {"live"}
    assert names(machine) == {"router", "store-0", "prefill-0", "decode-0"}
    assert set(machine.run("ls", status["log_dir"]).out.split()) >= {"decode-0.log", "prefill-0.log"}
    assert "decode-0" in machine.baton("status").out

    again = machine.up()
    assert again.status == 1
    assert "is up already" in again.json["error"]["message"]

    assert machine.baton("scale", "--prefill", 0, "--decode", 2, "--json").json == {
        "name": "baton",
        "model": "model",
        "prefill": 0,
        "decode": 2,
    }
    assert names(machine) == {"router", "store-0", "decode-0", "decode-1"}
    assert machine.generate("The router carries the prompt", *GREEDY)["token_ids"] == first["token_ids"]

    assert machine.run(sys.executable, "-c", NEW_WEIGHTS).status == 0
    assert machine.baton("reload", OTHER, "--json").json == {"checkpoint": OTHER, "done": True, "left": []}
    other = machine.generate("The router carries the prompt", *GREEDY)["token_ids"]
    assert other != first["token_ids"]
    for name in ("decode-0", "decode-1"):  # the supervisor replaces them with the new weights
        dead = pid_of(machine, name)
        machine.kill(dead)
        machine.wait(f"{name} is back", lambda name=name, dead=dead: is_live(machine, name) not in (None, dead))
    assert machine.generate("The router carries the prompt", *GREEDY)["token_ids"] == other

    assert machine.baton("down").status == 0
    assert machine.left_behind() == []
    assert machine.run("ls", key_file).status != 0
    assert machine.baton("down").status == 1


CLIENT = """
import http.client, json
body = {"prompt": [3, 4, 5], "max_tokens": 1000, "n": 8, "ignore_eos": True, "stream": True}
while True:
    connection = http.client.HTTPConnection("127.0.0.1", 8000)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
    except OSError:
        break
    if answer.status != 200:
        break
    print("begun", flush=True)
    text = answer.read()
    assert text.count(b'"finish_reason":"length"') == 8, text[-1_000:]
"""


def test_down_lets_streams_end(machine: Machine):
    """Clients send one request after the other until none is taken. Each that was taken ends as it should."""
    assert machine.up("--prefill", 0, "--decode", 1, "--set", "router.shutdown_timeout_ms=60000").status == 0
    with machine.start(sys.executable, "-c", CLIENT) as one, machine.start(sys.executable, "-c", CLIENT) as other:
        for client in (one, other):
            assert client.stdout.readline() == "begun\n"
        assert machine.baton("down", timeout=120).status == 0
        for client in (one, other):
            _, error = client.communicate(timeout=30)
            assert client.returncode == 0, error
    assert machine.left_behind() == []


def test_two_routers_of_which_one_dies(machine: Machine):
    """Clients go to the other one at the same port, commands find it, and the dead one comes back where it was. It has
    two models: each has its workers at both routers, before and after. One gets new weights."""
    assert machine.run(sys.executable, "-c", NEW_WEIGHTS).status == 0
    up = machine.up("--model", OTHER, "--prefill", 0, "--routers", 2)
    assert up.status == 0, up
    assert (up.json["model"], up.json["further_models"]) == ("model", ["other"])
    doors = {(router["grpc"], router["api"]) for router in up.json["routers"].values()}
    assert set(up.json["routers"]) == {"router", "router-1"}
    assert len(doors) == 1, "they share the ports for clients"
    both = {"store-0", "decode-0", "store-m1-0", "decode-m1-0"}
    assert names(machine) == {"router", "router-1", *both}
    ask = ["The router carries the prompt", *GREEDY]
    first = machine.generate(*ask)
    second = machine.generate(*ask, "--model", "other")
    assert first["token_ids"] != second["token_ids"]
    assert machine.baton("scale", "--model", "other", "--decode", 2, "--json").json["decode"] == 2
    assert names(machine) == {"router", "router-1", *both, "decode-m1-1"}
    pids = {process["name"]: process["pid"] for process in machine.status()["processes"]}
    machine.kill(pids["router"])
    for _ in range(4):
        assert machine.generate(*ask)["token_ids"] == first["token_ids"]
        assert machine.generate(*ask, "--model", "other")["token_ids"] == second["token_ids"]
    machine.wait(
        "the router is back",
        lambda: machine.status()["serving"] and pid_of(machine, "router") not in (None, pids["router"]),
    )
    for _ in range(4):
        assert machine.generate(*ask)["token_ids"] == first["token_ids"]
        assert machine.generate(*ask, "--model", "other")["token_ids"] == second["token_ids"]
    assert machine.baton("reload", MODEL, "--model", "other", "--json").json["done"]
    for name, model in (("decode-0", "model"), ("decode-m1-0", "other")):
        dead = pid_of(machine, name)
        machine.kill(dead)
        machine.wait(f"{name} is back", lambda name=name, dead=dead: is_live(machine, name) not in (None, dead))
        assert machine.generate(*ask, "--model", model)["token_ids"] == first["token_ids"]
    assert machine.baton("down").status == 0
    assert machine.left_behind() == []


def test_an_up_that_fails_leaves_nothing(machine: Machine):
    """The pool has no room for a page, which only a worker finds out: by then Ray, router and store run."""
    up = machine.up("--set", "decode.kv_cache_bytes=1KiB")
    assert up.status == 1
    error = up.json["error"]
    assert "kv_cache_bytes" in error["message"]
    assert f"{HOME}/.local/state/baton/baton/logs/" in error["message"]
    assert machine.left_behind() == []


def test_a_port_that_is_taken(machine: Machine):
    script = "import socket; s = socket.create_server(('127.0.0.1', 20052)); print('on', flush=True); s.accept()"
    with machine.start("python", "-c", script) as listener:
        assert listener.stdout.readline() == "on\n"
        up = machine.up()
        (pid,) = machine.processes()
        machine.kill(pid)
    assert up.status == 1
    assert up.json["error"]["reason"] == "port_in_use"
    assert "127.0.0.1:20052" in up.json["error"]["message"]
    assert machine.left_behind() == []


def test_an_up_that_is_interrupted_or_killed_leaves_nothing(machine: Machine):
    for number, left in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        up = machine.start("python", "-m", "deploy", "up", "--model", MODEL)
        machine.wait("Ray is starting", lambda: any("gcs_server" in c for c in machine.processes().values()))
        (pid,) = (pid for pid, command in machine.processes().items() if command.startswith("python -m deploy up"))
        machine.kill(pid, number)
        up.communicate(timeout=30)
        assert up.returncode != 0
        if left:  # a killed command (SIGKILL) cleans up nothing; the next command does
            assert "never came up" in machine.baton("status", "--json").json["error"]["message"]
            assert machine.baton("down").status == 0
        assert machine.left_behind() == []


def test_after_sigkill_of_everything_nothing_is_left(machine: Machine):
    up = machine.up("--prefill", 0)
    assert up.status == 0, up
    assert machine.unix_sockets()
    # In one stroke, Ray first: it would restart the supervisor.
    machine.run("kill", "-9", *sorted(machine.processes()))
    machine.wait("every process is gone", lambda: not machine.processes(), 15)
    # A process that shows as a zombie may have a thread left that has not closed its files yet.
    machine.wait("every socket is gone", lambda: not machine.unix_sockets(), 5)
    assert machine.run("ls", "-A", "/dev/shm").out == ""
    status = machine.baton("status", "--json")
    assert status.status == 1
    assert "has died" in status.json["problem"]
    # The next one under that name clears away what the dead one left, and is not disturbed by it.
    up = machine.up("--prefill", 0)
    assert up.status == 0, up
    begin = time.monotonic()
    assert machine.baton("down").status == 0
    assert time.monotonic() - begin < 15
    assert machine.left_behind() == []
