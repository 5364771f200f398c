"""Where commands and the supervisor find the routers' ports for the operator."""

import socket
from pathlib import Path

import msgspec
import pytest

from baton import operator_port
from baton.addresses import ServiceAddresses, operator_target
from baton.client import Client
from baton.config import load
from baton.errors import PortInUse, StartupError
from baton.metrics_server import Answer, MetricsServer
from baton.operator_address import parse_operator
from baton.ports import listen
from deploy.commands import running_cluster
from deploy.control_plane import preflight, state_file
from deploy.control_plane.reports import OVERVIEW_FILE, ClusterOverview
from deploy.control_plane.state_file import RayLink, State
from deploy.control_plane.supervisor import DesiredCluster, Supervisor
from deploy.control_plane.teardown import _sockets
from deploy.local import LocalCluster
from deploy.placement.desired import ClusterScale
from deploy.processes import ProcessIdentity

UNIX = ServiceAddresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "unix:/run/me/router.sock")
TCP = ServiceAddresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")


def test_a_router_comes_back_at_a_port_of_the_operators_and_at_a_path_that_was_given():
    anywhere = load(overrides={"router.operator": "127.0.0.1:0"})
    assert TCP.pin(anywhere).router.operator == "127.0.0.1:4"
    config = load(overrides={"router.operator": "/run/me/router.sock"})
    assert parse_operator(UNIX.pin(config).router.operator) == Path("/run/me/router.sock")


def test_a_default_path_is_found_anew_at_every_start():
    """The folder that $XDG_RUNTIME_DIR names goes when its user logs out."""
    assert UNIX.pin(load()).router.operator == ""


def test_a_client_tries_the_next_router():
    other = msgspec.structs.replace(UNIX, operator="unix:/run/me/router-1.sock")
    assert operator_target([UNIX]) == "unix:/run/me/router.sock"
    assert operator_target([UNIX, other]) == "unix:/run/me/router.sock,/run/me/router-1.sock"
    assert operator_target([TCP, other]) == "127.0.0.1:4"


def test_the_state_file_names_it_and_the_supervisor_knows_better(tmp_path: Path):
    state = State("mine", RayLink("", "token"), "", {"router": UNIX})
    state_file.write(tmp_path, state)
    assert running_cluster.find(tmp_path).operator == "unix:/run/me/router.sock"
    moved = msgspec.structs.replace(UNIX, operator="unix:/tmp/baton-7/mine/router.sock")
    overview = ClusterOverview("mine", ProcessIdentity(1, 1), ClusterScale(1, 1), (), {"router": moved})
    (tmp_path / OVERVIEW_FILE).write_bytes(msgspec.json.encode(overview))
    assert running_cluster.find(tmp_path).operator == "unix:/tmp/baton-7/mine/router.sock"
    assert _sockets(tmp_path, state) == [Path("/tmp/baton-7/mine")]  # /run/me is the user's own folder


def test_a_port_that_is_taken_is_found_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        ports = {"router.grpc_port": 0, "router.internal_port": 0, "router.http_port": 0, "api.port": 0}
        config = load(overrides={**ports, "router.operator": f"127.0.0.1:{number}"})
        with pytest.raises(PortInUse, match=f"127.0.0.1:{number}.*--set router.operator=127.0.0.1:0 takes any"):
            preflight.check_ports(config)


def test_a_local_cluster_keeps_it_below_its_own_folder_where_the_path_fits(tmp_path: Path):
    cluster = LocalCluster(load(), tmp_path)
    assert cluster.config.router.operator == str(tmp_path / "run" / "router.sock")
    cluster.close()
    long = tmp_path / ("x" * 100)
    cluster = LocalCluster(load(), long)
    path = Path(cluster.config.router.operator)
    assert path.parent.is_dir()
    assert not path.is_relative_to(long)
    assert len(str(path)) <= operator_port.MAX_PATH_BYTES
    cluster.close()
    assert not path.parent.exists()
    with pytest.raises(StartupError, match="call up"):
        _ = cluster.operator


def test_a_router_counts_as_alive_while_its_metrics_port_answers():
    """Its socket for the operator may have been removed a moment ago, and its streams go on. The port for clients
    proves nothing: another router may answer there."""
    status = [503]
    page = MetricsServer(listen("127.0.0.1"), lambda _: Answer(b"", status[0]))
    supervisor = Supervisor.__new__(Supervisor)
    router = ServiceAddresses("127.0.0.1:1", "", f"127.0.0.1:{page.port}", "unix:/nowhere/router.sock")
    supervisor._desired = DesiredCluster(load(), ClusterScale(1, 1), "", {"router": router})
    with Client(operator=router.operator) as client:
        supervisor._clients = {"router": client}
        assert supervisor._ask_router("router") == "alive"
        status[0] = 504  # its loop stands still
        assert supervisor._ask_router("router") is None
        status[0] = 200
        assert supervisor._ask_router("router") == "alive"
        page.close()
        assert supervisor._ask_router("router") is None
