"""The setting `router.operator`: the path of a Unix socket, or a port on loopback."""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from baton.errors import ConfigError
from baton.hosts import bracketed, is_loopback

SUFFIX = ".sock"
FIRST_ROUTER = "router"
_SCHEME = "unix:"


class Loopback(NamedTuple):
    """A TCP port that only this machine reaches. Port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def parse_operator(setting: str) -> Path | Loopback | None:
    """Read `router.operator`; none stands for the default path. Raises ConfigError."""
    if not setting:
        return None
    path = unquote(setting.removeprefix(_SCHEME)) if setting.startswith(_SCHEME) else setting
    if path.startswith("/"):
        if "," in path:
            raise ConfigError(
                f"router.operator is {setting!r}: commas stand between the addresses of routers; take another path"
            )
        return Path(path)
    host, colon, port = setting.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            f"router.operator is {setting!r}; write the absolute path of a Unix socket, host:port with a loopback "
            'address, or "" for a Unix socket at the default path'
        )
    if not is_loopback(host):
        raise ConfigError(
            f"router.operator is {setting!r}: that port asks for no password, so every machine that reaches {host!r} "
            'could drain and profile the cluster. Take a loopback address such as 127.0.0.1:50054, or "" for a Unix '
            "socket, and forward it over ssh to other machines"
        )
    return Loopback(host.strip("[]"), int(port))


def router_names(count: int) -> list[str]:
    """Return the names of a cluster's routers, the first one's first."""
    return [FIRST_ROUTER, *(f"{FIRST_ROUTER}-{number}" for number in range(1, count))]


def operator_of_router(setting: str, router: str) -> str:
    """Return the setting as one of several routers takes it: a path with its name in it. A port is the first one's."""
    match parse_operator(setting):
        case Path() as path if router != FIRST_ROUTER:
            return str(path.with_name(f"{path.name.removesuffix(SUFFIX)}.{router}{SUFFIX}"))
        case Loopback() if router != FIRST_ROUTER:
            return ""
        case _:
            return setting
