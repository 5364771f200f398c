"""A cluster of this machine's own processes to measure, without Ray, which is never on the path of a token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from baton import config
from baton.operator_api import Status
from deploy.local import LocalCluster

_ROLES = {"P": "prefill", "D": "decode"}


def local(
    model: Path, prefill: int, decode: int, settings: Mapping[str, object] | None = None, patience: float = 90.0
) -> LocalCluster:
    """Not started yet. `settings`, "section.setting" → value, are the configuration's; `patience` is the time limit of
    its start, in seconds. Raises ConfigError."""
    ports = {f"router.{kind}_port": 0 for kind in ("grpc", "internal", "http")} | {"api.port": 0}
    shape = {"model.path": str(model), "cluster.prefill": prefill, "cluster.decode": decode}
    return LocalCluster(config.load(None, {**ports, **shape, **(settings or {})}), patience=patience)


def shape(status: Status) -> str:
    """Such as 1P+2D, or 2D for the colocated mode: the workers that live now."""
    live = [process.role for process in status.processes if process.state == "live"]
    counts = {letter: live.count(role) for letter, role in _ROLES.items()}
    return "+".join(f"{count}{letter}" for letter, count in counts.items() if count)


def steps(metrics_address: str) -> tuple[float, float]:
    """Return a worker's steps so far, and the seconds that they took."""
    with urlopen(f"http://{metrics_address}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return samples.get("baton_step_seconds_count", 0.0), samples.get("baton_step_seconds_sum", 0.0)
