"""The desired processes of a cluster and their nodes, computed purely from the configuration.

Routers run on the first node. A router that listens on loopback can only be reached from its own node, so then all
processes run there. Otherwise decode workers are assigned to nodes round-robin, and prefill workers continue that
order. With one worker of each role and two nodes, each worker has a node to itself. Stores send pages to each other, so
no two workers need share a node. The router's placement accounts for cheaper hand-offs within a node, per request. Each
node with a worker has one store.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from baton.config import Config
from baton.hosts import is_loopback
from baton.messages import Role, WorkerRole
from baton.operator_address import FIRST_ROUTER, router_names
from deploy.placement.gpu_sharing import (
    GpuShare,
    NodeHardware,
    nodes_for,
    roomiest,
    share_gpus,
    uses_assigned_gpu,
    wanted_gpus,
)


@dataclass(frozen=True)
class ProcessSpec:
    """One desired process. Its name is stable over restarts."""

    name: str
    role: Role
    node: str  # "": no node can have it now
    gpu: GpuShare | None = None  # of its node; None: it needs none
    blocked: str = ""  # why it can't start now

    @property
    def pool(self) -> int:
        """The number of its model; the first has 0. It is a part of the name: decode-0, and decode-m1-0."""
        return pool_of(self.name)


@dataclass(frozen=True)
class ClusterScale:
    """The number of workers of each role, and of those of each further model."""

    prefill: int
    decode: int
    further: tuple[tuple[int, int], ...] = ()  # prefill and decode

    @property
    def by_pool(self) -> Sequence[tuple[int, int]]:
        """The numbers of prefill and decode workers of each model, the first model's first."""
        return ((self.prefill, self.decode), *self.further)

    def changed(self, pool: int, prefill: int | None, decode: int | None) -> ClusterScale:
        """Return it with other numbers of a model's workers; None leaves a number as it is."""
        counts = [*self.by_pool]
        prefills, decodes = counts[pool]
        counts[pool] = (prefills if prefill is None else prefill, decodes if decode is None else decode)
        return ClusterScale(*counts[0], tuple(counts[1:]))


def role_of(name: str) -> Role:
    return cast(Role, name.partition("-")[0])


def scale_of(config: Config) -> ClusterScale:
    further = tuple((each.prefill, each.decode) for each in config.models)
    return ClusterScale(config.cluster.prefill, config.cluster.decode, further)


def name_of(role: Role, pool: int, index: int) -> str:
    return f"{role}-m{pool}-{index}" if pool else f"{role}-{index}"


def pool_of(name: str) -> int:
    """Return the number of the model that the process of that name works for; 0 for a router."""
    parts = name.split("-")
    return int(parts[1].removeprefix("m")) if len(parts) == 3 else 0


def plan(
    config: Config,
    scale: ClusterScale,
    nodes: Sequence[str],
    placed: Mapping[str, str] | None = None,
    *,
    one_machine: bool = False,
    hardware: Mapping[str, NodeHardware] | None = None,
    held: Mapping[str, GpuShare] | None = None,
) -> list[ProcessSpec]:
    """Return every process of the cluster in start order. Each model has its own workers, and a store on each node with
    one of them.

    `placed` maps names to the nodes where processes run now, or shall run. They stay there as long as the node is up.
    `one_machine`: the nodes are names on one machine, so a router on loopback can be reached from each. `hardware`: of
    the nodes, where it is known. `held`: the GPU shares of workers that run now.
    """
    if not nodes:
        raise ValueError("a cluster needs at least one node")
    placed = placed or {}
    router_node = placed.get(FIRST_ROUTER, nodes[0])
    ordered = [router_node, *(node for node in nodes if node != router_node)]
    usable = ordered if one_machine else (ordered[:1] if is_loopback(config.router.host) else ordered)

    pools = config.pools()
    workers = _on_gpus(pools, _workers(pools, scale, usable, placed, hardware or {}), hardware or {}, held or {})
    # Stores are numbered in the order of their nodes. A running store keeps its name.
    stores = [
        store
        for pool in range(len(pools))
        for store in _stores(pool, usable, {w.node for w in workers if w.pool == pool}, placed)
    ]
    routers = [ProcessSpec(name, "router", router_node) for name in router_names(config.cluster.routers)]
    return [*routers, *stores, *workers]


def _workers(
    pools: Sequence[Config],
    scale: ClusterScale,
    usable: Sequence[str],
    placed: Mapping[str, str],
    hardware: Mapping[str, NodeHardware],
) -> list[ProcessSpec]:
    """Return the workers with their nodes. On CPUs they take turns; on GPUs each goes where the fewest share one.

    Workers with the most ranks choose first: they need a node with so many GPUs, and others fit in between."""
    names: list[tuple[WorkerRole, str]] = []
    for pool, (prefill, decode) in enumerate(scale.by_pool):
        counts: Mapping[WorkerRole, int] = {"decode": decode, "prefill": prefill}
        for role, count in counts.items():
            names.extend((role, name_of(role, pool, index)) for index in range(count))
    turns = {name: turn for turn, (_, name) in enumerate(names)}
    specs: dict[str, ProcessSpec] = {}
    used: dict[str, int] = defaultdict(int)  # ranks, by node
    # Workers that run stay, so they come before all others.
    ranked = {name: pools[pool_of(name)].ranks_of(role) for role, name in names}
    for role, name in sorted(names, key=lambda each: (placed.get(each[1]) not in usable, -ranked[each[1]])):
        config = pools[pool_of(name)]
        nodes, why = nodes_for(config, role, usable, hardware)
        node = placed[name] if placed.get(name) in usable else ""
        if not node and nodes:
            on_gpus = uses_assigned_gpu(config.device_of(role)) and _have_gpus(nodes, hardware)
            ranks = config.ranks_of(role)
            node = roomiest(nodes, hardware, used, ranks) if on_gpus else nodes[turns[name] % len(nodes)]
        used[node] += config.ranks_of(role)
        specs[name] = ProcessSpec(name, role, node, blocked="" if node else why)
    ordered = [specs[name] for name in turns]
    return [*(spec for spec in ordered if spec.role == "prefill"), *(spec for spec in ordered if spec.role == "decode")]


def _have_gpus(nodes: Iterable[str], hardware: Mapping[str, NodeHardware]) -> bool:
    return any(hardware.get(name, NodeHardware()).gpus for name in nodes)


def _on_gpus(
    pools: Sequence[Config],
    workers: Sequence[ProcessSpec],
    hardware: Mapping[str, NodeHardware],
    held: Mapping[str, GpuShare],
) -> list[ProcessSpec]:
    """Return the workers with their shares of the GPUs of their nodes."""
    shares: dict[str, GpuShare] = {}
    on_gpus = {
        spec.name: spec
        for spec in workers
        if _have_gpus([spec.node], hardware) and uses_assigned_gpu(pools[spec.pool].device_of(worker_role(spec.role)))
    }
    for node in {spec.node for spec in on_gpus.values()}:
        requests = {
            name: wanted_gpus(pools[spec.pool], worker_role(spec.role))
            for name, spec in on_gpus.items()
            if spec.node == node
        }
        has = {name: share for name, share in held.items() if name in requests}
        shares |= share_gpus(requests, hardware[node].gpus, has)
    return [
        replace(spec, gpu=shares[spec.name])
        if spec.name in shares
        else replace(spec, blocked=_no_room(spec, wanted_gpus(pools[spec.pool], worker_role(spec.role)), hardware))
        if spec.name in on_gpus
        else spec
        for spec in workers
    ]


def _no_room(spec: ProcessSpec, share: float | None, hardware: Mapping[str, NodeHardware]) -> str:
    gpus = hardware[spec.node].gpus
    if share is not None and share > 1:
        there = ", ".join(f"{has.gpus} of {name}" for name, has in hardware.items() if has.gpus)
        return (
            f"its ranks need {share:.0f} GPUs of one node, and other workers hold too many of the GPUs ({there}); "
            f"lower {spec.role}.tensor_parallel_size or the number of workers, or add a node"
        )
    return (
        f"other workers hold the {gpus} GPUs of {spec.node}; start the cluster with so many workers, which makes their "
        f"shares smaller, set {spec.role}.num_gpus, or add a node"
    )


def worker_role(role: Role) -> WorkerRole:
    """Return the role of a worker as one. Raises ValueError for a router or store."""
    if role == "prefill" or role == "decode":
        return role
    raise ValueError(f"{role} is no role of a worker")


def workers_on(node: str, specs: Iterable[ProcessSpec]) -> int:
    """Return the number of workers that share a node's cores."""
    return sum(spec.node == node and spec.role in ("prefill", "decode") for spec in specs)


def _stores(pool: int, nodes: Sequence[str], used: set[str], placed: Mapping[str, str]) -> list[ProcessSpec]:
    stores = {name: node for name, node in placed.items() if role_of(name) == "store" and pool_of(name) == pool}
    names = {node: name for name, node in stores.items() if node in used}
    named = (name_of("store", pool, index) for index in range(len(nodes) + len(names)))
    free = (name for name in named if name not in names.values())
    return [ProcessSpec(names.get(node) or next(free), "store", node) for node in nodes if node in used]
