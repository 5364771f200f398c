"""Which processes a cluster shall have, and on which node: pure arithmetic over the configuration.

The router runs on the first node. A router that listens on loopback can only be reached from its own node, so then
everything runs there. Otherwise workers go round the nodes, and each node that has a worker has one store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.config import Config
from baton.messages import Role

START_ORDER: tuple[Role, ...] = ("router", "store", "prefill", "decode")

_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class Spec:
    """One process that shall run: its name is stable over restarts."""

    name: str
    role: Role
    node: str


@dataclass(frozen=True)
class Scale:
    """How many workers of each kind."""

    prefill: int
    decode: int


def scale_of(config: Config) -> Scale:
    return Scale(config.cluster.prefill, config.cluster.decode)


def reachable_nodes(config: Config, nodes: Sequence[str]) -> Sequence[str]:
    """The nodes whose processes could reach the router, which runs on the first."""
    return nodes[:1] if config.router.host.startswith(_LOOPBACK) else nodes


def plan(config: Config, scale: Scale, nodes: Sequence[str], placed: Mapping[str, str] | None = None) -> list[Spec]:
    """Every process of the cluster in start order. `placed` says where processes run now (name → node): as long as
    that node is still here they stay where they are."""
    if not nodes:
        raise ValueError("a cluster needs at least one node")
    placed = placed or {}
    router_node = placed.get("router", nodes[0])
    ordered = [router_node, *(node for node in nodes if node != router_node)]
    usable = reachable_nodes(config, ordered)
    workers: list[Spec] = []
    roles: list[tuple[Role, int]] = [("prefill", scale.prefill), ("decode", scale.decode)]
    for role, count in roles:
        # Both roles go round in the same order: pages pass between workers of one node only, through its store.
        for index in range(count):
            name = f"{role}-{index}"
            there = placed.get(name, "")
            workers.append(Spec(name, role, there if there in usable else usable[index % len(usable)]))
    # A store is named after its node's place in the list, and keeps its name while it runs.
    stores = _stores(usable, {w.node for w in workers}, placed)
    return [Spec("router", "router", router_node), *stores, *workers]


def _stores(nodes: Sequence[str], used: set[str], placed: Mapping[str, str]) -> list[Spec]:
    names = {node: name for name, node in placed.items() if name.startswith("store-") and node in used}
    free = (name for index in range(len(nodes) + len(names)) if (name := f"store-{index}") not in names.values())
    return [Spec(names.get(node) or next(free), "store", node) for node in nodes if node in used]
