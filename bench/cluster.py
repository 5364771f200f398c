"""A cluster of this machine's own processes to measure, without Ray, which is never on the path of a token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton import config
from baton.v1 import cluster_pb2
from deploy.local import LocalCluster

_ROLES = {"P": cluster_pb2.ROLE_PREFILL, "D": cluster_pb2.ROLE_DECODE}


def local(
    model: Path, prefill: int, decode: int, settings: Mapping[str, object] | None = None, patience: float = 90.0
) -> LocalCluster:
    """Not started yet. `settings`, "section.setting" → value, are the configuration's; `patience` is the time limit of
    its start, in seconds. Raises ConfigError."""
    ports = {f"router.{kind}_port": 0 for kind in ("grpc", "internal", "http")} | {"api.port": 0}
    shape = {"model.path": str(model), "cluster.prefill": prefill, "cluster.decode": decode}
    return LocalCluster(config.load(None, {**ports, **shape, **(settings or {})}), patience=patience)


def shape(status: cluster_pb2.GetStatusResponse) -> str:
    """Such as 1P+2D, or 2D for the colocated mode: the workers that live now."""
    live = [process.role for process in status.processes if process.state == cluster_pb2.PROCESS_STATE_LIVE]
    counts = {letter: live.count(role) for letter, role in _ROLES.items()}
    return "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
