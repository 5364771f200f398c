"""The `baton` command: parses flags, calls the modules that do the work, and prints their results.

Heavy modules are imported where they are used, so that `baton --help` and `baton status` answer at once. Results go to
stdout, progress and errors go to stderr. With --json, stdout holds exactly one JSON object. Exit status: 0, or 1 with
the message of a typed error, or 2 for wrong flags, or 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from baton import __version__
from baton import config as configuration
from baton.config import Config
from baton.errors import BatonError, InvalidRequest, StartupError
from baton.messages import WorkerRole

keys_app = typer.Typer(help="API keys of clients, and the key pair of a cluster's processes.", no_args_is_help=True)
app = typer.Typer(
    name="baton",
    help="Serve a large language model with prefill and decode in separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

P = ParamSpec("P")
R = TypeVar("R")


class Dtype(StrEnum):
    """The number format of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class WorkerKind(StrEnum):
    """The roles of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"


class RayOption(StrEnum):
    """The Ray to run on."""

    AUTO = "auto"
    OWN = "own"
    JOIN = "join"


app.add_typer(keys_app, name="keys")
KeysFile = Annotated[
    Path | None, typer.Option("--file", help="The file with the keys (api.keys_file), instead of --name's.")
]
Name = Annotated[str, typer.Option("--name", help="The cluster's name.", metavar="NAME")]
Operator = Annotated[
    str, typer.Option(metavar="TARGET", help="unix:/PATH or host:port of a router's operator port, instead of --name.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML configuration; flags override it.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="One setting.")]


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turn any exception of a command into one message and an exit status, never a traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = bool(kwargs.get("as_json"))
        try:
            return command(*args, **kwargs)
        except BatonError as error:
            _say_error(error.reason, str(error), as_json)
        except KeyboardInterrupt:
            _err.print("interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except Exception as error:
            if os.environ.get("BATON_DEBUG"):
                raise
            message = f"{type(error).__name__}: {error} (a fault of Baton's own; BATON_DEBUG=1 shows where)"
            _say_error("internal", message, as_json)
        raise typer.Exit(1)

    return wrapper


def _say_error(reason: str, message: str, as_json: bool) -> None:
    if as_json:
        _print_json({"error": {"reason": reason, "message": message}})
    else:
        _err.print(f"[bold red]error[/] ({reason}): {escape(message)}")


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


@app.command()
@reported
def up(
    model: Annotated[str, typer.Option(help="Directory of a Hugging Face checkpoint, or a hub id.")] = "",
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
    from deploy.commands.progress import Progress
    from deploy.control_plane import state_file
    from deploy.control_plane.bring_up import bring_up

    flags = {"model.path": model, "model.dtype": dtype and dtype.value, "cluster.name": name}
    flags |= {"model.tool_call_parser": tool_call_parser, "model.reasoning_parser": reasoning_parser}
    flags |= {"cluster.prefill": prefill, "cluster.decode": decode, "cluster.routers": routers}
    flags |= {"api.host": host, "api.port": port, "api.insecure": insecure or None}
    flags |= {"tls.cert_file": ssl_certfile, "tls.key_file": ssl_keyfile, "tls.client_ca_file": ssl_ca_certs}
    chosen = _load(config, settings, flags)
    with _interruptible(), state_file.locked(chosen.cluster.state_dir), Progress(_err) as progress:
        state = bring_up(chosen, ray.value, dashboard, timeout, progress.say, progress.watch)
    if as_json:
        found = {"name": state.name, "model": state.model, "grpc": state.first.grpc, "http": state.first.http}
        found["api"] = state.first.api
        doors = {router: msgspec.structs.asdict(addresses) for router, addresses in state.routers.items()}
        _print_json(found | {"routers": doors, "log_dir": state.log_dir})
        return
    flag = "" if state.name == "baton" else f" --name {state.name}"
    _out.print(f"[bold green]{state.name} serves {escape(state.model)}[/]")
    for router in state.routers.values():
        _out.print(escape(f"  HTTP API {'https' if state.tls else 'http'}://{router.api}/v1"))
        _out.print(escape(f"  gRPC     {router.grpc}"))
        _out.print(escape(f"  operator {router.operator}"))
        _out.print(escape(f"  metrics  http://{router.http.removeprefix('http://')}/metrics"))
    _out.print(f"  logs     {escape(state.log_dir)}")
    _out.print(f'  try      baton generate{flag} "Once upon a time" --max-tokens 32')


@app.command()
@reported
def status(name: Name = "baton", as_json: Json = False) -> None:
    """Show the cluster's processes, their load, and its log folder."""
    from deploy.commands import show
    from deploy.commands.status import collect

    found = collect(_folder(name))
    if as_json:
        _print_json(found)
    else:
        show.status(_out, found)
    if not found["serving"]:
        raise typer.Exit(1)


@app.command()
@reported
def generate(
    text: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    token_ids: Annotated[str, typer.Option(help="The prompt as token ids: 1,2,3.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Above 0, up to 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is no limit.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 to 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the model's end-of-sequence token.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole request.")] = None,
    address: Annotated[str, typer.Option(help="host:port of a router, instead of --name.")] = "",
    ca_file: Annotated[
        str, typer.Option(envvar="BATON_CA_FILE", help="PEM authorities to trust, over TLS; by default public ones.")
    ] = "",
    cert_file: Annotated[str, typer.Option(help="PEM certificate to show, where the router asks for one.")] = "",
    key_file: Annotated[str, typer.Option(help="The key of --cert-file.")] = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Generate from a prompt and stream the text. The API key, if one is needed, comes from $BATON_API_KEY."""
    from baton.client import Client, ClientTls
    from deploy.commands import generate as generation
    from deploy.commands.status import find

    if (text is None) == (not token_ids):
        raise InvalidRequest("give either a text or --token-ids")
    prompt = generation.parse_token_ids(token_ids) if text is None else text
    state = None if address else find(_folder(name))
    encrypted = bool(ca_file or cert_file) or (state is not None and state.tls)
    tls = ClientTls(ca_file, cert_file, key_file) if encrypted else False
    with Client(state.target if state is not None else address, tls=tls) as client:
        stream = client.generate(
            prompt,
            timeout=timeout,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
        )
        for delta in stream:
            if not as_json:
                _stream(delta.text)
        made = stream.result()
    if as_json:
        _print_json(generation.as_json(made))
        return
    _stream("\n")
    usage = made.usage
    _err.print(
        f"[dim]{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated"
        f", ended by {made.finish_reason}[/]"
    )


@app.command()
@reported
def pin(
    file: Annotated[str, typer.Argument(help="Prefixes, a JSON object per line; *.txt: one prefix; -: stdin.")] = "",
    ttl: Annotated[str, typer.Option(help="How long to keep them: 90s, 15m, 1h, 2d.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Show what is pinned.")] = False,
    remove: Annotated[list[str] | None, typer.Option(metavar="ID", help="End a pin; may be repeated.")] = None,
    tenant: Annotated[str, typer.Option(help="The tenant whose requests find the prefixes; --remove: its pins.")] = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds that each prefix may take.")] = None,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Compute prefixes ahead of requests, and pin their KV pages for a while."""
    from deploy.commands import pin as pinning
    from deploy.commands import show
    from deploy.commands.status import operator_client

    if sum([bool(file), list_, bool(remove)]) != 1:
        raise InvalidRequest("give a FILE with prefixes, or --list, or --remove ID")
    ttl_ms = pinning.parse_duration_ms(ttl) if ttl else None
    lines = pinning.read(file, sys.stdin.read() if file == pinning.STDIN else "") if file else []
    with operator_client(operator, _folder(name)) as client:
        for pin in remove or ():
            client.unpin(pin, tenant)
        pins = client.pins() if list_ else []
        outcomes: list[pinning.PinOutcome] = []
        for outcome in pinning.pin_prefixes(client, lines, ttl_ms, timeout, tenant):
            outcomes.append(outcome)
            if not as_json:
                show.pinned(_out, _err, file, outcome)
    if as_json:
        done = {"pinned": [outcome.as_json() for outcome in outcomes]} if file else {"removed": remove}
        _print_json({"pins": list(map(pinning.pin_as_json, pins))} if list_ else done)
    elif list_:
        show.pins(_out, pins)
    elif file:
        show.pinned_all(_out, outcomes)
    else:
        _out.print(f"removed {escape(', '.join(remove or ()))}")
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
@reported
def profile(
    process: Annotated[str, typer.Argument(help="A worker or store, such as decode-0; baton status lists them.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace.")] = 100,
    stop: Annotated[bool, typer.Option("--stop", help="End the trace that the process is writing.")] = False,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Trace the next steps of a process, for chrome://tracing or Perfetto.

    A cluster writes one trace at a time."""
    from deploy.commands.status import operator_client

    with operator_client(operator, _folder(name)) as client:
        asked = client.stop_profile(process) if stop else client.profile(process, steps)
    if as_json:
        _print_json({"process": process, "steps": asked.steps, "path": asked.path, "node": asked.node})
        return
    does = "ends its trace" if stop else f"traces its next {asked.steps} steps"
    _out.print(f"{escape(process)} {does}; once it is written, on {escape(asked.node)}:")
    _out.print(escape(asked.path))


@app.command()
@reported
def explain(
    request_id: Annotated[str, typer.Argument(help="From `baton generate --json` or the logs.")] = "",
    last: Annotated[int, typer.Option(min=0, help="List the last requests instead.")] = 0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Explain a recent request's placement: every candidate's cost, predicted and actual times, hop by hop."""
    from deploy.commands import explain as explaining
    from deploy.commands.status import operator_client

    if bool(request_id) == bool(last):
        raise InvalidRequest("give a REQUEST_ID, or --last N")
    with operator_client(operator, _folder(name)) as client:
        if last:
            found = client.requests(last)
            if as_json:
                _print_json({"requests": [explaining.as_json(one) for one in found]})
            else:
                explaining.requests(_out, found)
            return
        explained = client.explain(request_id)
    if as_json:
        _print_json(explaining.as_json(explained))
    else:
        explaining.request(_out, explained)


@app.command()
@reported
def advise(
    trace: Annotated[str, typer.Argument(help="JSON lines in Mooncake's format; empty: a load from --poisson.")] = "",
    slo_ttft: Annotated[float, typer.Option(help="Objective: seconds until the first token.")] = 30.0,
    slo_tpot: Annotated[float, typer.Option(help="Objective: seconds for each later token.")] = 0.1,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet both objectives.")] = 0.9,
    gpus: Annotated[int, typer.Option(help="GPUs available.")] = 64,
    model: Annotated[str, typer.Option(help="A timing model: a name of simulator/models, or a file.")] = "a800_70b",
    requests: Annotated[int, typer.Option(min=10, help="Simulate the first N requests; more take longer.")] = 1_000,
    poisson: Annotated[float, typer.Option(metavar="RATE", help="Without a trace: requests a second.")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Tokens: N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:MOST.")] = "2000",
    output: Annotated[str, typer.Option(help="Output tokens, in the same notation.")] = "200",
    plot: Annotated[str, typer.Option(metavar="FILE.svg", help="Also write the plot to a file.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core, at most 3.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same advice.")] = 1,
    as_json: Json = False,
) -> None:
    """Simulate a load and compare splits: workers of each role, goodput, and the rate at which each breaks."""
    from deploy.commands import advise as advising
    from deploy.commands.progress import Progress
    from simulator.advice import Objectives

    if plot and not Path(plot).parent.is_dir():
        raise InvalidRequest(f"can't write {plot}: there is no folder {Path(plot).parent}")
    objectives = Objectives(slo_ttft, slo_tpot, attainment)
    question = advising.Question(
        Path(trace) if trace else None, poisson, prompt, output, requests, gpus, model, objectives,
        jobs or advising.default_jobs(), seed,
    )  # fmt: skip
    with Progress(_err) as progress:
        advice = advising.advise(question, progress.say)
    if plot:
        advising.plot(advice, Path(plot))
    if as_json:
        _print_json(advice.as_json())
    else:
        advising.show(_out, advice)


@app.command()
@reported
def drain(
    worker: Annotated[str, typer.Argument(help="A worker, such as decode-0; baton status lists them.")],
    now: Annotated[bool, typer.Option("--now", help="Move its requests now; they keep their tokens so far.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Place work on it again.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it is empty.")] = 0.0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Place no new work on a worker; its requests go on. The exit status is 1 if it is not empty after --wait."""
    from deploy.commands import drain as draining
    from deploy.commands.status import operator_client

    with operator_client(operator, _folder(name)) as client:
        found = client.drain(worker, now=now, undo=undo)
        if wait and not undo:
            found = draining.until_empty(client, found, wait)
    if as_json:
        _print_json({"worker": worker, "draining": not undo, "attempts": found.attempts})
    elif undo:
        _out.print(f"{escape(worker)} is given work again")
    else:
        left = f"{found.attempts} attempts are left" if found.attempts else "it is empty"
        _out.print(f"{escape(worker)} is given nothing new; {left}")
    if wait and found.attempts:
        raise typer.Exit(1)


@app.command()
@reported
def role(
    worker: Annotated[str, typer.Argument(help="A worker, such as decode-0; baton status lists them.")],
    wanted: Annotated[WorkerKind, typer.Argument(metavar="prefill|decode", help="Its new role.")],
    patience: Annotated[float, typer.Option(help="Seconds until its remaining requests are moved.")] = 30.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the new role.")] = 60.0,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Change a worker's role from decode to prefill, or back, without a restart.

    The exit status is 1 if the worker does not have the role after --wait."""
    from deploy.commands import drain as draining
    from deploy.commands.status import operator_client

    kind: WorkerRole = "prefill" if wanted is WorkerKind.PREFILL else "decode"
    with operator_client(operator, _folder(name)) as client:
        client.set_role(worker, kind, patience=patience)
        found, done = draining.until_changed(client, worker, kind, wait)
    if as_json:
        _print_json({"worker": worker, "role": kind, "done": done, "attempts": found.attempts})
    elif done:
        _out.print(f"{escape(worker)} is a {kind} worker now")
    else:
        _out.print(f"{escape(worker)} is no {kind} worker yet; {found.attempts} attempts are left")
    if wait and not done:
        raise typer.Exit(1)


@app.command()
@reported
def scale(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers from now on.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers from now on.")] = None,
    name: Name = "baton",
    timeout: Annotated[float, typer.Option(help="Seconds within which the change must be complete.")] = 900.0,
    as_json: Json = False,
) -> None:
    """Change the number of workers while the cluster serves, and return once they are live."""
    from deploy.commands.progress import Progress
    from deploy.commands.scale import rescale
    from deploy.commands.status import find
    from deploy.control_plane import state_file

    folder = _folder(name)
    state = find(folder)
    with state_file.locked(folder), Progress(_err, tell_first=False) as progress:
        done = rescale(state, prefill, decode, timeout, progress.watch)
    if as_json:
        _print_json({"name": state.name, "prefill": done.prefill, "decode": done.decode})
    else:
        _out.print(f"{state.name} has {done.prefill} prefill and {done.decode} decode workers")


@app.command()
@reported
def down(name: Name = "baton", as_json: Json = False) -> None:
    """End the cluster, and the Ray that `baton up` started for it. A Ray of yours stays up."""
    from deploy.commands.progress import Progress
    from deploy.control_plane import state_file
    from deploy.control_plane.teardown import tear_down

    folder = _folder(name)
    if not folder.exists():
        raise _no_cluster(name)
    with state_file.locked(folder), Progress(_err) as progress:
        state = state_file.read(folder)
        if state is None:
            raise _no_cluster(name)
        tear_down(folder, state, progress.say)
    if as_json:
        _print_json({"name": name, "down": True})
    else:
        _out.print(f"{name} is down; its logs stay in {escape(state.log_dir)}")


@app.command()
@reported
def doctor(config: ConfigFile = None, settings: Settings = None, as_json: Json = False) -> None:
    """Check Ray, memory, ports, torch and cores, and advise on each problem."""
    from dataclasses import asdict

    from deploy.commands import show
    from deploy.commands.doctor import examine

    findings = examine(_load(config, settings, {}))
    if as_json:
        _print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        show.findings(_out, findings)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


@keys_app.command("add")
@reported
def keys_add(
    key: Annotated[str, typer.Argument(metavar="NAME", help="The key's name, in lists and logs.")],
    tenant: Annotated[str, typer.Option(help="Clients with this key share its cache, weight and rate limits.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="It may also watch and change the cluster.")] = False,
    max_body_bytes: Annotated[int | None, typer.Option(min=1, help="Largest request.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt.")] = None,
    max_streams: Annotated[int | None, typer.Option(min=1, help="Most requests at a time.")] = None,
    file: KeysFile = None,
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Make an API key and print it once. Only its hash is kept. From the first key on, clients need one."""
    from baton.api_keys import Identity
    from deploy.commands import keys as api_keys

    limits = {"max_body_bytes": max_body_bytes, "max_prompt_tokens": max_prompt_tokens, "max_streams": max_streams}
    path = api_keys.file_of(file, name)
    secret = api_keys.add(path, Identity(name=key, tenant=tenant, operator=operator, **limits))
    if as_json:
        _print_json({"name": key, "tenant": tenant, "operator": operator, "key": secret, "file": str(path)})
    else:
        _err.print(f"[dim]{escape(key)} is in {escape(str(path))}; the key is not shown again[/]")
        sys.stdout.write(secret + "\n")


@keys_app.command("list")
@reported
def keys_list(file: KeysFile = None, name: Name = "baton", as_json: Json = False) -> None:
    """Show the names, tenants and limits of all API keys."""
    from deploy.commands import keys as api_keys

    path = api_keys.file_of(file, name)
    found = api_keys.listed(path)
    if as_json:
        _print_json({"file": str(path), "keys": found})
    else:
        api_keys.show(_out, path, found)


@keys_app.command("remove")
@reported
def keys_remove(
    key: Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")],
    file: KeysFile = None,
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Remove an API key. Within seconds it opens nothing any more; its requests that run go on."""
    from baton import api_keys as files
    from deploy.commands import keys as api_keys

    path = api_keys.file_of(file, name)
    left = files.remove(path, key)
    if as_json:
        _print_json({"name": key, "removed": True, "left": left})
        return
    _out.print(f"removed {escape(key)}; {left} keys are left")
    if not left:
        _out.print(escape(f"every client is refused now; to serve clients without keys, remove {path} and restart"))


@keys_app.command("cluster")
@reported
def keys_cluster(
    file: Annotated[Path, typer.Argument(help="The file to make; an existing file is never overwritten.")],
    as_json: Json = False,
) -> None:
    """Make a key pair for a cluster. Every process with the file can join it. Name it in cluster.key_file."""
    from baton.wire import ClusterKeys

    ClusterKeys.generate().write(file)
    if as_json:
        _print_json({"key_file": str(file)})
    else:
        _out.print(f"made {escape(str(file))}, for its owner alone; set cluster.key_file to it")


@app.command()
@reported
def version(as_json: Json = False) -> None:
    """Show the version."""
    if as_json:
        _print_json({"version": __version__})
    else:
        _out.print(f"baton {__version__}")


def _load(file: Path | None, settings: list[str] | None, flags: dict[str, Any]) -> Config:
    """Return the configuration: the file, overridden by --set, overridden by given flags. Raises ConfigError."""
    overrides: dict[str, object] = dict(configuration.parse_override(text) for text in settings or ())
    overrides |= {key: value for key, value in flags.items() if value not in (None, "")}
    return configuration.load(file, overrides)


def _folder(name: str) -> Path:
    return configuration.load(overrides={"cluster.name": name}).cluster.state_dir


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _no_cluster(name: str) -> StartupError:
    return StartupError(f"no cluster named {name!r} is up; there is nothing to end")


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


def main() -> None:
    app()
