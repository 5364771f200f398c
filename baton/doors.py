"""What must be in place before clients may connect: a certificate that works and, for other machines, API keys.

The doors are the HTTP APIs and the public gRPC port. Both listen at `api.host`.
"""

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from baton.api_keys import KeyRing, file_mark
from baton.config import Config, TlsConfig
from baton.errors import StartupError
from baton.hosts import is_loopback

log = logging.getLogger(__name__)


class _Encrypted(Exception):
    """The key needs a password."""


@dataclass(frozen=True)
class Certificate:
    """A server's certificate with its chain, and its key, as PEM."""

    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class _Loaded:
    """What the files held when they were read."""

    context: ssl.SSLContext
    certificate: Certificate
    client_ca: bytes | None


class ServerTls:
    """The certificate that the doors show, and the authorities of the certificates that they ask for. `refresh` follows
    the files of both, so that they can be renewed without a restart."""

    def __init__(self, tls: TlsConfig) -> None:
        """Read the files. Raises StartupError if they can't be read or do not belong together."""
        self._tls = tls
        self._seen = self._look()
        self._loaded = _load(tls)
        # A server keeps this context. Each handshake switches to the latest one before it reads anything of it.
        self.context = self._loaded.context
        self.context.sni_callback = self._switch
        if self._loaded.client_ca is not None:
            # A session that goes on later would show no certificate again.
            self.context.num_tickets = 0
            self.context.options |= ssl.OP_NO_TICKET

    @property
    def certificate(self) -> Certificate:
        return self._loaded.certificate

    @property
    def client_ca(self) -> bytes | None:
        """The authorities as PEM. None: clients need no certificate."""
        return self._loaded.client_ca

    def refresh(self) -> None:
        """Use what the files have now for new connections. Files that can't be used change nothing."""
        if (seen := self._look()) == self._seen:
            return
        self._seen = seen
        try:
            self._loaded = _load(self._tls)
        except StartupError as error:
            log.warning("the certificate stays as it was: %s", error)
        else:
            log.info("new connections get the certificate and authorities that %s has now", self._tls.cert_file)

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        files = (self._tls.cert_file, self._tls.key_file, self._tls.client_ca_file)
        return tuple(file_mark(Path(file)) for file in files if file)

    def _switch(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context


def server_tls(tls: TlsConfig) -> ServerTls | None:
    """Return what the doors show; None: they speak without TLS. Raises StartupError, and says why."""
    return ServerTls(tls) if tls.cert_file else None


def _load(tls: TlsConfig) -> _Loaded:
    """Read the files into a context of their own. Raises StartupError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = _load_certificate(tls, context)
    if not tls.client_ca_file:
        return _Loaded(context, certificate, None)
    client_ca = _read("client_ca_file", tls.client_ca_file)
    try:
        context.load_verify_locations(cadata=client_ca.decode())
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"tls.client_ca_file {tls.client_ca_file} holds no PEM certificates: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return _Loaded(context, certificate, client_ca)


def _load_certificate(tls: TlsConfig, context: ssl.SSLContext) -> Certificate:
    """Read the certificate and its key into a context. Raises StartupError."""
    chain, key = _read("cert_file", tls.cert_file), _read("key_file", tls.key_file)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
    except _Encrypted:
        raise StartupError(
            f"tls.key_file {tls.key_file} needs a password; decrypt it, since routers start by themselves"
        ) from None
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        problem = "is not the key of that certificate" if why == "KEY_VALUES_MISMATCH" else f"can't be used: {why}"
        raise StartupError(
            f"tls.key_file {tls.key_file} with tls.cert_file {tls.cert_file} {problem}; both must be PEM, the server's "
            "certificate first and its chain after it"
        ) from None
    return Certificate(chain, key)


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
