"""Addresses of machines as text: their reach, and how they are written in an endpoint.

Both ends of a connection decide by the text of the endpoint whether it is encrypted, so a process announces the very
address that it bound; "every interface" is no such address.
"""

import ipaddress
import os
import re
from functools import lru_cache

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\s:\[\]@/]*)(:\d*)?")
_DOTLESS = re.compile(r"[a-z0-9_-]+")


def normal(host: str) -> str:
    """Return the host as all of our code takes it: without brackets, and an IPv4 address in IPv6's clothes as such."""
    address = _parsed(host)
    return str(address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else host


def problem(host: str) -> str:
    """Return why other processes can't be told that address, or "" if they can."""
    address = _parsed(host)
    if address is None:
        wrong = any(sign in host for sign in ":[]/ ")
        return f"{host!r} is neither an address nor a name; write the host alone, without a port" if wrong else ""
    if isinstance(address, ipaddress.IPv6Address) and address.is_link_local:
        return f"{host} is a link-local address, which means another interface on every machine; take a global one"
    return f"{host} is a multicast address, on which nothing can listen" if address.is_multicast else ""


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if bracketed_alone := host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if bracketed_alone and address.version == 4 else address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than "localhost" may mean any machine."""
    if host == "localhost":
        return True
    address = _parsed(host)
    return address is not None and address.is_loopback


@lru_cache(64)
def host_of_header(header: str) -> str:
    """The host in an HTTP Host header, in lower case, without port and brackets. What is none is returned as it is."""
    match = _HOST.fullmatch(header.strip().lower())
    return match["host"].strip("[]").rstrip(".") if match else header


@lru_cache(64)
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


def is_ipv6(host: str) -> bool:
    """Whether it is an IPv6 address, of which sockets must be told."""
    return ":" in host


def host_of(endpoint: str) -> str:
    """The host in "tcp://host:port" or "host:port", without brackets."""
    return endpoint.rpartition("//")[2].rpartition(":")[0].strip("[]")


def bracketed(host: str) -> str:
    """As it is written before a colon and a port: IPv6 addresses have colons of their own."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
