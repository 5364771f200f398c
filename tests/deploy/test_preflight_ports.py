"""`baton up` looks at its ports before anything starts: it waits for a connection to end, and names what stays."""

import msgspec
import pytest

from baton.config import Config, FurtherModel, ModelConfig, load
from baton.errors import PortInUse
from deploy.control_plane import preflight
from tests.support.outgoing import outgoing


def at(port: int) -> Config:
    ports = {"router.grpc_port": port, "router.internal_port": 0, "router.http_port": 0, "api.port": 0}
    return load(overrides=ports)


def test_it_says_what_it_waits_for_and_goes_on() -> None:
    with outgoing() as connection:
        texts = list[str]()

        def say(text: str) -> None:
            texts.append(text)
            connection.reset()

        preflight.check_ports(at(connection.port), say)
        assert texts == [f"waiting for 127.0.0.1:{connection.port}: a connection holds it"]


def test_a_connection_that_stays_is_named() -> None:
    with outgoing() as connection, pytest.raises(PortInUse, match=rf"{connection.port}.*connection of process \d+"):
        preflight.check_ports(at(connection.port), lambda _: None)


def test_a_further_models_port_is_named_by_its_model() -> None:
    with outgoing() as connection:
        large = FurtherModel(model=ModelConfig(path="/models/large"), internal_port=connection.port)
        config = msgspec.structs.replace(at(0), models=(large,))
        named = r"\(models\.large\.internal_port\) is in use.*: internal_port: 0 of that model takes any"
        with pytest.raises(PortInUse, match=named):
            preflight.check_ports(config, lambda _: None)


def test_the_doctor_does_not_wait() -> None:
    with outgoing() as connection:
        connection.end()
        (ports,) = (finding for finding in preflight.examine(at(connection.port)) if finding.subject == "ports")
        assert ports.level == "bad"
        assert "TIME_WAIT" in ports.advice
