"""The Dockerfile and the compose files: checked as far as that needs no container engine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import config

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "manifests" / "docker"
COMPOSE = sorted(path.name for path in DOCKER.glob("compose*.yaml"))


class _Loader(yaml.SafeLoader):
    """Knows compose's own tag."""


_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))


def compose(name: str) -> dict[str, Any]:
    return yaml.load((DOCKER / name).read_text(), _Loader)


def services() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every service with the file that it stands in."""
    for file in COMPOSE:
        for name, service in compose(file)["services"].items():
            yield file, name, service


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), DOCKER / "Dockerfile"], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_the_image_runs_as_no_root_and_holds_no_secret() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000:1000"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"  # what is not listed is not sent
    assert "deploy/manifests/docker/secrets" in ignored
    assert "deploy/manifests/docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_image_for_gpus_brings_vllm() -> None:
    """Without it `model.engine: auto` would take our own engine, which is several times as slow on a GPU."""
    (line,) = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if "extras=" in line]
    assert 'if [ "$DEVICE" = cuda ]; then extras=otel,fastokens,gpu,vllm; fi' in line


def test_what_the_image_copies_is_sent_to_the_builder() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    wheel = (ROOT / "pyproject.toml").read_text().split("[tool.hatch.build.targets.wheel]")[1].splitlines()[1]
    for package in wheel.split("[")[1].rstrip("]").replace('"', "").split(", "):
        assert package in sent
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= sent
    for path in sent:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("script", ["node.sh"])
def test_scripts_are_executable_bash(script: str) -> None:
    assert (DOCKER / script).stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", DOCKER / script]).returncode == 0


def test_ports_without_keys_are_published_on_loopback_only() -> None:
    assert config.load(DOCKER / "baton.yaml").api.insecure
    for file, name, service in services():
        for port in service.get("ports", ()):
            open_to_all = file == "compose.tls.yaml" and port in ("8000:8000", "50051:50051")
            assert port.startswith("127.0.0.1:") or open_to_all, (file, name, port)


def test_clients_of_other_machines_need_tls_and_keys() -> None:
    settings = config.load(DOCKER / "baton.tls.yaml")
    head = compose("compose.tls.yaml")["services"]["head"]
    assert settings.api.require_keys
    assert not settings.api.insecure
    metrics = yaml.safe_load((DOCKER / "prometheus.tls.yml").read_text())["scrape_configs"][0]["authorization"]
    assert metrics == {"credentials_file": "/run/secrets/metrics_key"}  # an operator's: the router's page needs one
    secrets = {f"/run/secrets/{name}" for name in head["secrets"]}
    assert {settings.tls.cert_file, settings.tls.key_file, head["environment"]["BATON_API_KEYS"]} == secrets


def test_the_two_configurations_differ_in_access_alone() -> None:
    plain, tls = (yaml.safe_load((DOCKER / name).read_text()) for name in ("baton.yaml", "baton.tls.yaml"))
    assert {key: value for key, value in plain.items() if key != "api"} == {
        key: value for key, value in tls.items() if key not in ("api", "tls")
    }


def test_secrets_are_files_and_stand_in_no_command_and_no_environment() -> None:
    for file, name, service in services():
        for key, value in service.get("environment", {}).items():
            secret = any(word in key for word in ("TOKEN", "PASSWORD", "KEYS"))
            assert not secret or str(value).startswith("/run/secrets/"), (file, name, key)
        assert "token" not in " ".join(service.get("command", ())), (file, name)
    for file in COMPOSE:
        for name, secret in compose(file).get("secrets", {}).items():
            assert secret == {"file": f"./secrets/{name}"}


def test_every_service_drops_its_capabilities() -> None:
    for name, service in compose("compose.yaml")["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_what_is_mounted_from_here_exists() -> None:
    for file, name, service in services():
        for volume in service.get("volumes", ()):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), (file, name, source)
