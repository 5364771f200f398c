"""Find the Ray that runs here and its authentication mode, within milliseconds and without importing Ray.

Ray's client retries for 20 s if its authentication mode differs from the cluster's. So Baton first makes one harmless
call to the cluster: it answers, asks for a token, refuses our token, or does not answer.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import grpc
import psutil

from baton.errors import RayUnusable
from deploy.control_plane.state_file import RayLink

OWN_PREFIX = "/tmp/baton-ray-"  # noqa: S108 - made by mkdtemp; Ray's socket paths must stay short
PATIENCE = 5.0  # seconds
_CURRENT = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 - where `ray start` leaves its address
_GCS_ADDRESS = re.compile(r"--gcs-address=([^\s\"]+:\d+)")
_PING = "/ray.rpc.NodeInfoGcsService/GetClusterId"


class RayAnswer(Enum):
    """The answer of a Ray to a caller."""

    WELCOME = "welcome"
    REFUSED = "refused"  # it wants a token, or another one
    SILENT = "silent"


@dataclass(frozen=True)
class Token:
    """A Ray token, and its file (empty: it was in the environment)."""

    text: str
    path: str


def find(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return host:port of the Ray to join: RAY_ADDRESS, or the one that this user runs here.

    Never returns a Ray that Baton started for another cluster. Raises RayUnusable if several run.
    """
    if (named := environment.get("RAY_ADDRESS", "")) and named not in ("auto", "local"):
        if named.startswith("ray://"):
            raise RayUnusable(f"RAY_ADDRESS is {named}, a Ray client address; Baton needs host:port of the head node")
        return named
    running = sorted(set(_running()))
    if len(running) > 1:
        current = _CURRENT.read_text().strip() if _CURRENT.exists() else ""
        if current in running:
            return current
        raise RayUnusable(f"several Rays run here ({', '.join(running)}); say which: export RAY_ADDRESS=host:port")
    return running[0] if running else None


def link(address: str, environment: Mapping[str, str] = os.environ) -> RayLink:
    """Return the link to the Ray at `address`. Raises RayUnusable, with the command that fixes it."""
    match ask_ray(address, None):
        case RayAnswer.WELCOME:
            return RayLink(address, "disabled")
        case RayAnswer.SILENT:
            raise RayUnusable(
                f"Ray at {address} does not answer within {PATIENCE:.0f} s; start it with `ray start --head`, or let "
                "Baton start one of its own: `baton up --ray own`"
            )
        case RayAnswer.REFUSED:
            secret = token(environment)
            if secret is None:
                raise RayUnusable(
                    f"Ray at {address} asks for a token and there is none in ~/.ray/auth_token; copy it from the "
                    "head node (`ray get-auth-token` prints it there), or export RAY_AUTH_TOKEN_PATH=FILE"
                )
            if ask_ray(address, secret.text) is not RayAnswer.WELCOME:
                raise RayUnusable(
                    f"Ray at {address} refuses the token in {secret.path or 'RAY_AUTH_TOKEN'}; it was started with "
                    "another one: restart it (`ray stop`, `ray start --head`), or copy the token it runs with"
                )
            return RayLink(address, "token", secret.path)


def ask_ray(address: str, token: str | None, patience: float = PATIENCE) -> RayAnswer:
    """Make one call that changes nothing, and return the kind of answer."""
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else None
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(_PING)
        try:
            call(b"", timeout=patience, metadata=metadata, wait_for_ready=False)
        except grpc.RpcError as error:
            refused = isinstance(error, grpc.Call) and error.code() in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.PERMISSION_DENIED,
            )
            return RayAnswer.REFUSED if refused else RayAnswer.SILENT
    return RayAnswer.WELCOME


def listens(address: str, patience: float = PATIENCE) -> bool:
    """Whether a process accepts connections at `address`: a stopped Ray does, a Ray that has gone does not."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience).close()
    except (OSError, ValueError):
        return False
    return True


def token(environment: Mapping[str, str] = os.environ) -> Token | None:
    """Return the token that Ray itself would use, searched in Ray's own order."""
    if text := environment.get("RAY_AUTH_TOKEN", "").strip():
        return Token(text, "")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return Token(text, str(path)) if text else None


def _running() -> Iterator[str]:
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        info = process.info
        if info["name"] != "raylet" or not info["uids"] or info["uids"].real != os.getuid():
            continue
        line = " ".join(info["cmdline"] or ())
        if (match := _GCS_ADDRESS.search(line)) and f"--temp-dir={OWN_PREFIX}" not in line:
            yield match[1]
