"""Which processes a cluster shall have, and on which node: pure arithmetic over the configuration.

Routers run on the first node. A router that listens on loopback can only be reached from its own node, so then
everything runs there. Otherwise decode workers go round the nodes, and prefill workers go on where those stopped: with
a worker of each kind and two nodes each has a node to itself. Pages cross between the nodes' stores, so no pair of
workers need share one; that a pair on one node is cheaper is for the router's placement to weigh, request by request.
Each node that has a worker has one store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from baton.config import Config
from baton.hosts import is_loopback
from baton.messages import Role
from baton.operator_address import operator_of_router

START_ORDER: tuple[Role, ...] = ("router", "store", "prefill", "decode")
_FIRST = "router"  # its name; the next one is router-1


@dataclass(frozen=True)
class ProcessSpec:
    """One process that shall run: its name is stable over restarts."""

    name: str
    role: Role
    node: str


@dataclass(frozen=True)
class ClusterScale:
    """How many workers of each kind."""

    prefill: int
    decode: int


def role_of(name: str) -> Role:
    """Of the process of that name."""
    return cast(Role, name.partition("-")[0])


def scale_of(config: Config) -> ClusterScale:
    return ClusterScale(config.cluster.prefill, config.cluster.decode)


def reachable_nodes(config: Config, nodes: Sequence[str]) -> Sequence[str]:
    """The nodes whose processes could reach a router, which runs on the first."""
    return nodes[:1] if is_loopback(config.router.host) else nodes


def plan(
    config: Config,
    scale: ClusterScale,
    nodes: Sequence[str],
    placed: Mapping[str, str] | None = None,
    *,
    one_machine: bool = False,
) -> list[ProcessSpec]:
    """Every process of the cluster in start order. `placed` says where processes run now, or shall run (name → node):
    as long as that node is still here they stay where they are. `one_machine`: the nodes are names on one machine, so
    that a router on loopback is reached from each."""
    if not nodes:
        raise ValueError("a cluster needs at least one node")
    placed = placed or {}
    router_node = placed.get(_FIRST, nodes[0])
    ordered = [router_node, *(node for node in nodes if node != router_node)]
    usable = ordered if one_machine else reachable_nodes(config, ordered)

    def worker(role: Role, index: int, turn: int) -> ProcessSpec:
        there = placed.get(f"{role}-{index}", "")
        return ProcessSpec(f"{role}-{index}", role, there if there in usable else usable[turn % len(usable)])

    decode = [worker("decode", index, index) for index in range(scale.decode)]
    prefill = [worker("prefill", index, scale.decode + index) for index in range(scale.prefill)]
    workers = [*prefill, *decode]
    # A store is named after its node's place in the list, and keeps its name while it runs.
    stores = _stores(usable, {w.node for w in workers}, placed)
    others = [ProcessSpec(f"{_FIRST}-{index}", "router", router_node) for index in range(1, config.cluster.routers)]
    return [ProcessSpec(_FIRST, "router", router_node), *others, *stores, *workers]


def listening(config: Config, router: str) -> Config:
    """As that router takes it which has never served: the ports of the configuration are the first one's."""
    if router == _FIRST:
        return config
    operator = operator_of_router(config.router.operator, router)
    anywhere = msgspec.structs.replace(config.router, grpc_port=0, internal_port=0, http_port=0, operator=operator)
    return msgspec.structs.replace(config, router=anywhere)


def workers_on(node: str, specs: Iterable[ProcessSpec]) -> int:
    """How many workers share a node's cores."""
    return sum(spec.node == node and spec.role in ("prefill", "decode") for spec in specs)


def _stores(nodes: Sequence[str], used: set[str], placed: Mapping[str, str]) -> list[ProcessSpec]:
    names = {node: name for name, node in placed.items() if name.startswith("store-") and node in used}
    free = (name for index in range(len(nodes) + len(names)) if (name := f"store-{index}") not in names.values())
    return [ProcessSpec(names.get(node) or next(free), "store", node) for node in nodes if node in used]
