"""What must be in place before clients may connect: a certificate that works and, for other machines, API keys.

The doors are the HTTP APIs and the public gRPC port. Both listen at `api.host`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from baton.api_keys import KeyRing
from baton.config import Config, TlsConfig
from baton.errors import StartupError
from baton.hosts import is_loopback


@dataclass(frozen=True)
class Certificate:
    """A server's certificate, with the authorities of its clients' certificates, if clients need one."""

    cert_file: str
    key_file: str
    client_ca_file: str  # "": clients need no certificate
    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(repr=False)


class _Encrypted(Exception):
    """The key needs a password."""


def certificate(tls: TlsConfig) -> Certificate | None:
    """Return the certificate that the doors show; None: they speak without TLS. Raises StartupError, and says why, if
    the files can't be read or do not belong together."""
    if not tls.cert_file:
        return None
    chain, key = _read("cert_file", tls.cert_file), _read("key_file", tls.key_file)
    client_ca = _read("client_ca_file", tls.client_ca_file) if tls.client_ca_file else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
    except _Encrypted:
        raise StartupError(
            f"tls.key_file {tls.key_file} needs a password; decrypt it, since routers start by themselves"
        ) from None
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        said = "is not the key of that certificate" if why == "KEY_VALUES_MISMATCH" else f"can't be used: {why}"
        raise StartupError(
            f"tls.key_file {tls.key_file} with tls.cert_file {tls.cert_file} {said}; both must be PEM, the server's "
            "certificate first and its chain after it"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except (ssl.SSLError, OSError) as error:
            raise StartupError(f"tls.client_ca_file {tls.client_ca_file} holds no PEM certificates: {error}") from None
    return Certificate(tls.cert_file, tls.key_file, tls.client_ca_file, chain, key, client_ca)


def check_keys(config: Config, keys: KeyRing) -> None:
    """Raise StartupError if other machines could use the doors without a key. `Config` has checked TLS."""
    if keys.required or config.api.insecure or is_loopback(config.api.host):
        return
    raise StartupError(
        f"api.host is {config.api.host}, which other machines reach, and clients need no API key: make one with "
        "`baton keys add NAME --tenant T`, or say --insecure (api.insecure) if all of them may use this cluster"
    )


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"can't read tls.{setting} {path}: {error.strerror}") from None


def _no_password() -> bytes:
    raise _Encrypted
