"""TLS as a client speaks it: the authorities that it trusts, and the certificate that it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    import grpc


@dataclass(frozen=True)
class ClientTls:
    """PEM files. Without `authorities` the public ones are trusted. A router with `tls.client_ca_file` asks its clients
    for a `certificate`, with its chain, and its `key`."""

    authorities: str | Path = ""
    certificate: str | Path = ""
    key: str | Path = ""

    @classmethod
    def of(cls, option: bool | str | Path | ClientTls) -> ClientTls | None:
        """Return what the argument `tls` of a client stands for; None: no TLS."""
        if isinstance(option, ClientTls):
            return option
        if isinstance(option, bool) or not option:
            return cls() if option else None
        return cls(authorities=option)

    def grpc_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel. Raises ConfigError if a file can't be read."""
        import grpc

        self.ssl_context()  # gRPC takes files that hold nothing of use, and says so with its first call
        return grpc.ssl_channel_credentials(_read(self.authorities), _read(self.key), _read(self.certificate))

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context of HTTP connections. Raises ConfigError if a file can't be read, or is none."""
        import ssl

        trusted = _read(self.authorities)
        try:
            context = ssl.create_default_context(cadata=None if trusted is None else trusted.decode())
        except (ssl.SSLError, UnicodeDecodeError) as error:
            raise ConfigError(f"tls has {self.authorities}, which holds no certificates: {error}") from None
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key or None, password="")
            except (OSError, ValueError) as error:  # ssl.SSLError among them
                raise ConfigError(
                    f"tls has the certificate {self.certificate} with the key {self.key}, which can't be used: {error}"
                ) from None
        return context


def _read(path: str | Path) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls has the file {path}, which can't be read: {error.strerror}") from None
