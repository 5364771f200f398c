"""Processes that serve no honest request, because a fuzzer is their only router, their store or their workers.

What such a peer may do would disturb the honest streams. So each group has a node, a cluster's name and small pools of
its own.
"""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from baton.addresses import ServiceAddresses
from baton.config import ArenaBytes, Bytes, Config, dump
from deploy.local import Child, LocalCluster
from deploy.processes import ProcessIdentity, end
from kvstore.client.connection import store_address

_MODULES = {
    "store": ["kvstore"], "prefill": ["worker", "prefill"], "decode": ["worker", "decode"], "router": ["router"],
}  # fmt: skip
_POOL, _ARENA = Bytes(4 * 2**20), ArenaBytes(8 * 2**20)
_START = 90.0  # seconds in which a router must have said where it listens


class Victims:
    """A group of processes. Those with a router look for it at `endpoint`."""

    def __init__(self, config: Config, folder: Path, tag: str, names: Sequence[str]) -> None:
        """`names` such as "decode-9", whose beginnings are roles; the number must be one that nothing else has. A
        router of the group listens at `endpoint`."""
        # Bound for good: else a connection may be given this port. ZMQ listens there all the same.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port: int = self._port.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.node = f"victims-{tag}"
        replace = msgspec.structs.replace
        self._config = replace(
            config,
            cluster=replace(config.cluster, name=f"{config.cluster.name[:20]}-{tag}"),
            store=replace(config.store, host_cache_bytes=_ARENA),
            prefill=replace(config.prefill, kv_cache_bytes=_POOL, store_timeout_ms=1_000),
            decode=replace(config.decode, kv_cache_bytes=_POOL, fetch_timeout_ms=1_000),
            router=replace(
                config.router,
                grpc_port=0,
                internal_port=port,
                http_port=0,
                attempt_timeout_ms=2_000,
                operator=str(Path(config.router.operator).with_name(f"{tag}.sock")),
            ),
            api=replace(config.api, port=0),
        )
        self._folder, self._names = folder, names
        self._running: dict[str, Child] = {}

    @property
    def store_address(self) -> str:
        return store_address(self._config.cluster.name, self.node)

    @property
    def page_size(self) -> int:
        return self._config.pages.page_size

    def __enter__(self) -> Self:
        for name in self._names:
            role = name.partition("-")[0]
            file = self._folder / f"{name}.yaml"
            file.write_text(dump(self._config))
            argv = [*_MODULES[role], "--config", str(file), "--name", name, "--node", self.node]
            argv += [] if role == "router" else ["--router", self.endpoint]
            with self._out(name).open("wb") as out, (self._folder / f"{name}.err").open("wb") as err:
                self._running[name] = LocalCluster.launch((), argv, out, err)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end([ProcessIdentity.of(child.pid) for child in self._running.values() if child.poll() is None], 5.0)
        for child in self._running.values():
            child.wait()
        self._port.close()

    def addresses(self, router: str) -> ServiceAddresses:
        """Wait until a router of the group serves. Raises AssertionError if it does not."""
        until = time.monotonic() + _START
        while time.monotonic() < until and router in self.pids:
            line, whole, _ = self._out(router).read_text().partition("\n")
            if whole:
                return msgspec.json.decode(line, type=ServiceAddresses)
            time.sleep(0.05)
        raise AssertionError(f"{router} does not serve: {(self._folder / f'{router}.err').read_text()[-2_000:]}")

    @property
    def pids(self) -> Mapping[str, int]:
        return {name: child.pid for name, child in self._running.items() if child.poll() is None}

    def _out(self, name: str) -> Path:
        return self._folder / f"{name}.out"


@contextmanager
def started(groups: Sequence[Victims]) -> Iterator[None]:
    if not groups:
        yield
        return
    with groups[0], started(groups[1:]):
        yield
