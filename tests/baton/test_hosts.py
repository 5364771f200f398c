"""Addresses of machines as text."""

from pathlib import Path

import pytest

from baton import config, hosts
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("FD00:0::2", "fd00::2"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::", "::"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_a_host_is_normal_in_every_part(written: str, host: str, tmp_path: Path) -> None:
    assert hosts.problem(written) == ""
    assert hosts.normal(written) == host
    assert hosts.host_of(hosts.endpoint(host, 5)) == host
    read = config.load(None, {"router.host": written, "api.host": written, "api.insecure": True})
    assert (read.router.host, read.api.host) == (host, host)
    file = tmp_path / "cluster.yaml"
    file.write_text(config.dump(read))
    assert config.load(file) == read


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("fe80::1", "link-local"),
        ("[fe80::1%eth0]", "link-local"),
        ("ff02::1", "multicast"),
        ("224.0.0.1", "multicast"),
        ("localhost:80", "without a port"),
        ("[::1]:80", "without a port"),
        ("[::1", "without a port"),
        ("[127.0.0.1]", "without a port"),
        ("http://host", "without a port"),
    ],
)
@pytest.mark.parametrize("setting", ["router.host", "api.host"])
def test_a_host_that_can_not_be_used_is_named(host: str, why: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: .*{why}"):
        config.load(None, {setting: host, "api.insecure": True})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert hosts.is_loopback(host)
    assert not hosts.is_wildcard(host)
