"""Divide the GPUs of a node among its workers, and choose the nodes that a role may use. Pure.

A worker computes on one GPU, or on a share of one. A worker with several ranks computes on as many whole GPUs. Without
a setting (`prefill.num_gpus`, `decode.num_gpus`) all workers of a node with one rank get equal shares, as large as
fits: a whole GPU each where there are enough, a half each where two share one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.config import Config
from baton.messages import WorkerRole

_UNIT = 10_000  # Ray counts GPUs in such parts
_MOST_PER_GPU = 16  # workers with equal shares

_ALL_VISIBLE = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_AS_ASSIGNED = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": ""}  # older Rays take "0" for true
_NONE_VISIBLE = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class NodeHardware:
    """What Ray knows of a node: how many GPUs it may lend, the node's labels, and how much of the GPUs it has lent to
    others than this cluster."""

    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    lent: float = 0.0


@dataclass(frozen=True)
class GpuShare:
    """A part of one GPU, or so many whole ones. `index`: the GPU's number on the node, of several the first, which
    others follow; None where only Ray knows it."""

    share: float
    index: int | None = None


def share_gpus(
    requests: Mapping[str, float | None], gpus: int, held: Mapping[str, GpuShare] | None = None
) -> dict[str, GpuShare]:
    """Return the share of each worker. One that fits on no GPU any more has none.

    `requests`: the share that each is to have, above 1 a number of whole GPUs; None for an equal one. `held`: what
    running workers have. They keep it, and an index that they have.
    """
    held = held or {}
    if gpus < 1:
        return dict(held)
    best: dict[str, GpuShare] = dict(held)
    new = {name: share for name, share in requests.items() if name not in held}
    fixed = {name: _parts(share) for name, share in new.items() if share is not None}
    for each in range(1, _MOST_PER_GPU + 1):
        packing = _pack(fixed, dict.fromkeys(new.keys() - fixed.keys(), _UNIT // each), gpus, held)
        if len(packing) > len(best):
            best = packing
        if set(best) >= set(requests):
            break
    return best


def _pack(
    fixed: Mapping[str, int], equal: Mapping[str, int], gpus: int, held: Mapping[str, GpuShare]
) -> dict[str, GpuShare]:
    """Put each part on the GPU that has most left: those that were asked for first, larger ones before smaller ones.
    Leave out those that fit nowhere."""
    left = [_UNIT] * gpus
    packing: dict[str, GpuShare] = {}
    for name, has in sorted(held.items(), key=lambda item: (item[1].index is None, -item[1].share, item[0])):
        index = has.index if has.index is not None and has.index < gpus else _roomiest(left, _parts(has.share))
        _take(left, index, _parts(has.share))
        packing[name] = has
    for name, part in [*sorted(fixed.items(), key=lambda item: (-item[1], item[0])), *sorted(equal.items())]:
        index = _roomiest(left, part)
        room = left[index : index + _whole(part)]
        if len(room) == _whole(part) and min(room) >= min(part, _UNIT):
            _take(left, index, part)
            packing[name] = GpuShare(part / _UNIT, index)
    return packing


def gpus_in_use(shares: Iterable[float]) -> int:
    """Return how many GPUs of a node Ray lends for these shares: it puts a part where the least is left that fits."""
    left: list[int] = []
    for part in sorted(map(_parts, shares), reverse=True):
        rooms = [room for room in left if room >= part]
        if rooms and part < _UNIT:
            left[left.index(min(rooms))] -= part
        else:
            left += [_UNIT - min(part, _UNIT)] * _whole(part)
    return len(left)


def _whole(part: int) -> int:
    """The number of GPUs that a part lies on."""
    return -(-part // _UNIT)


def _roomiest(left: Sequence[int], part: int) -> int:
    """The first of the neighbouring GPUs that have most left."""
    count = min(_whole(part), len(left))
    return max(range(len(left) - count + 1), key=lambda first: (sum(left[first : first + count]), -first))


def _take(left: list[int], index: int, part: int) -> None:
    for each in range(index, min(index + _whole(part), len(left))):
        left[each] = max(0, left[each] - min(part, _UNIT))


def _parts(share: float) -> int:
    return max(1, math.floor(share * _UNIT + 1e-6))


def wanted_gpus(config: Config, role: WorkerRole) -> float | None:
    """Return what a worker of that role asks for: as many GPUs as ranks, or its part of one; None: an equal share."""
    if (ranks := config.ranks_of(role)) > 1:
        return float(ranks)
    part = config.worker(role).num_gpus
    return None if part == "auto" else part


def uses_assigned_gpu(device: str) -> bool:
    """Whether a worker with that device computes on a GPU that Baton chooses. "auto" may. An index is the user's
    choice."""
    return device in ("auto", "cuda")


def nodes_for(
    config: Config, role: WorkerRole, nodes: Sequence[str], hardware: Mapping[str, NodeHardware]
) -> tuple[Sequence[str], str]:
    """Return the nodes that may have workers of a role, or none and the reason.

    They have all labels of the role's `node_selector`. Workers on GPUs go to nodes with GPUs: with the device "auto" as
    soon as there is one, with "cuda" always. All ranks of a worker are on one node, which has a GPU for each.
    """
    selector, device = config.worker(role).node_selector, config.device_of(role)
    labels = {name: hardware.get(name, NodeHardware()).labels for name in nodes}
    fitting = [name for name in nodes if selector.items() <= labels[name].items()]
    if not fitting:
        labels_text = ", ".join(f"{key}={value}" for key, value in selector.items())
        return (), f"no node has the labels of {role}.node_selector: {labels_text}"
    with_gpus = [name for name in fitting if hardware.get(name, NodeHardware()).gpus]
    if device == "cuda" and not with_gpus:
        return (), f"the device of {role} workers is cuda, and Ray knows no GPU on {', '.join(fitting)}"
    if not with_gpus or not uses_assigned_gpu(device):
        return fitting, ""
    ranks = config.ranks_of(role)
    if large := [name for name in with_gpus if hardware[name].gpus >= ranks]:
        return large, ""
    there = ", ".join(f"{hardware[name].gpus} on {name}" for name in with_gpus)
    return (), (
        f"the {ranks} ranks of a {role} worker need {ranks} GPUs of one node, and there are {there}; lower "
        f"{role}.tensor_parallel_size, or add a node with {ranks} GPUs"
    )


def roomiest(nodes: Sequence[str], hardware: Mapping[str, NodeHardware], used: Mapping[str, int], ranks: int) -> str:
    """Return the node for one more worker with so many ranks: the one whose GPUs are then used least, the first of
    equals. `used`: the ranks of the workers so far, by node. Where all of its ranks fit beside them, that comes first.
    """

    def use(name: str) -> float:
        return used.get(name, 0) + hardware[name].lent + ranks

    fitting = [name for name in nodes if use(name) <= hardware[name].gpus]
    return min(fitting or nodes, key=lambda name: use(name) / hardware[name].gpus)


def with_share(config: Config, share: GpuShare | None) -> Config:
    """Return the configuration of one worker that got this share; None: it computes on the CPU.

    Both roles are set, since a worker may change its role. A device with an index stays.
    """

    def section(role: WorkerRole) -> Any:
        own, device = config.worker(role), config.device_of(role)
        if not uses_assigned_gpu(device):
            return msgspec.structs.replace(own, device=device)
        if share is None:
            return msgspec.structs.replace(own, device="cpu" if device == "auto" else device)
        chosen = "cuda" if share.index is None else f"cuda:{share.index}"
        return msgspec.structs.replace(own, device=chosen, num_gpus=min(1.0, share.share))

    return msgspec.structs.replace(config, prefill=section("prefill"), decode=section("decode"))


def actor_options(device: str, share: float, node_gpus: int) -> dict[str, Any]:
    """Return the options of a worker's Ray actor that have to do with GPUs; none on a node without.

    Ray sets CUDA_VISIBLE_DEVICES of an actor with `num_gpus` to its GPU. Of one without, older Rays hide all GPUs and
    later ones none (ray#62492). So each case is spelt out: a worker on the CPU sees none, one whose device has an index
    sees all.
    """
    if not node_gpus:
        return {}
    if share:
        return {"num_gpus": share, "runtime_env": {"env_vars": dict(_AS_ASSIGNED)}}
    seen = _NONE_VISIBLE if device in ("auto", "cpu") else _ALL_VISIBLE
    return {"num_gpus": 0, "runtime_env": {"env_vars": dict(seen)}}
