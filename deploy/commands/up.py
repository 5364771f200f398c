"""`baton up`: start a cluster, or say why it can't be started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from enum import StrEnum
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from deploy.commands.progress import Progress
from deploy.commands.terminal import ConfigFile, Json, Settings, command, err, load, out, print_json
from deploy.control_plane import state_file
from deploy.control_plane.bring_up import bring_up
from deploy.control_plane.reports import read_overview
from deploy.models import with_demo_model


class Dtype(StrEnum):
    """The number format of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class EngineOption(StrEnum):
    """What computes."""

    AUTO = "auto"
    NATIVE = "native"
    VLLM = "vllm"


class RayOption(StrEnum):
    """The Ray to run on."""

    AUTO = "auto"
    OWN = "own"
    JOIN = "join"


@command(
    "baton up --model ./model",
    "baton up --model smollm2",
    "baton up --model Qwen/Qwen3-0.6B --prefill 1 --decode 2",
    "baton up --model ./model --engine vllm --set pages.page_size=32",
    "baton up --config cluster.yaml --set store.host_cache_bytes=1GiB",
)
def up(
    model: Annotated[
        str, typer.Option(help="Directory of a checkpoint, a hub id, or smollm2; by default Baton's demo model.")
    ] = "",
    engine: Annotated[
        EngineOption | None, typer.Option(help="native, vllm, or auto: `baton doctor MODEL` says which and why.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format; auto is the checkpoint's own.")] = None,
    tool_call_parser: Annotated[str, typer.Option(help="Format of tool calls; by default as the template tells.")] = "",
    reasoning_parser: Annotated[str, typer.Option(help="Format of reasoning; by default as the template tells.")] = "",
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 0 is the colocated mode.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    routers: Annotated[int | None, typer.Option(help="Routers; each places requests on all workers.")] = None,
    host: Annotated[str, typer.Option(help="Address for clients, over HTTP and gRPC; by default loopback.")] = "",
    port: Annotated[int | None, typer.Option(help="Port of the HTTP APIs.")] = None,
    ssl_certfile: Annotated[str, typer.Option(help="PEM certificate for clients, with its chain.")] = "",
    ssl_keyfile: Annotated[str, typer.Option(help="PEM key of that certificate.")] = "",
    ssl_ca_certs: Annotated[str, typer.Option(help="PEM authorities of certificates that clients must show.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines in without keys and TLS.")] = False,
    name: Annotated[str, typer.Option(help="The cluster's name, by default baton.")] = "",
    config: ConfigFile = None,
    settings: Settings = None,
    ray: Annotated[
        RayOption, typer.Option(help="join a running Ray, start our own, or auto: join one if it runs.")
    ] = RayOption.AUTO,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard with our own Ray.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds within which the cluster must serve.")] = 900.0,
    as_json: Json = False,
) -> None:
    """Start a cluster and return once it serves. On a failure, print the cause and leave nothing behind."""
    flags = {"model.path": model, "model.dtype": dtype and dtype.value, "cluster.name": name}
    flags |= {"model.engine": engine and engine.value}
    flags |= {"model.tool_call_parser": tool_call_parser, "model.reasoning_parser": reasoning_parser}
    flags |= {"cluster.prefill": prefill, "cluster.decode": decode, "cluster.routers": routers}
    flags |= {"api.host": host, "api.port": port, "api.insecure": insecure or None}
    flags |= {"tls.cert_file": ssl_certfile, "tls.key_file": ssl_keyfile, "tls.client_ca_file": ssl_ca_certs}
    chosen = load(config, settings, flags)
    with _interruptible(), state_file.locked(chosen.cluster.state_dir), Progress(err) as progress:
        if not chosen.model.path:
            progress.say("no --model is given: serving the demo model that comes with Baton")
            chosen = with_demo_model(chosen)
        state = bring_up(chosen, ray.value, dashboard, timeout, progress.say, progress.watch)
    if as_json:
        found = {"name": state.name, "model": state.model, "grpc": state.first.grpc, "http": state.first.http}
        found["api"] = state.first.api
        doors = {router: msgspec.structs.asdict(addresses) for router, addresses in state.routers.items()}
        print_json(found | {"routers": doors, "log_dir": state.log_dir})
        return
    flag = "" if state.name == "baton" else f" --name {state.name}"
    out.print(f"[bold green]{state.name} serves {escape(state.model)}[/]")
    for router in state.routers.values():
        api = f"{'https' if state.tls else 'http'}://{router.api}"
        out.print(escape(f"  HTTP API {api}/v1"))
        out.print(escape(f"  watch    {api}/dashboard"))
        out.print(escape(f"  gRPC     {router.grpc}"))
        out.print(escape(f"  operator {router.operator}"))
        out.print(escape(f"  metrics  http://{router.http.removeprefix('http://')}/metrics"))
    overview = read_overview(chosen.cluster.state_dir)
    for process in overview.processes if overview is not None else ():
        if process.gpu:
            out.print(escape(f"  {process.name:<8} GPU {process.gpu} of {process.node}"))
    out.print(f"  logs     {escape(state.log_dir)}")
    out.print(f'  try      baton generate{flag} "Once upon a time" --max-tokens 32')


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C within this context: `up` then takes down the processes it has started.

    After the first signal, later ones are ignored. A second Ctrl-C thus cannot leave half of the cluster running.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
