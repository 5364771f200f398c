"""The desired processes of a cluster and their nodes, computed purely from the configuration.

Routers run on the first node. A router that listens on loopback can only be reached from its own node, so then all
processes run there. Otherwise decode workers are assigned to nodes round-robin, and prefill workers continue that
order. With one worker of each role and two nodes, each worker has a node to itself. Stores send pages to each other, so
no two workers need share a node. The router's placement accounts for cheaper hand-offs within a node, per request. Each
node with a worker has one store.
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
_FIRST = "router"  # name of the first router; the next one is router-1


@dataclass(frozen=True)
class ProcessSpec:
    """One desired process. Its name is stable over restarts."""

    name: str
    role: Role
    node: str


@dataclass(frozen=True)
class ClusterScale:
    """The number of workers of each role."""

    prefill: int
    decode: int


def role_of(name: str) -> Role:
    """Return the role of the process of that name."""
    return cast(Role, name.partition("-")[0])


def scale_of(config: Config) -> ClusterScale:
    return ClusterScale(config.cluster.prefill, config.cluster.decode)


def reachable_nodes(config: Config, nodes: Sequence[str]) -> Sequence[str]:
    """Return the nodes from which a process can reach a router on the first node."""
    return nodes[:1] if is_loopback(config.router.host) else nodes


def plan(
    config: Config,
    scale: ClusterScale,
    nodes: Sequence[str],
    placed: Mapping[str, str] | None = None,
    *,
    one_machine: bool = False,
) -> list[ProcessSpec]:
    """Return every process of the cluster in start order.

    `placed` maps names to the nodes where processes run now, or shall run. They stay there as long as the node is up.
    `one_machine`: the nodes are names on one machine, so a router on loopback can be reached from each.
    """
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
    # Stores are numbered in the order of their nodes. A running store keeps its name.
    stores = _stores(usable, {w.node for w in workers}, placed)
    others = [ProcessSpec(f"{_FIRST}-{index}", "router", router_node) for index in range(1, config.cluster.routers)]
    return [ProcessSpec(_FIRST, "router", router_node), *others, *stores, *workers]


def listening(config: Config, router: str) -> Config:
    """Return the configuration of a router that has never served: only the first one uses the configured ports."""
    if router == _FIRST:
        return config
    operator = operator_of_router(config.router.operator, router)
    anywhere = msgspec.structs.replace(config.router, grpc_port=0, internal_port=0, http_port=0, operator=operator)
    return msgspec.structs.replace(config, router=anywhere, api=msgspec.structs.replace(config.api, port=0))


def workers_on(node: str, specs: Iterable[ProcessSpec]) -> int:
    """Return the number of workers that share a node's cores."""
    return sum(spec.node == node and spec.role in ("prefill", "decode") for spec in specs)


def _stores(nodes: Sequence[str], used: set[str], placed: Mapping[str, str]) -> list[ProcessSpec]:
    names = {node: name for name, node in placed.items() if name.startswith("store-") and node in used}
    free = (name for index in range(len(nodes) + len(names)) if (name := f"store-{index}") not in names.values())
    return [ProcessSpec(names.get(node) or next(free), "store", node) for node in nodes if node in used]
