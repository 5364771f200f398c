"""A worker of each role and a store that have a fuzzer as their only router, in processes of their own.

What a router may order would disturb the honest streams: so these serve no cluster. They have a node of their own, and
small pools.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from baton.config import Bytes, Config, dump
from deploy.local import Child, LocalCluster
from deploy.processes import ProcessIdentity, end

NODE = "victims"
_MODULES = {
    "store-9": ["kvstore"], "prefill-9": ["worker", "prefill"], "decode-9": ["worker", "decode"],
}  # fmt: skip
_POOL, _ARENA = Bytes(4 * 2**20), Bytes(8 * 2**20)


class Victims:
    """The three processes. They look for their router at `endpoint`."""

    def __init__(self, config: Config, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        replace = msgspec.structs.replace
        self._config = replace(
            config,
            cluster=replace(config.cluster, name=f"{config.cluster.name[:20]}-v"),
            store=replace(config.store, host_cache_bytes=_ARENA),
            prefill=replace(config.prefill, kv_cache_bytes=_POOL),
            decode=replace(config.decode, kv_cache_bytes=_POOL, fetch_timeout_ms=1_000),
        )
        self._folder = folder
        self._running: dict[str, Child] = {}

    def __enter__(self) -> Self:
        file = self._folder / "victims.yaml"
        file.write_text(dump(self._config))
        for name, module in _MODULES.items():
            argv = [*module, "--config", str(file), "--name", name, "--node", NODE, "--router", self.endpoint]
            with (self._folder / f"{name}.out").open("wb") as out, (self._folder / f"{name}.err").open("wb") as err:
                self._running[name] = LocalCluster.launch((), argv, out, err)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end([ProcessIdentity.of(child.pid) for child in self._running.values() if child.poll() is None], 5.0)
        for child in self._running.values():
            child.wait()

    @property
    def pids(self) -> Mapping[str, int]:
        """Of those that run."""
        return {name: child.pid for name, child in self._running.items() if child.poll() is None}
