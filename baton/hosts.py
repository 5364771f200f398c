"""Addresses of machines as text: their reach, and how they are written in an endpoint.

Both ends of a connection decide by the text of the endpoint whether it is encrypted, so a process announces the very
address that it bound; "every interface" is no such address.
"""

from __future__ import annotations

import ipaddress
import os
import re

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\s:\[\]@/]*)(:\d*)?")
_DOTLESS = re.compile(r"[a-z0-9_-]+")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than "localhost" may mean any machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_of_header(header: str) -> str:
    """The host in an HTTP Host header, in lower case, without port and brackets. What is none is returned as it is."""
    found = _HOST.fullmatch(header.strip().lower())
    return found["host"].strip("[]").rstrip(".") if found else header


def names_this_machine(host: str) -> bool:
    """Whether a host that a client wrote is no name that a site on the internet can let point to this machine.

    A name without a dot comes from this machine or its own network: a hosts file, a container, a search domain."""
    own = host.endswith(".localhost") or host == os.uname().nodename.lower() or _DOTLESS.fullmatch(host) is not None
    return own or is_wildcard(host) or is_loopback(host)


def is_wildcard(host: str) -> bool:
    """Whether it means every interface of whichever machine reads it."""
    return host.strip("[]") in ("0.0.0.0", "::", "*", "")  # noqa: S104 - recognised here, not listened on


def endpoint(host: str, port: int = 0) -> str:
    """The ZMQ endpoint of that host and port (0: any free one)."""
    return f"tcp://{bracketed(host)}:{port}"


def host_of(endpoint: str) -> str:
    """The host in "tcp://host:port" or "host:port", without brackets."""
    return endpoint.rpartition("//")[2].rpartition(":")[0].strip("[]")


def bracketed(host: str) -> str:
    """As it is written before a colon and a port: IPv6 addresses have colons of their own."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
