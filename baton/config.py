"""One typed configuration: a YAML file, with flags on top. Frozen; what a process finds out later is a message.

Unknown keys, wrong types and impossible values raise `ConfigError` with the path of the setting and the reason.
Sizes are bytes, or text such as "512MiB"; times are in the unit that ends the setting's name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta, Struct

from baton import hosts
from baton.errors import ConfigError, shown
from baton.hosts import host_of_header, is_loopback
from baton.messages import MAX_NAME, MAX_TRACE_STEPS, WorkerRole
from baton.operator_address import Loopback, parse_operator

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
MAX_RANKS = 16
PolicyName = Literal[
    "baton", "random", "round_robin", "least_loaded", "power_of_two", "cache_aware", "dynamo_kv", "mooncake", "llm_d"
]
GpuPart = Annotated[float, Meta(gt=0, le=1)] | Literal["auto"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_MOST_BYTES = 2**63
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True)
class TraceLimits:
    """How many traces a folder keeps, and how many bytes of them. The newest stays, however large it is."""

    files: int = 64
    size: int = 256 * 2**20


class Bytes(int):
    """A size in bytes, which a file may also write as text with a unit."""

    @classmethod
    def parse(cls, value: object) -> Bytes:
        """Raises ValueError for anything that is no positive size."""
        if isinstance(value, int) and not isinstance(value, bool):
            size = value
        elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            size = int(min(float(match[1]) * _UNITS[(match[2] or "B").lower()], _MOST_BYTES))
        else:
            raise ValueError(f'{value!r} is no size; write bytes, or a number with a unit such as "512MiB"')
        if not 0 < size < _MOST_BYTES:
            raise ValueError(f"a size of {shown(repr(value))} is not above zero and below 8 EiB")
        return cls(size)


class CacheBytes(Bytes):
    """The size of a page pool, or "auto" (0): what fits on the GPU, or `ON_CPU` bytes on a CPU."""

    ON_CPU: ClassVar[int] = 512 * 2**20

    @classmethod
    def parse(cls, value: object) -> Self:
        """Raises ValueError for anything that is neither a positive size nor "auto"."""
        return cls(0) if value == "auto" else cls(super().parse(value))

    @property
    def on_cpu(self) -> int:
        """The size on a CPU."""
        return int(self) or self.ON_CPU


class ArenaBytes(CacheBytes):
    """The size of a node's arena, or "auto" (0): on a machine with GPUs a part of its memory, else `ON_CPU` bytes."""

    PART: ClassVar[float] = 0.25  # of the memory that is free
    PER_GPU: ClassVar[int] = 32 * 2**30  # at most; a kernel clears 2 to 4 GiB a second for it

    def on_node(self, gpus: int, free: int) -> ArenaBytes:
        """The size on a machine with so many GPUs for workers, and so many bytes free."""
        return ArenaBytes(self or max(self.ON_CPU, min(int(free * self.PART), gpus * self.PER_GPU)))


def encode_size(value: Bytes) -> int | str:
    """What a file says for a size, for msgspec's `enc_hook`."""
    return int(value) or "auto"


def decode_size(kind: type, value: object) -> object:
    """A size of a file, for msgspec's `dec_hook`. Raises ValueError, and NotImplementedError for another kind."""
    if issubclass(kind, Bytes):
        return kind.parse(value)
    raise NotImplementedError(kind)


DRAFT_SHARE = 8  # the draft model's pages take one part in so many of decode.kv_cache_bytes, besides


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


ToolCallParser: TypeAlias = Literal[
    "auto", "none", "deepseek_v3", "deepseek_v31", "glm45", "glm47", "hermes", "hf", "kimi_k2", "llama3_json",
    "minimax_m2", "mistral", "openai", "qwen3_coder", "qwen3_xml",
]  # fmt: skip
ReasoningParser: TypeAlias = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "hf", "kimi_k2", "minimax_m2", "mistral", "openai_gptoss",
    "qwen3",
]  # fmt: skip


DRAFT_METHODS = ("draft_model", "eagle", "eagle3", "medusa")
MTP_METHODS = ("mtp", "deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp")
"""vLLM's name for a layer of the model's own checkpoint that proposes tokens, and its earlier ones."""


class SpeculativeConfig(_Section, frozen=True):
    """A draft that vLLM runs, by vLLM's names."""

    method: str  # one of `DRAFT_METHODS` or `MTP_METHODS`
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=16)]
    model: str = ""  # directory or hub id; none by `MTP_METHODS`

    def arguments(self) -> dict[str, str | int]:
        """Return what vLLM is told."""
        if self.model:
            return msgspec.structs.asdict(self)
        return {"method": MTP_METHODS[0], "num_speculative_tokens": self.num_speculative_tokens}


class ModelConfig(_Section, frozen=True):
    """What is served."""

    path: str = ""  # directory of a Hugging Face checkpoint, a GGUF file, or a hub id; required
    engine: Literal["auto", "native", "vllm"] = "auto"  # what computes; auto: docs/vllm.md has the rule
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's own
    # auto: as dtype, or FP8 where the checkpoint says so
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    served_model_name: str | tuple[str, ...] = ""  # names clients use, the first in answers; default: end of path
    device: str = "auto"  # torch device; auto: cuda where there is one, else cpu
    tool_call_parser: ToolCallParser = "auto"  # format of tool calls, by vLLM's names; auto: as the chat template tells
    reasoning_parser: ReasoningParser = "auto"  # format of reasoning, in the same way
    lora_modules: dict[str, str] = {}  # LoRA adapters that vLLM's runner serves: a name for clients, and its directory
    max_loras: Natural = 0  # adapters at a time; those beyond lora_modules may be loaded while it serves
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 16  # the largest rank of an adapter
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1  # processes that share a worker's model; vLLM's
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1  # stages, each with some layers; vLLM's
    max_model_len: Natural = 0  # tokens of a sequence at most; 0: as many as the model takes
    quantization: str = ""  # of weights at load: int8, int4 (our own engine, CPUs), int8, fp8 (vLLM, GPUs)
    enable_expert_parallel: bool = False  # ranks divide the experts instead of each one; vLLM's, on GPUs
    enforce_eager: bool = False  # vLLM does not compile the model: it starts sooner, and its steps take longer
    skip_tokenizer_init: bool = False  # prompts and outputs are token ids alone, and no tokenizer is read; vLLM's
    # workers whose arithmetic gives other bits: exact refuses them; mixed: tokens may depend on the path
    numerics: Literal["exact", "mixed"] = "exact"
    # proposes tokens, which steps verify; ngram, draft, heads, vllm: all; auto: those that pay, where exact
    speculation: Literal["auto", "off", "ngram", "draft", "heads", "vllm"] = "auto"
    draft_model: str = ""  # a small checkpoint of the same vocabulary, which proposes tokens; as `path`
    speculation_heads: str = ""  # directory or hub id of heads for the model, which propose tokens
    speculative_config: SpeculativeConfig | None = None  # a draft that vLLM's runner runs itself
    native: bool = True  # on a CPU, kernels compiled on the node, where they run; false: torch does all the work

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may use. Answers have the first."""
        names = self.served_model_name
        return (names,) if names and isinstance(names, str) else tuple(names) or (Path(self.path).name,)

    @property
    def served_name(self) -> str:
        return self.served_names[0]


class FurtherModel(_Section, frozen=True):
    """One more model behind the same routers, with workers and stores of its own."""

    model: ModelConfig  # as the first one's
    prefill: Natural = 1  # prefill workers; 0 is the colocated mode
    decode: Positive = 1  # decode workers
    internal_port: Port = 0  # where its workers and stores connect, on router.host; 0: any free port


class CascadeConfig(_Section, frozen=True):
    """A model's name behind which a small model answers, or a large one where the small one is unsure."""

    small: str  # name of the model that is asked first
    large: str  # name of the other one; both have the same tokenizer and chat template
    min_logprob: Annotated[float, Meta(ge=-100, le=0)] = -0.5  # mean of the first tokens, below which the large answers
    tokens: Positive = 16  # of the small model's answer, whose mean decides; none goes to the client before
    classes: list[int] = []  # priorities whose requests the large model answers at once


class ClusterConfig(_Section, frozen=True):
    """How many of what, and where they meet."""

    # tells clusters of one machine apart; the end with a point is `Config.pools`'
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}(\.m[0-9]+)?$")] = "baton"
    prefill: Natural = 1  # prefill workers; 0 is the colocated mode
    decode: Positive = 1  # decode workers
    routers: Positive = 1  # each takes requests; all listen at the same ports for clients
    log_dir: str = ""  # default: ~/.local/state/baton/<name>/logs
    log_max_bytes: Bytes = Bytes(64 * 2**20)  # a log file of this size is renamed to .log.1 and a new one begun
    log_files: Positive = 4  # renamed log files that are kept of each process; older ones are removed
    heartbeat_ms: Positive = 250  # every link, both ways
    heartbeat_timeout_ms: Positive = 3_000  # a peer silent for longer loses all it held
    step_timeout_ms: Positive = 60_000  # a process whose step, or turn of its main loop, takes longer counts as gone
    restart_patience_ms: Natural = 30_000  # Ray's supervisor replaces a silent process that still exists after so long
    trace_steps: Annotated[int, Meta(ge=0, le=MAX_TRACE_STEPS)] = 0  # of each worker and store, from its start
    trace_dir: str = ""  # where traces are written; default: traces, below log_dir
    trace_files: Positive = 64  # kept there, on each node; the oldest is removed
    trace_bytes: Bytes = Bytes(256 * 2**20)  # and of so many bytes together; the newest always stays
    key_file: str = ""  # the cluster's CURVE keys; default: cluster.key in ~/.local/state/baton/<name>, made there

    @property
    def state_dir(self) -> Path:
        """Raises ConfigError where this user has no home."""
        try:
            home = Path.home()
        except RuntimeError:
            raise ConfigError(
                f"user {os.getuid()} has no home directory; set HOME, or cluster.log_dir and cluster.key_file"
            ) from None
        return home / ".local" / "state" / "baton" / self.name

    @property
    def key_path(self) -> Path:
        """The file with the cluster's keys."""
        return Path(self.key_file).expanduser() if self.key_file else self.state_dir / "cluster.key"

    @property
    def logs(self) -> Path:
        return Path(self.log_dir) if self.log_dir else self.state_dir / "logs"

    @property
    def traces(self) -> Path:
        return Path(self.trace_dir) if self.trace_dir else self.logs / "traces"

    @property
    def kept_traces(self) -> TraceLimits:
        return TraceLimits(self.trace_files, self.trace_bytes)


class PagesConfig(_Section, frozen=True):
    """Pages, one shape per cluster."""

    page_size: Annotated[int, Meta(ge=1, le=2_048)] = 16  # tokens
    recompute_share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the complete pages, computed again while idle


class ObjectivesConfig(_Section, frozen=True):
    """What a class of requests is promised, unless a request brings its own. Without `enforce` it is only measured."""

    ttft_ms: Natural = 0  # to the first token; 0: no promise
    tpot_ms: Natural = 0  # between two tokens, on average; 0: no promise
    enforce: bool = True  # placement keeps to it, and a request that can't have it is refused


class TenantConfig(_Section, frozen=True):
    """What a tenant may have."""

    weight: Annotated[float, Meta(gt=0)] = 1.0  # its share of the service beside others that wait
    tokens_per_minute: Natural = 0  # of prompts and outputs; 0: no limit
    requests_per_minute: Natural = 0  # 0: no limit
    burst_s: Annotated[float, Meta(gt=0)] = 60.0  # seconds without requests after which a whole burst is allowed


class RouterConfig(_Section, frozen=True):
    """The front door."""

    host: str = "127.0.0.1"  # where it listens for workers and Prometheus; not loopback: other nodes may join
    grpc_port: Port = 50_051  # for clients, at api.host; 0: any free port
    internal_port: Port = 20_052  # where workers and stores connect
    http_port: Port = 20_053  # /metrics and /discovery
    operator: str = ""  # its API: a Unix socket's path or a loopback host:port; "": a socket of this user
    max_concurrent_rpcs: Positive = 4_096  # at a time; health and reflection have places of their own
    max_attempts: Positive = 4  # per request; the last is always decode-local
    max_queued: Natural = 1_024  # requests waiting for a worker; of more, the least urgent are refused
    max_queued_tokens: Positive = 16_777_216  # of their prompts together
    queue_timeout_ms: Positive = 30_000  # longest wait for a worker
    shutdown_timeout_ms: Natural = 30_000  # what runs may go on for so long after SIGTERM
    attempt_timeout_ms: Positive = 120_000  # an attempt without any progress for longer is given up
    ageing_ms: Positive = 10_000  # one level of priority is worth so much waiting
    slo_classes: dict[int, ObjectivesConfig] = msgspec.field(
        default_factory=lambda: {0: ObjectivesConfig(ttft_ms=6_000, tpot_ms=175, enforce=False)}
    )  # objectives by priority; a class that is not here has none
    tenants: dict[str, TenantConfig] = {}  # weights and quotas; "*": of all that are not named
    warm_first_ms: Natural = 2_000  # a request that has waited less lets equal ones with more in caches go before it
    service_quantum: dict[int, Positive] = {}  # by priority, output tokens after which a request yields to others
    cached_weight: Annotated[float, Meta(ge=0, le=1)] = 0.1  # of a cached prompt token in a tenant's service
    output_weight: Annotated[float, Meta(ge=0)] = 2.0  # of a generated token
    retry_share: Annotated[float, Meta(ge=0)] = 0.2  # failed attempts repeated at once, per first attempt
    retries_per_s: Annotated[float, Meta(gt=0)] = 10.0  # and besides; others wait in the queue
    policy: PolicyName = "baton"  # that places requests: Baton's own, or a published rule of another system
    # prefill workers get a prompt where that is sooner, or whenever one can
    disaggregation: Literal["auto", "always"] = "auto"
    move_prompts: bool = True  # the rest of a prompt goes to another prefill worker where its first token comes sooner
    pipeline_prompts: bool = True  # idle prefill workers of a node compute a long prompt together, where that is sooner
    roles: Literal["manual", "auto"] = "manual"  # auto: changes of workers' roles that are advised are carried out
    explain_requests: Natural = 1_000  # the last so many can be explained; 0: none


Repair: TypeAlias = Literal[
    "role",
    "system",
    "turns",
    "system_in_user",
    "single_calls",
    "call_ids",
    "effort",
    "arguments",
    "placeholder",
    "limit",
    "telemetry",
    "surrogate",
    "tool",
    "schema",
    "reasoning",
]
REPAIRS: tuple[Repair, ...] = get_args(Repair)
"""What the HTTP APIs may repair in a request, or in its answer."""


class ApiConfig(_Section, frozen=True):
    """The doors of each router to clients: its HTTP APIs, and its public gRPC port."""

    host: str = "127.0.0.1"  # where both listen; other addresses need API keys and TLS, or `insecure`
    port: Port = 8_000  # 0: any free port
    insecure: bool = False  # listen on other addresses without keys and TLS
    keys_file: str = ""  # of the clients' API keys; default: api-keys.json in ~/.local/state/baton/<cluster>
    require_keys: bool = False  # clients need a key even while there is no such file
    trust_request_chat_template: bool = False  # a request may bring its own template, which is a program
    allowed_origins: list[str] = []  # of web pages that may use the HTTP APIs: https://chat.example; *: all
    allowed_hosts: list[str] = []  # that clients may write in Host besides this machine's names; *: all
    repairs: bool | list[Repair] = True  # of requests that a model can't take as they came: all, none, or these kinds
    clamp_max_tokens: bool = False  # of completions and chats to what fits the context, as Messages and Responses are
    json_whitespace: Annotated[int, Meta(ge=0, le=1_000)] = 32  # most characters in one place of JSON by a schema
    batch_dir: str = ""  # of clients' files and batches; default: batches in ~/.local/state/baton/<cluster>
    batch_bytes: Bytes = Bytes(2**30)  # of the files of a tenant at most


class TlsConfig(_Section, frozen=True):
    """TLS at the doors to clients."""

    cert_file: str = ""  # PEM: the server's certificate, then its chain; "": no TLS
    key_file: str = ""  # PEM, without a password
    client_ca_file: str = ""  # PEM: clients must show a certificate of one of these authorities; "": they need none


class TracingConfig(_Section, frozen=True):
    """OpenTelemetry spans of requests. `OTEL_*` variables in a router's environment say the rest."""

    enabled: bool = False  # each router exports spans; needs pip install 'baton[otel]'
    endpoint: str = ""  # URL of the OTLP collector; "": as the OTEL_EXPORTER_OTLP_* variables say, or on this machine


class StoreConfig(_Section, frozen=True):
    """The node's store."""

    host_cache_bytes: ArenaBytes = ArenaBytes(0)  # a node's host tier, taken at start; auto: 512MiB, more with GPUs
    lease_ms: Positive = 30_000  # a hold that its owner does not renew lasts this long
    writer_share: Annotated[float, Meta(gt=0, le=1)] = 0.5  # of the slots, at most reserved by one writer
    load_share: Annotated[float, Meta(gt=0, le=1)] = 0.25  # of the slots, at most waiting for pages from lower tiers
    transport: Literal["zmq", "nixl"] = "zmq"  # of pages between stores; nixl: RDMA, not encrypted, pip install nixl
    pin_bytes: Bytes = Bytes(128 * 2**20)  # at most pinned for one tenant in one store
    event_tokens: bool = False  # put token ids, which are the users' prompts, into KV events
    verify_pages: bool = False  # check the checksum of a page at every read, not only across tiers and nodes


class DiskConfig(_Section, frozen=True):
    """The disk tier of each node's store."""

    path: str = ""  # directory of the disk tier; each node takes a folder of its own name in it; "": none
    max_bytes: Bytes = Bytes(10 * 2**30)  # of one node
    admit_after: Positive = 2  # uses after which a page is written; 1: every page, also those used once
    queue_pages: Positive = 256  # waiting to be written; more are dropped


class WorkerConfig(_Section, frozen=True):
    """What workers of both roles have."""

    device: str = ""  # torch device of these workers; "": as model.device
    num_gpus: GpuPart = "auto"  # of one worker, at most 1; auto: equal shares of its node's GPUs
    node_selector: dict[str, str] = {}  # labels that Ray's node must have, such as ray.io/accelerator-type: H100
    tensor_parallel_size: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0  # 0: as model.tensor_parallel_size
    pipeline_parallel_size: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0  # 0: as model.pipeline_parallel_size
    kv_cache_bytes: CacheBytes = CacheBytes(0)  # device pages, of all ranks; auto: what GPUs have left, 512MiB on a CPU
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9  # of the worker's GPU or share of it, in all
    copies_per_step: Positive = 256  # pages copied from or to the arena per step
    threads: Natural = 0  # of the engine; 0: this worker's share of the cores that it finds itself on


class PrefillConfig(WorkerConfig, frozen=True):
    """Prefill workers."""

    step_ms: Positive = 50  # about how long a step lasts while several prompts are at hand; four times that for one
    max_num_batched_tokens: Positive = 2_048  # tokens per step at most, over all prompts
    max_num_seqs: Positive = 2  # prompts taken at a time; the others wait in the router
    lm_head: bool = True  # load the output head too, so that it may become a decode worker; false: less memory
    store_timeout_ms: Positive = 10_000  # a prompt without an answer of the store, or lasting slots, for longer fails


class DecodeConfig(WorkerConfig, frozen=True):
    """Decode workers."""

    max_num_seqs: Positive = 256  # of a step at most; vLLM reserves memory for so many
    max_num_batched_tokens: Positive = 512  # per step, decoding ones first; prompts get at least two pages, or 256
    itl_ms: Natural = 0  # what a step with both decoding sequences and prompts may take; 0: eight steps without prompts
    first_step_ms: Natural = 200  # a sequence that lacks a page at most waits no longer for others' tokens
    ageing_ms: Positive = 10_000  # one level of priority is worth so much waiting
    copy_share: Annotated[float, Meta(gt=0, le=1)] = 0.25  # of a decoding step's time, at most for copies before it
    fetch_timeout_ms: Positive = 10_000  # a fetch or write without progress for longer ends with what is here


class Config(_Section, frozen=True):
    """The whole configuration."""

    model: ModelConfig = ModelConfig()
    models: tuple[FurtherModel, ...] = ()
    cascades: dict[str, CascadeConfig] = {}
    cluster: ClusterConfig = ClusterConfig()
    pages: PagesConfig = PagesConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    tls: TlsConfig = TlsConfig()
    tracing: TracingConfig = TracingConfig()
    store: StoreConfig = StoreConfig()
    disk: DiskConfig = DiskConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()

    def pools(self) -> tuple[Config, ...]:
        """The configuration of each model's router state, workers and stores; the first model's is this one, without
        the others. Each has another cluster's name, so that it meets no store and no disk folder but its own."""
        mine = msgspec.structs.replace(self, models=(), cascades={})
        return (mine, *(self._pool(mine, number, each) for number, each in enumerate(self.models, 1)))

    @property
    def all_models(self) -> tuple[ModelConfig, ...]:
        """The settings of each model, the first model's first."""
        return (self.model, *(each.model for each in self.models))

    def with_models(self, models: Sequence[ModelConfig]) -> Config:
        """Return the configuration with other settings of each model, the first model's first. Raises ConfigError."""
        first, *further = models
        pairs = zip(self.models, further, strict=True)
        own = tuple(msgspec.structs.replace(each, model=model) for each, model in pairs)
        config = msgspec.structs.replace(self, model=first, models=own)
        _check_models(config)
        return config

    def _pool(self, mine: Config, number: int, each: FurtherModel) -> Config:
        cluster = msgspec.structs.replace(
            self.cluster,
            name=f"{self.cluster.name}.m{number}",
            prefill=each.prefill,
            decode=each.decode,
            log_dir=str(self.cluster.logs),
            trace_dir=str(self.cluster.traces),
            key_file=str(self.cluster.key_path),
        )
        router = msgspec.structs.replace(self.router, internal_port=each.internal_port)
        path = str(Path(self.disk.path) / f"m{number}") if self.disk.path else ""
        disk = msgspec.structs.replace(self.disk, path=path)
        return msgspec.structs.replace(mine, model=each.model, cluster=cluster, router=router, disk=disk)

    def worker(self, role: WorkerRole) -> PrefillConfig | DecodeConfig:
        """The section of that role's workers."""
        return self.decode if role == "decode" else self.prefill

    def ranks_of(self, role: WorkerRole) -> int:
        """The processes that share the model of a worker of that role."""
        return self.stages_of(role) * self.stage_ranks_of(role)

    def stages_of(self, role: WorkerRole) -> int:
        """The stages of a worker of that role, each of which has some layers."""
        return self.worker(role).pipeline_parallel_size or self.model.pipeline_parallel_size

    def stage_ranks_of(self, role: WorkerRole) -> int:
        """The ranks that share the heads of a stage."""
        return self.worker(role).tensor_parallel_size or self.model.tensor_parallel_size

    @property
    def draft_cache_bytes(self) -> int:
        """What the pages of a decode worker's draft model take at most."""
        return self.decode.kv_cache_bytes.on_cpu // DRAFT_SHARE if self.model.draft_model else 0

    def device_of(self, role: WorkerRole) -> str:
        """The torch device of that role's workers; it may be "auto"."""
        return self.worker(role).device or self.model.device

    @property
    def batch_folder(self) -> Path | None:
        """The folder of clients' files and batches; None if none is named and this user has no home."""
        if self.api.batch_dir:
            return Path(self.api.batch_dir).expanduser()
        with contextlib.suppress(ConfigError):
            return self.cluster.state_dir / "batches"
        return None

    @property
    def api_keys_path(self) -> Path | None:
        """The file with the clients' API keys; None if none is named and this user has no home."""
        if self.api.keys_file:
            return Path(self.api.keys_file).expanduser()
        with contextlib.suppress(ConfigError):
            return self.cluster.state_dir / "api-keys.json"
        return None


def load(
    path: Path | None = None, overrides: Mapping[str, object] | None = None, further: Iterable[str] = ()
) -> Config:
    """Read `path` (none: defaults) and lay `overrides` ("section.setting" → value) over it. `further`: paths of models
    beside those of the file, with the first one's number of workers, and its settings but names, adapters, draft model
    and heads. Raises ConfigError."""
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read(path)
    for dotted, value in (overrides or {}).items():
        section, _, setting = dotted.partition(".")
        if not setting:
            raise ConfigError(f"{dotted!r} names no setting; write section.setting, such as router.grpc_port")
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{section} is {inner!r}; it must be a section with settings in it")
        inner[setting] = value
    return _converted(tree, path, further)


def _converted(tree: dict[str, Any], path: Path | None, further: Iterable[str] = ()) -> Config:
    match tree:
        case {"model": {"speculative_config": {"method": str(method)}}}:
            _check_method(method)  # others have fields of their own
        case _:
            pass
    try:
        config = msgspec.convert(tree, Config, dec_hook=decode_size)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'configuration'}: {error}") from None
    config = _beside(_with_normal_hosts(config), further)
    _check(config)
    return config


def _with_normal_hosts(config: Config) -> Config:
    """Return it with router.host and api.host as all code takes them; brackets are accepted. Raises ConfigError."""
    for setting, host in (("router.host", config.router.host), ("api.host", config.api.host)):
        if why := hosts.problem(host):
            raise ConfigError(f"{setting}: {why}")
    router = msgspec.structs.replace(config.router, host=hosts.normal(config.router.host))
    api = msgspec.structs.replace(config.api, host=hosts.normal(config.api.host))
    return msgspec.structs.replace(config, router=router, api=api)


def _beside(config: Config, paths: Iterable[str]) -> Config:
    kind = "auto" if config.model.speculation in ("draft", "heads", "vllm") else config.model.speculation
    plain = msgspec.structs.replace(
        config.model, served_model_name="", lora_modules={}, draft_model="", speculation_heads="",
        speculative_config=None, speculation=kind,
    )  # fmt: skip
    more = [
        FurtherModel(
            model=msgspec.structs.replace(plain, path=path),
            prefill=config.cluster.prefill,
            decode=config.cluster.decode,
        )
        for path in paths
    ]
    return msgspec.structs.replace(config, models=(*config.models, *more))


def dump(config: Config) -> str:
    """The configuration as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(msgspec.to_builtins(config, enc_hook=encode_size), sort_keys=False)


def parse_override(text: str) -> tuple[str, object]:
    """`section.setting=value` from a command line, the value read as YAML. Raises ConfigError."""
    dotted, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is no setting; write section.setting=value")
    try:
        return dotted.strip(), _parsed(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {dotted} is not YAML: {error}") from None


class _SingleKeys(yaml.SafeLoader):
    """Refuses a section or a setting that comes twice. PyYAML would take the last one and say nothing. What a merge
    (`<<`) brings is not looked at: it is there to be overridden."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value} comes twice; write it once")
            names.add(str(key.value))
        return node


def _parsed(text: str | bytes) -> Any:
    """Return a text as YAML. Raises YAMLError."""
    try:
        return _SingleKeys(text).get_single_data()
    except (RecursionError, ValueError, LookupError, AttributeError) as error:  # a date or a number that is none
        raise yaml.YAMLError(str(error)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = _parsed(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; it must hold sections with settings")
    return tree


def _origin(text: str) -> str:
    """The origin of a URL; "": it is none."""
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc}".lower() if parts.scheme and parts.netloc and "@" not in text else ""


def _check(config: Config) -> None:
    cluster = config.cluster
    roles: tuple[WorkerRole, ...] = ("prefill", "decode")
    for role in roles:
        if (ranks := config.ranks_of(role)) > MAX_RANKS:
            raise ConfigError(
                f"a {role} worker has {ranks} ranks, tensor_parallel_size times pipeline_parallel_size, and may have "
                f"{MAX_RANKS}; lower one of them"
            )
    if cluster.heartbeat_timeout_ms < 4 * cluster.heartbeat_ms:
        raise ConfigError(
            f"cluster.heartbeat_timeout_ms is {cluster.heartbeat_timeout_ms}, less than "
            f"four heartbeats of {cluster.heartbeat_ms} ms: one lost message would look like a death; raise it, or "
            "lower cluster.heartbeat_ms"
        )
    _check_models(config)
    _check_cascades(config)
    operator = parse_operator(config.router.operator)
    tls = config.tls
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ConfigError("tls.cert_file and tls.key_file belong together; set both, or none")
    if tls.client_ca_file and not tls.cert_file:
        raise ConfigError("tls.client_ca_file is set without tls.cert_file; clients show certificates over TLS alone")
    if not (tls.cert_file or config.api.insecure or is_loopback(config.api.host)):
        raise ConfigError(
            f"api.host is {config.api.host}, which other machines reach, and there is no TLS; set tls.cert_file and "
            "tls.key_file, keep it on loopback behind your proxy, or say --insecure (api.insecure)"
        )
    for origin in config.api.allowed_origins:
        if origin not in ("*", "null") and (not origin or origin != _origin(origin)):
            raise ConfigError(
                f"api.allowed_origins has {origin!r}; write an origin as a browser does, in lower case and "
                "without a path, such as https://chat.example or http://localhost:3000, or *"
            )
    for host in config.api.allowed_hosts:
        if host != "*" and (not host or "/" in host or host != host_of_header(host)):
            raise ConfigError(f"api.allowed_hosts has {host!r}; write a host in lower case without a port, or *")
    if config.tracing.endpoint and urlsplit(config.tracing.endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"tracing.endpoint is {config.tracing.endpoint!r}; it must be a URL, such as http://localhost:4318"
        )
    ports = (config.router.grpc_port, config.router.internal_port, config.router.http_port, config.api.port)
    ports += tuple(each.internal_port for each in config.models)
    fixed = [p for p in (*ports, operator.port if isinstance(operator, Loopback) else 0) if p]
    if len(fixed) != len(set(fixed)):
        raise ConfigError(f"router ports {fixed} must differ from each other")
    if config.prefill.max_num_batched_tokens < config.pages.page_size:
        raise ConfigError(
            f"prefill.max_num_batched_tokens is {config.prefill.max_num_batched_tokens}, below one page of "
            f"{config.pages.page_size} tokens"
        )


def _check_models(config: Config) -> None:
    names_so_far: set[str] = set()
    for model in config.all_models:
        if isinstance(model.served_model_name, tuple) and not all(model.served_model_name):
            raise ConfigError("model.served_model_name has an empty name; remove it")
        for name in model.lora_modules:
            if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
                raise ConfigError(f"model.lora_modules has {name!r}; a name has 1 to {MAX_NAME} printable characters")
            if name in model.served_names:
                raise ConfigError(f"model.lora_modules has {name!r}, which is a name of the model; give it another")
        if 0 < model.max_loras < len(model.lora_modules):
            raise ConfigError(
                f"model.max_loras is {model.max_loras}, and model.lora_modules names "
                f"{len(model.lora_modules)} adapters; raise it, or leave it out"
            )
        drafters = (
            ("draft_model", "draft", model.draft_model),
            ("speculation_heads", "heads", model.speculation_heads),
            ("speculative_config", "vllm", model.speculative_config),
        )
        for field, kind, value in drafters:
            if bool(value) != (model.speculation == kind) and model.speculation != "auto":
                raise ConfigError(
                    f"model.speculation is {model.speculation} and model.{field} {value!r}; "
                    f"name one if it is {kind} or auto, and none otherwise"
                )
        if len(named := [f"model.{field} is {value!r}" for field, _, value in drafters if value]) > 1:
            raise ConfigError(f"{' and '.join(named)}; name one of them")
        if draft := model.speculative_config:
            _check_method(draft.method)
            if draft.method in MTP_METHODS and draft.model:
                raise ConfigError(
                    f"model.speculative_config: {draft.method} is a layer of the model's checkpoint: leave out model"
                )
            if draft.method in DRAFT_METHODS and not draft.model:
                raise ConfigError("model.speculative_config names no model; name the draft's directory or hub id")
        names = {*model.served_names, *model.lora_modules}
        if clash := names_so_far & names:
            raise ConfigError(
                f"two models have the name {min(clash)!r}; set served_model_name of one of them to another"
            )
        names_so_far |= names


def _check_method(method: str) -> None:
    if method in (*DRAFT_METHODS, *MTP_METHODS):
        return
    advice = {
        "ngram": "set model.speculation to ngram instead",
        "mlp_speculator": "our own engine has such heads: set model.speculation_heads",
    }
    known = f"it must be one of {', '.join((*DRAFT_METHODS, MTP_METHODS[0]))}"
    raise ConfigError(f"model.speculative_config: method is {method!r}; {advice.get(method, known)}")


def _check_cascades(config: Config) -> None:
    models = config.all_models
    names = {name: model.served_name for model in models for name in model.served_names}
    reserved = {*names, *(name for model in models for name in model.lora_modules)}
    for name, cascade in config.cascades.items():
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name in reserved:
            raise ConfigError(
                f"cascades has {name!r}; a name has 1 to {MAX_NAME} printable characters and is no model's or adapter's"
            )
        for field in ("small", "large"):
            if (model := getattr(cascade, field)) not in names:
                known = ", ".join(map(repr, names))
                raise ConfigError(f"cascades.{name}.{field} is {model!r}, and the models are {known}; name one of them")
        if names[cascade.small] == names[cascade.large]:
            raise ConfigError(f"cascades.{name} has {cascade.small!r} as small and as large; name two models")
