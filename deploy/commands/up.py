"""`baton up`: start a cluster, or say why it can't be started."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape

from deploy.commands.progress import Progress
from deploy.commands.terminal import ConfigFile, EngineOption, Json, Settings, command, err, load, out, print_json
from deploy.control_plane import state_file
from deploy.control_plane.bring_up import bring_up
from deploy.control_plane.reports import ClusterOverview, read_overview
from deploy.control_plane.state_file import State
from deploy.models import with_demo_model


class Dtype(StrEnum):
    """The number format of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class RayOption(StrEnum):
    """The Ray to run on."""

    AUTO = "auto"
    OWN = "own"
    JOIN = "join"


@command(
    "baton up --model ./model",
    "baton up --model smollm2",
    "baton up --model ./small --model ./large",
    "baton up --model ./model.gguf",
    "baton up --model Qwen/Qwen3-0.6B --prefill 1 --decode 2",
    "baton up --model ./model --engine vllm --max-model-len 8192 --set pages.page_size=32",
    "baton up --config cluster.yaml --set store.host_cache_bytes=1GiB",
)
def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory of a checkpoint, GGUF file, hub id, or smollm2; by default the demo model. Repeat it for "
            "models that share the routers."
        ),
    ] = None,
    draft_model: Annotated[
        str, typer.Option(help="Small model of the same vocabulary that proposes tokens, which the model verifies.")
    ] = "",
    speculation_heads: Annotated[
        str,
        typer.Option(help="Heads (mlp_speculator, Medusa or EAGLE-1) trained for the model that propose tokens."),
    ] = "",
    speculative_config: Annotated[
        str,
        typer.Option(metavar="JSON", help="vLLM's draft: its method, model and num_speculative_tokens (vLLM, CPUs)."),
    ] = "",
    engine: Annotated[
        EngineOption | None,
        typer.Option(metavar="ENGINE", help="native, vllm, or auto: `baton doctor MODEL` says which and why."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: the checkpoint's own.")
    ] = None,
    served_model_name: Annotated[str, typer.Option(help="Name that clients use; by default the end of the path.")] = "",
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a sequence, at most.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences of a decode worker's step, at most.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Number format of KV pages, such as int8 or fp8.")] = "",
    quantization: Annotated[
        str, typer.Option(help="Of weights when they are loaded: int8, int4, or fp8 (vLLM, GPUs).")
    ] = "",
    tensor_parallel_size: Annotated[int | None, typer.Option(help="Ranks of each worker (vLLM).")] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option(help="Stages of each worker (vLLM, CPUs).")] = None,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Ranks divide the experts (vLLM, GPUs).")
    ] = False,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Don't compile the model (vLLM).")] = False,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Part of a GPU's memory that a worker may take.")
    ] = None,
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
        RayOption, typer.Option(metavar="RAY", help="join a running Ray, start our own, or auto: join one if it runs.")
    ] = RayOption.AUTO,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard with our own Ray.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds within which the cluster must serve.")] = 900.0,
    as_json: Json = False,
) -> None:
    """Start a cluster and return once it serves. On a failure or Ctrl-C, print the cause and leave nothing behind."""
    first, *further = model or [""]
    flags = {"model.path": first, "model.dtype": dtype and dtype.value, "cluster.name": name}
    flags |= {"model.engine": engine and engine.value, "model.draft_model": draft_model}
    flags |= {"model.speculation_heads": speculation_heads}
    flags |= {"model.served_model_name": served_model_name, "model.max_model_len": max_model_len}
    flags |= {"model.kv_cache_dtype": kv_cache_dtype, "model.quantization": quantization}
    flags |= {"model.tensor_parallel_size": tensor_parallel_size, "model.enforce_eager": enforce_eager or None}
    flags |= {"model.pipeline_parallel_size": pipeline_parallel_size}
    flags |= {"model.enable_expert_parallel": enable_expert_parallel or None, "decode.max_num_seqs": max_num_seqs}
    flags |= {f"{role}.gpu_memory_utilization": gpu_memory_utilization for role in ("prefill", "decode")}
    flags |= {"model.tool_call_parser": tool_call_parser, "model.reasoning_parser": reasoning_parser}
    flags |= {"cluster.prefill": prefill, "cluster.decode": decode, "cluster.routers": routers}
    flags |= {"api.host": host, "api.port": port, "api.insecure": insecure or None}
    flags |= {"tls.cert_file": ssl_certfile, "tls.key_file": ssl_keyfile, "tls.client_ca_file": ssl_ca_certs}
    if speculative_config:
        settings = [*(settings or ()), f"model.speculative_config={speculative_config}"]
    chosen = load(config, settings, flags, further)
    with state_file.locked(chosen.cluster.state_dir), Progress(err) as progress:
        if not chosen.model.path:
            progress.say("no --model is given: serving the demo model that comes with Baton")
            chosen = with_demo_model(chosen)
        with bring_up(chosen, ray.value, dashboard, timeout, progress.say, progress.watch) as state:
            progress.stop()
            if as_json:
                print_json(_as_json(state))
            else:
                out.print("\n".join(_shown(state, read_overview(chosen.cluster.state_dir))))


def _as_json(state: State) -> dict[str, Any]:
    doors = {router: msgspec.structs.asdict(addresses) for router, addresses in state.routers.items()}
    fields = {
        "name": state.name,
        "model": state.model,
        "further_models": state.further_models,
        "grpc": state.first.grpc,
        "http": state.first.http,
    }
    return fields | {"api": state.first.api, "routers": doors, "log_dir": state.log_dir}


def _shown(state: State, overview: ClusterOverview | None) -> Iterator[str]:
    """Yield the lines that say where the cluster is."""
    yield f"[bold green]{state.name} serves {escape(', '.join((state.model, *state.further_models)))}[/]"
    api = f"{'https' if state.tls else 'http'}://{state.first.api}"
    yield escape(f"  HTTP API {api}/v1")
    yield escape(f"  watch    {api}/dashboard")
    yield escape(f"  gRPC     {state.first.grpc}")
    for router in state.routers.values():
        yield escape(f"  operator {router.operator}")
        yield escape(f"  metrics  http://{router.http.removeprefix('http://')}/metrics")
    for process in overview.processes if overview is not None else ():
        if process.gpu:
            yield escape(f"  {process.name:<8} GPU {process.gpu} of {process.node}")
    yield f"  logs     {escape(state.log_dir)}"
    flag = "" if state.name == "baton" else f" --name {state.name}"
    yield f'  try      baton generate{flag} "Once upon a time" --max-tokens 32'
