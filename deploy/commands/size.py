"""`baton size`: the memory that a model needs, and what fits into the memory there is."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs
from rich.markup import escape

from baton.checkpoint_files import read_config, text_settings
from baton.checkpoints import hub
from baton.config import DRAFT_SHARE, MAX_RANKS, Bytes, Config, ModelConfig
from baton.errors import ConfigError, InvalidRequest, UnsupportedModel
from baton.system_memory import available_memory
from deploy.commands.terminal import EngineOption, Json, command, err, load, new_table, out, print_json
from deploy.commands.terminal import size as shown
from deploy.control_plane.preflight import draft_weight_bytes, runs_on_cpu
from engine.device.gpu_memory import CONTEXT_BYTES, GpuMemory, GpuUse, pool_bytes
from engine.device.gpus import visible_gpus
from engine.models.config_file import ConfigFile
from engine.vllm_runner.layers import of_config, of_groups, of_stages
from engine.vllm_runner.pages import FP8, STATES_ON_CPU, has_states, largest_page
from engine.vllm_runner.requirements import STAGED_GROUPS, page_size_lack
from kvstore.layout import CODES, LATENT, STATES, PageLayout
from kvstore.window_groups import NO_GROUPS, WindowGroups

if TYPE_CHECKING:
    import torch

    from engine.models.linear import LinearMaker
    from engine.models.memory import WorkerMemory
    from engine.spec import ModelSpec


class Device(StrEnum):
    """The devices of a worker."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@command(
    "baton size ./model",
    "baton size Qwen/Qwen3-0.6B --context 8192 --concurrency 16",
    "baton size ./model --context 4096 --concurrency 64 --device cuda --memory 80GiB",
)
def size(
    model: Annotated[
        str, typer.Argument(help="Directory of a checkpoint, GGUF file, hub id or smollm2: only the config is read.")
    ],
    context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of each sequence, prompt and output together.")
    ] = 2_048,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences on one decode worker at a time.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Of pages: auto (as --dtype), one of the same, int8 or fp8.")
    ] = "auto",
    quantization: Annotated[
        str, typer.Option(help="Of weights when they are loaded: int8 or int4, our own engine on CPUs only.")
    ] = "",
    device: Annotated[Device, typer.Option(help="auto: cuda where there is one.")] = Device.AUTO,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per KV page.")] = Config().pages.page_size,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", max=MAX_RANKS, help="Ranks of a worker, vLLM's runner only; sizes are those of one."
        ),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", max=MAX_RANKS, help="Stages of a worker, vLLM's runner only; sizes are the largest's."
        ),
    ] = 1,
    engine: Annotated[
        EngineOption,
        typer.Option(metavar="ENGINE", help="vllm: on a CPU, layers with windows have pages of their own."),
    ] = EngineOption.AUTO,
    draft_model: Annotated[str, typer.Option(help="Small model that proposes tokens; as with `baton up`.")] = "",
    speculation_heads: Annotated[str, typer.Option(help="Heads that propose tokens; as with `baton up`.")] = "",
    speculative_config: Annotated[
        str, typer.Option(metavar="JSON", help="vLLM's draft, whose layers are in pages; as with `baton up`.")
    ] = "",
    memory: Annotated[
        str, typer.Option(help="Memory of one worker or rank, such as 80GiB; by default what is free here.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Compute the memory of a worker: weights, KV cache, activations; and what fits. Reads no weights."""
    try:
        room = Bytes.parse(memory) if memory else None
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from None
    flags = {
        "model.dtype": dtype,
        "model.kv_cache_dtype": kv_cache_dtype,
        "model.quantization": quantization,
        "model.tensor_parallel_size": tensor_parallel_size,
        "model.pipeline_parallel_size": pipeline_parallel_size,
        "pages.page_size": page_size,
        "model.draft_model": draft_model,
        "model.speculation_heads": speculation_heads,
    }
    drafts = [f"model.speculative_config={speculative_config}"] if speculative_config else []
    config = load(None, drafts, {**flags, "model.device": device.value, "model.engine": engine.value})
    sizes = sizes_of(config, model, context, concurrency, room)
    if as_json:
        print_json(sizes.as_json())
    else:
        chosen = [f"{name}={value}" for name, value in flags.items() if load(None, [], {name: value}) != Config()]
        _show(model, sizes, [*chosen, *map(shlex.quote, drafts)])


@dataclass(frozen=True)
class Sizes:
    """The answer, of one rank: the one that takes most. Bytes, unless a name says something else; `vllm`: its runner
    computes; `fits` is the number of sequences of `context` tokens. `parameters` are the model's."""

    parameters: int | None
    dtype: str
    kv_dtype: str
    device: str
    vllm: bool
    ranks: int
    context: int
    concurrency: int
    kv_bytes_per_token: int
    page_bytes: int
    pages: int
    pool: int  # of all ranks together
    decode: WorkerMemory
    prefill: WorkerMemory
    room: int
    bound: str
    fits: int
    longest: int  # tokens of one sequence alone
    groups: WindowGroups
    snapshot_bytes: int = 0  # of the recurrent states of a sequence, as a page of each group keeps them

    def as_json(self) -> dict[str, Any]:
        workers = {"decode": self.decode, "prefill": self.prefill}
        totals = {role: asdict(each) | {"total": each.total} for role, each in workers.items()}
        return asdict(self) | totals | {"groups": structs.asdict(self.groups)}


def sizes_of(config: Config, model: str, context: int, concurrency: int, room: int | None) -> Sizes:
    """Compute the sizes of a checkpoint, or those of its pages if only vLLM's runner may know it. Raises as `compute`
    and `compute_pages`."""
    try:
        return compute(config, _spec(model), context, concurrency, room)
    except UnsupportedModel:
        if config.model.engine == "native":
            raise
        return compute_pages(config, hub.resolve(model, ["config.json"]), context, concurrency, room)


def compute(config: Config, spec: ModelSpec, context: int, concurrency: int, room: int | None) -> Sizes:
    """Compute all sizes; `room` is the memory of one worker, None for what is free here. With several ranks all sizes
    are those of one, and so is `room`: its equal part of weights and KV heads, and the activations of a whole worker.
    Of several stages it is the one that takes most. Where layers form groups, a sequence has the pages of a window
    beside those of its context, and a prompt on a prefill worker all.

    The prefill worker's pages are those of one step. Raises ModelError for a dtype, InvalidRequest for a context that
    the model does not have, or ranks and stages that can't share it.
    """
    from engine.engine import dtype_of, layout_of, linear_maker, quantization_lack
    from engine.models.memory import WorkerMemory, activation_bytes
    from engine.models.weights import TORCH_DTYPES
    from worker.draft import page_layers

    model, page_size, stages = config.model, config.pages.page_size, config.model.pipeline_parallel_size
    heads = model.tensor_parallel_size
    if context > spec.max_positions:
        raise InvalidRequest(f"a context of {context} tokens is more than the model's {spec.max_positions}")
    if spec.num_kv_heads % heads:
        raise InvalidRequest(f"{heads} ranks can't share {spec.num_kv_heads} KV heads evenly")
    if spec.num_layers < stages:
        raise InvalidRequest(f"{stages} stages can't share {spec.num_layers} layers")
    on_cpu, more = runs_on_cpu(config, "decode"), page_layers(model, {})
    vllm = model.engine == "vllm" or heads * stages > 1 or model.speculative_config is not None
    ours = on_cpu and not vllm and model.kv_cache_dtype in CODES
    held = None if ours else FP8.get(model.kv_cache_dtype)
    vllm = vllm or held is not None
    layers, groups = spec.num_layers + more, NO_GROUPS
    if vllm and on_cpu:
        layers, groups = of_groups([*spec.windows, *[None] * more], page_size)
    if stages > 1 and not on_cpu:
        raise InvalidRequest("pipeline stages run on a CPU only: leave out --pipeline-parallel-size")
    if stages > 1 and groups.count:
        raise InvalidRequest(STAGED_GROUPS)
    whole = layout_of(spec, model.dtype, page_size, "auto" if held else model.kv_cache_dtype)
    whole = replace(whole, num_layers=layers, dtype=held or whole.dtype)
    dtype, device = dtype_of(spec, model.dtype), "cpu" if on_cpu else "cuda"
    if lack := quantization_lack(spec, device, model.dtype, model.native, model.quantization):
        raise InvalidRequest(lack)
    kind, maker = TORCH_DTYPES[dtype], linear_maker(device, spec, model.quantization)
    seen, per_sequence, per_prompt = _pages(context, page_size, groups)

    def rank(own: range) -> tuple[int, PageLayout]:
        """The weights and the page of a rank of the stage with these layers."""
        part = replace(whole, num_kv_heads=spec.num_kv_heads // heads)
        if stages > 1:
            part = replace(part, num_layers=len(own))
        return -(-_stage_bytes(spec, kind, maker, own) // heads), part

    ranks = [rank(own) for own in of_stages(spec.num_layers, stages)]
    weights, layout = max(ranks, key=lambda each: each[0] + each[1].page_bytes * per_sequence * concurrency)

    def worker(sequences: int, tokens: int, pages: int, *, decodes: bool = False) -> WorkerMemory:
        activations = activation_bytes(spec, kind, tokens, sequences, maker)
        parts = WorkerMemory(weights, pages * sequences * layout.page_bytes, activations)
        return _with_draft(parts if on_cpu else replace(parts, process=CONTEXT_BYTES), model, decodes=decodes)

    decode = worker(concurrency, config.decode.max_num_batched_tokens, per_sequence, decodes=True)
    prefill = worker(config.prefill.max_num_seqs, config.prefill.max_num_batched_tokens, per_prompt)
    memory, bound = (GpuMemory(room, room), "--memory") if room is not None else _free(on_cpu, heads * stages)
    if on_cpu:
        left = memory.free - (decode.total - decode.pages)
    else:
        utilization = config.decode.gpu_memory_utilization
        left = pool_bytes(memory, GpuUse(weights, decode.activations), utilization)
        bound += f"; gpu_memory_utilization {utilization:g}"
    pages = max(0, left) // layout.page_bytes
    alone = max(pages - groups.count * seen, pages // (1 + groups.count))  # of them for the context of one sequence
    return Sizes(
        _parameters(spec), dtype, layout.dtype, device, vllm, heads * stages, context, concurrency,
        layout.token_bytes, layout.page_bytes, per_sequence * concurrency,
        per_sequence * concurrency * whole.page_bytes, decode, prefill, memory.free, bound,
        pages // per_sequence, min(alone * page_size, spec.max_positions), groups,
    )  # fmt: skip


def compute_pages(config: Config, path: Path, context: int, concurrency: int, room: int | None) -> Sizes:
    """Compute the sizes of a model that only vLLM's runner may know, from the config in `path`. Weights are what its
    files here take, nothing where there are none, and activations are not known.

    Raises ModelError for a config that makes no sense, InvalidRequest for pages, ranks and stages that can't hold it.
    """
    from engine.models.memory import WorkerMemory
    from worker.draft import page_layers

    raw, model, page_size = read_config(path), config.model, config.pages.page_size
    text, ranks, on_cpu = text_settings(raw), model.tensor_parallel_size, runs_on_cpu(config, "decode")
    if model.pipeline_parallel_size > 1:
        raise InvalidRequest("stages are sized of models of our own engine: leave out --pipeline-parallel-size")
    if lack := page_size_lack(text, page_size, "cpu" if on_cpu else "cuda", model.dtype, ranks):
        raise InvalidRequest(lack)
    if has_states(text) and not on_cpu:
        raise InvalidRequest(STATES_ON_CPU)
    whole = largest_page(text, model.dtype, page_size, model.kv_cache_dtype, ranks)
    shared = 1 if whole.form == LATENT else ranks
    if whole.num_kv_heads % shared:
        raise InvalidRequest(f"{ranks} ranks can't share {whole.num_kv_heads} KV heads evenly")
    more = page_layers(model, raw)
    layers, groups = of_config(text, page_size, more) if on_cpu else (whole.num_layers + more, NO_GROUPS)
    layout = replace(whole, num_layers=layers, num_kv_heads=whole.num_kv_heads // shared)
    seen, per_sequence, per_prompt = _pages(context, page_size, groups)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors")) // ranks
    decode, prefill = (
        _with_draft(WorkerMemory(weights, pages * layout.page_bytes, 0), model, decodes=decodes)
        for decodes, pages in ((True, per_sequence * concurrency), (False, per_prompt * config.prefill.max_num_seqs))
    )
    memory, bound = (GpuMemory(room, room), "--memory") if room is not None else _free(on_cpu, ranks)
    pages = max(0, memory.free - (decode.total - decode.pages)) // layout.page_bytes
    alone = max(pages - groups.count * seen, pages // (1 + groups.count))
    limit = ConfigFile(text).count("max_position_embeddings", max(1, alone * page_size))
    snapshot = layout.page_bytes * (groups.count + (layout.form == STATES)) * groups.states
    return Sizes(
        None, whole.dtype, layout.dtype, "cpu" if on_cpu else "cuda", True, ranks, context, concurrency,
        layout.token_bytes * (layout.form != STATES), layout.page_bytes, per_sequence * concurrency,
        per_sequence * concurrency * layout.page_bytes * shared, decode, prefill, memory.free, bound,
        pages // per_sequence, min(alone * page_size, limit), groups, snapshot,
    )  # fmt: skip


def _with_draft(parts: WorkerMemory, model: ModelConfig, *, decodes: bool) -> WorkerMemory:
    """Add the draft's weights, and on our own engine the pages of a draft model. There only decode workers have one."""
    if not decodes and model.speculative_config is None:
        return parts
    pages = parts.pages // DRAFT_SHARE if model.draft_model else 0
    return replace(parts, draft=draft_weight_bytes(model) + pages)


def _pages(context: int, page_size: int, groups: WindowGroups) -> tuple[int, int, int]:
    """Return the pages of each group that a token of this context sees, and those of a whole sequence on a decode
    worker and of its prompt on a prefill worker."""
    pages = -(-context // page_size)
    seen = min(pages, (groups.tokens + page_size - 2) // page_size + 1)
    return seen, pages + groups.count * seen, pages * (1 + groups.count)


def _stage_bytes(spec: ModelSpec, kind: torch.dtype, maker: LinearMaker, own: range) -> int:
    """Return the bytes of these layers' weights, with the embedding below the first one and the output head above the
    last one. A head that is the embedding brings it."""
    from engine.models.memory import weight_bytes

    ends = weight_bytes(replace(spec, layers=()), kind, maker)
    embedding = spec.vocab_size * spec.hidden_size * kind.itemsize
    last = own.stop == spec.num_layers
    below = embedding * (own.start == 0 or (last and spec.tied_embeddings))
    layers = weight_bytes(replace(spec, layers=spec.layers[own.start : own.stop]), kind, maker) - ends
    return below + layers + (ends - embedding) * last


def _free(on_cpu: bool, ranks: int) -> tuple[GpuMemory, str]:
    """Return a rank's part of this machine's memory, or that of its first GPU, and what bounds it."""
    if on_cpu:
        room = available_memory()
        part = room.available // ranks
        return GpuMemory(part, part), room.bound
    import torch

    if not (gpus := visible_gpus()).gpus:
        raise InvalidRequest(
            f"there is no GPU here ({gpus.problem}): say how much memory one has, such as --memory 80GiB"
        )
    free, total = torch.cuda.mem_get_info(0)
    return GpuMemory(total, free), gpus.gpus[0].name


def _parameters(spec: ModelSpec) -> int:
    from math import prod

    from engine.models.weights import expected_tensors
    from engine.spec import WeightSpec

    return sum(map(prod, expected_tensors(replace(spec, stored=WeightSpec())).values()))


def _spec(model: str) -> ModelSpec:
    """Read the config of a checkpoint; of one on the hub, only that file is fetched. Raises ModelError."""
    from engine.models.config import load_spec

    return load_spec(hub.resolve(model, ["config.json"], err.print))


def _show(model: str, sizes: Sizes, settings: list[str]) -> None:
    """`settings` are those that a cluster of these sizes has otherwise than by default."""
    of = "weights as their files here" if sizes.parameters is None else f"{sizes.parameters / 1e6:,.1f} M parameters"
    states = f"; {shown(sizes.snapshot_bytes)} of states behind a page" if sizes.snapshot_bytes else ""
    out.print(
        f"[bold]{escape(model)}[/]: {of} in {sizes.dtype} on {sizes.device}; KV in {sizes.kv_dtype}, "
        f"{shown(sizes.kv_bytes_per_token)} a token, {shown(sizes.page_bytes)} a page{states}"
    )
    table = new_table("one worker" if sizes.ranks == 1 else f"one of {sizes.ranks} ranks", ">decode", ">prefill")
    for row in ("weights", "pages", "draft", "activations", "process", "total"):
        if row == "draft" and not sizes.decode.draft:
            continue
        titles = {"pages": f"KV of {sizes.concurrency} × {sizes.context} tokens", "draft": "of the draft"}
        name = titles.get(row, row)
        table.add_row(name, *(shown(getattr(each, row)) for each in (sizes.decode, sizes.prefill)))
    out.print(table)
    out.print(f"{shown(sizes.room)} are free ({escape(sizes.bound)}). A decode worker has room there for:")
    out.print(f"  {sizes.fits:>9,} sequences of {sizes.context} tokens at a time")
    out.print(f"  {sizes.longest:>9,} tokens in one sequence")
    if sizes.fits < sizes.concurrency:
        out.print(
            f"[yellow]{sizes.concurrency} sequences don't fit[/]: lower --context or --concurrency, or a smaller dtype"
        )
    else:
        pool = -(-sizes.pool // 2**20)
        room = "all of it"
        if sizes.device == "cpu":
            room = f"{sizes.concurrency} sequences of {sizes.context} tokens"
            settings = [*settings, f"decode.kv_cache_bytes={pool}MiB"]
        engine = " --engine vllm" if sizes.vllm else ""
        flags = "".join(f" --set {setting}" for setting in settings)
        out.print(f"for {room}: baton up --model {escape(model)}{engine}{flags}")
