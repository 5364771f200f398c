"""Where a router answers."""

from __future__ import annotations

import msgspec

from baton.config import Config


class Addresses(msgspec.Struct, frozen=True):
    """What a router says once it serves, each as host:port or a ZMQ endpoint."""

    grpc: str
    internal: str
    http: str

    def pin(self, config: Config) -> Config:
        """The configuration with which a later router comes back at the same addresses."""
        ports = {f"{kind}_port": int(getattr(self, kind).rpartition(":")[2]) for kind in ("grpc", "internal", "http")}
        return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, **ports))

    @property
    def endpoint(self) -> str:
        """Where workers and stores connect."""
        return self.internal if "://" in self.internal else f"tcp://{self.internal}"
