"""`baton advise`: compare splits of a cluster by serving a load in virtual time."""

from pathlib import Path
from typing import Annotated

import typer

from baton.errors import InvalidRequest
from deploy.commands.progress import Progress
from deploy.commands.terminal import EngineOption, Json, command, err, out, print_json


@command(
    "baton advise trace.jsonl --gpus 32 --slo-ttft 2 --slo-tpot 0.05",
    "baton advise --poisson 4 --prompt lognormal:4000:1.0:32000 --output 300 --plot advice.svg",
)
def advise(
    trace: Annotated[
        str, typer.Argument(help="JSON lines in Mooncake's format, or recorded sessions; empty: --poisson.")
    ] = "",
    slo_ttft: Annotated[float, typer.Option(help="Objective: seconds until the first token.")] = 30.0,
    slo_tpot: Annotated[float, typer.Option(help="Objective: seconds for each later token.")] = 0.1,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet both objectives.")] = 0.9,
    gpus: Annotated[int, typer.Option(help="GPUs available.")] = 64,
    model: Annotated[str, typer.Option(help="A timing model: a name of simulator/models, or a file.")] = "a800_70b",
    quantization: Annotated[str, typer.Option(help="Of weights: int8, int4 or fp8; empty: bfloat16.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="Of pages: int8 or fp8; auto: bfloat16.")] = "auto",
    checkpoint: Annotated[
        str, typer.Option(metavar="MODEL", help="As of `baton size`: pages are those of its config, groups and states.")
    ] = "",
    engine: Annotated[
        EngineOption, typer.Option(metavar="ENGINE", help="With --checkpoint, as of `baton size`.")
    ] = EngineOption.AUTO,
    page_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens per KV page; fewer take longer to simulate.")
    ] = 128,
    requests: Annotated[int, typer.Option(min=10, help="Simulate the first N requests; more take longer.")] = 1_000,
    poisson: Annotated[float, typer.Option(metavar="RATE", help="Without a trace: requests a second.")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Tokens: N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:MOST.")] = "2000",
    output: Annotated[str, typer.Option(help="Output tokens, in the same notation.")] = "200",
    plot: Annotated[str, typer.Option(metavar="FILE.svg", help="Also write the plot to a file.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core, at most 3.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same advice.")] = 1,
    as_json: Json = False,
) -> None:
    """Simulate a load and compare splits: workers of each role, goodput, and the rate at which each breaks."""
    from deploy.commands import split_search  # the simulator and numpy: `baton --help` need not wait for them
    from simulator.advice import Objectives

    if plot and not Path(plot).parent.is_dir():
        raise InvalidRequest(f"can't write {plot}: there is no folder {Path(plot).parent}")
    objectives = Objectives(slo_ttft, slo_tpot, attainment)
    question = split_search.Question(
        Path(trace) if trace else None, poisson, prompt, output, requests, gpus, model, objectives,
        jobs or split_search.default_jobs(), seed, page_size,
        {"model.quantization": quantization, "model.kv_cache_dtype": kv_cache_dtype, "model.engine": engine.value},
        checkpoint,
    )  # fmt: skip
    with Progress(err) as progress:
        advice = split_search.advise(question, progress.say)
    if plot:
        split_search.plot(advice, Path(plot))
    if as_json:
        print_json(advice.as_json())
    else:
        split_search.show(out, advice)
