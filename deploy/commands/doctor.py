"""`baton doctor`: check this machine's resources for a cluster, and advise on each problem."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from baton.api_keys import KeyRing
from baton.config import Config
from baton.errors import BatonError
from baton.hosts import is_loopback
from baton.messages import WorkerRole
from baton.system_memory import available_memory
from deploy.commands.collect_env import version_of
from deploy.commands.doctor_model import Finding, Level, examine_model
from deploy.commands.terminal import ConfigFile, Json, Settings, coloured, command, load, out, print_json
from deploy.control_plane import preflight, probe, state_file
from engine.device.gpus import visible_gpus

_LITTLE_MEMORY = 4 * 2**30
_FEW_FILES = 4_096


@command("baton doctor", "baton doctor --config cluster.yaml --json", "baton doctor ./model")
def doctor(
    model: Annotated[
        str,
        typer.Argument(help="Say which engine would serve this here, and why: a directory, a hub id or smollm2."),
    ] = "",
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Check Ray, memory, ports, torch and cores, or a MODEL, and advise on each problem.

    A MODEL of the hub must be in its cache: nothing is fetched but smollm2. The exit status is 1 if it can't be served.
    """
    if model:
        found = examine_model(load(config, settings, {"model.path": model}), model)
        if as_json:
            print_json(asdict(found))
        else:
            _show(found.findings)
        findings: Sequence[Finding] = found.findings
    else:
        findings = examine(load(config, settings, {}))
        if as_json:
            print_json({"findings": [asdict(finding) for finding in findings]})
        else:
            _show(findings)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


def _show(found: Sequence[Finding]) -> None:
    """Print one line for each finding, with the advice below it."""
    for finding in found:
        out.print(f"{coloured(finding.level):<16} [bold]{finding.subject}[/]  {escape(finding.found)}")
        if finding.advice:
            out.print(f"      → {escape(finding.advice)}")


def examine(config: Config) -> list[Finding]:
    """Run all checks. A failed check is a finding, never an exception."""
    return [
        _ray(),
        *_memory(config),
        *_ports(config),
        _keys(config),
        _clients(config),
        _torch(),
        *_device(config),
        _cores(config),
        _files(),
        *_clusters(config),
    ]


def _ray() -> Finding:
    version = version_of("ray")
    if version is None:
        return Finding("bad", "Ray", "not installed", "pip install 'ray[default]'")
    try:
        address = probe.find()
        if address is None:
            return Finding("ok", "Ray", f"{version}; none runs here, so `baton up` starts one of its own")
        link = probe.link(address)
    except BatonError as error:
        return Finding("bad", "Ray", f"{version}; can't be used", str(error))
    if link.mode == "token":
        return Finding("ok", "Ray", f"{version} at {address}, which asks for a token; ours is accepted")
    return Finding(
        "warn",
        "Ray",
        f"{version} at {address}, without authentication",
        "whoever reaches its ports can run code here: `ray stop`, `ray get-auth-token --generate`, then "
        "`RAY_AUTH_MODE=token ray start --head`",
    )


def _memory(config: Config) -> list[Finding]:
    room = available_memory()
    found = f"{room.available / 2**30:.1f} GiB left, bounded by {room.bound}"
    level: Level = "warn" if room.available < _LITTLE_MEMORY else "ok"
    findings = [Finding(level, "memory", found, "end something, or raise the limit" if level == "warn" else "")]
    try:
        preflight.check_memory(config, room)
    except BatonError as error:
        findings.append(Finding("bad", "memory", "too little for this configuration", str(error)))
    return findings


def _ports(config: Config) -> list[Finding]:
    router, api = config.router, config.api
    clients, inside = ((router.grpc_port, api.port), (router.internal_port, router.http_port))
    ports = f"{_listed(clients)} on {api.host}, {_listed(inside)} on {router.host}"
    if _is_up(config.cluster.state_dir):
        return [Finding("ok", "ports", f"{ports}: this cluster is up and has its ports")]
    try:
        preflight.check_ports(config)
    except BatonError as error:
        return [Finding("bad", "ports", f"{ports}: can't all be had", str(error))]
    return [Finding("ok", "ports", f"{ports}: free")]


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(str(port) if port else "any" for port in ports)


def _clients(config: Config) -> Finding:
    """Look at what a client needs: a key, TLS."""
    try:
        preflight.check_doors(config)
    except BatonError as error:
        return Finding("bad", "clients", f"the doors at {config.api.host} can't open", str(error))
    ring = KeyRing(config.api_keys_path, required=config.api.require_keys)
    keys = "every client needs an API key" if ring.required else "clients need no API key"
    return Finding("ok", "clients", f"{keys}; {'TLS' if config.tls.cert_file else 'no TLS'}, at {config.api.host}")


def _is_up(folder: Path) -> bool:
    """Whether the cluster of that folder runs, according to a readable state file."""
    try:
        state_file.read(folder)
    except BatonError:
        return False
    try:
        preflight.check_name_free(folder)
    except BatonError:
        return True
    return False


def _keys(config: Config) -> Finding:
    path = config.cluster.key_path
    try:
        preflight.check_keys(config)
    except BatonError as error:
        return Finding("bad", "keys", f"{path} can't be used", str(error))
    if path.exists():
        return Finding("ok", "keys", f"{path}, for its owner alone; every link of the cluster is encrypted with them")
    if is_loopback(config.router.host):
        return Finding("ok", "keys", f"the cluster's first process makes {path}")
    return Finding("ok", "keys", f"`baton up` makes {path}; processes started by hand on other nodes need the file")


def _torch() -> Finding:
    version = version_of("torch")
    if version is None:
        return Finding("bad", "torch", "not installed", "pip install torch")
    import torch

    found = visible_gpus()
    if found.gpus:
        return Finding("ok", "torch", f"{version}; {found}")
    if found.wasted:
        return Finding("warn", "torch", f"{version}, CPU only, though this machine has an NVIDIA driver", found.problem)
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("ok", "torch", f"{version}, CPU only ({capability}): {found.problem}")


def _device(config: Config) -> list[Finding]:
    try:
        preflight.check_device(config)
    except BatonError as error:
        return [Finding("bad", "device", "not here", str(error))]
    return []


def _cores(config: Config) -> Finding:
    cores = len(os.sched_getaffinity(0))
    counts: Sequence[tuple[WorkerRole, int]] = [("prefill", config.cluster.prefill), ("decode", config.cluster.decode)]
    workers = sum(count for _, count in counts)
    ranks = sum(count * config.ranks_of(role) for role, count in counts)
    told = f"{cores} for {workers} workers" + (f" of {ranks} ranks in all" if ranks > workers else "")
    if cores < ranks and any(count and preflight.runs_on_cpu(config, role) for role, count in counts):
        return Finding("warn", "cores", told, "they will take turns; fine for trying out, not for speed")
    return Finding("ok", "cores", told)


def _files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        return Finding("warn", "open files", f"at most {soft}", f"ulimit -n {min(hard, 65_536)}, before `ray start`")
    return Finding("ok", "open files", f"at most {soft}")


def _clusters(config: Config) -> list[Finding]:
    folder = config.cluster.state_dir.parent
    findings: list[Finding] = []
    for path in sorted(folder.glob("*/cluster.json")):
        name = path.parent.name
        try:
            preflight.check_name_free(path.parent)
        except BatonError as error:
            found, _, advice = str(error).partition(";")
            up = _is_up(path.parent)
            findings.append(Finding("ok" if up else "bad", "cluster", f"{name}: {found}", "" if up else advice.strip()))
        else:
            findings.append(
                Finding("warn", "cluster", f"{name} has died", f"baton down --name {name} clears away what is left")
            )
    return findings
