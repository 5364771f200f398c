from baton.v1 import explain_pb2 as _explain_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_STORE: _ClassVar[Role]

class ProcessState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROCESS_STATE_UNSPECIFIED: _ClassVar[ProcessState]
    PROCESS_STATE_LIVE: _ClassVar[ProcessState]
    PROCESS_STATE_SILENT: _ClassVar[ProcessState]
    PROCESS_STATE_STUCK: _ClassVar[ProcessState]
    PROCESS_STATE_DEAD: _ClassVar[ProcessState]
    PROCESS_STATE_DRAINING: _ClassVar[ProcessState]
ROLE_UNSPECIFIED: Role
ROLE_ROUTER: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_STORE: Role
PROCESS_STATE_UNSPECIFIED: ProcessState
PROCESS_STATE_LIVE: ProcessState
PROCESS_STATE_SILENT: ProcessState
PROCESS_STATE_STUCK: ProcessState
PROCESS_STATE_DEAD: ProcessState
PROCESS_STATE_DRAINING: ProcessState

class SetRoleRequest(_message.Message):
    __slots__ = ("worker", "role", "patience_ms")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: Role
    patience_ms: int
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., patience_ms: _Optional[int] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Process
    def __init__(self, worker: _Optional[_Union[Process, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker", "now", "undo")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    worker: str
    now: bool
    undo: bool
    def __init__(self, worker: _Optional[str] = ..., now: _Optional[bool] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Process
    def __init__(self, worker: _Optional[_Union[Process, _Mapping]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("process", "steps", "stop")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    process: str
    steps: int
    stop: bool
    def __init__(self, process: _Optional[str] = ..., steps: _Optional[int] = ..., stop: _Optional[bool] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("path", "node", "steps")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    path: str
    node: str
    steps: int
    def __init__(self, path: _Optional[str] = ..., node: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("processes", "model", "log_dir", "counts", "cluster", "model_name", "bottleneck")
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOG_DIR_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    BOTTLENECK_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    model: ModelCard
    log_dir: str
    counts: Counts
    cluster: str
    model_name: str
    bottleneck: Bottleneck
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., log_dir: _Optional[str] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., cluster: _Optional[str] = ..., model_name: _Optional[str] = ..., bottleneck: _Optional[_Union[Bottleneck, _Mapping]] = ...) -> None: ...

class Bottleneck(_message.Message):
    __slots__ = ("prefill", "decode", "advised", "prefill_then", "decode_then")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_THEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_THEN_FIELD_NUMBER: _ClassVar[int]
    prefill: float
    decode: float
    advised: Role
    prefill_then: float
    decode_then: float
    def __init__(self, prefill: _Optional[float] = ..., decode: _Optional[float] = ..., advised: _Optional[_Union[Role, str]] = ..., prefill_then: _Optional[float] = ..., decode_then: _Optional[float] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("name", "role", "node", "incarnation", "pid", "state", "load", "heartbeat_age_ms", "metrics_address", "pages_known", "attempts", "becoming", "events_endpoint", "replay_endpoint", "numerics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGES_KNOWN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BECOMING_FIELD_NUMBER: _ClassVar[int]
    EVENTS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    node: str
    incarnation: str
    pid: int
    state: ProcessState
    load: Load
    heartbeat_age_ms: float
    metrics_address: str
    pages_known: int
    attempts: int
    becoming: Role
    events_endpoint: str
    replay_endpoint: str
    numerics: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[ProcessState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., heartbeat_age_ms: _Optional[float] = ..., metrics_address: _Optional[str] = ..., pages_known: _Optional[int] = ..., attempts: _Optional[int] = ..., becoming: _Optional[_Union[Role, str]] = ..., events_endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "pages_free", "pages_total", "tokens_queued")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    pages_free: int
    pages_total: int
    tokens_queued: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_total: _Optional[int] = ..., tokens_queued: _Optional[int] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("digest", "kv_dtype", "page_size", "page_bytes", "vocab_size", "max_context", "numerics")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    kv_dtype: str
    page_size: int
    page_bytes: int
    vocab_size: int
    max_context: int
    numerics: str
    def __init__(self, digest: _Optional[bytes] = ..., kv_dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., numerics: _Optional[str] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("queued", "running", "finished", "failed", "cancelled", "attempts", "placed_split", "placed_local", "prompt_tokens", "cached_tokens", "generated_tokens")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PLACED_SPLIT_FIELD_NUMBER: _ClassVar[int]
    PLACED_LOCAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queued: int
    running: int
    finished: int
    failed: int
    cancelled: int
    attempts: int
    placed_split: int
    placed_local: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    def __init__(self, queued: _Optional[int] = ..., running: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., attempts: _Optional[int] = ..., placed_split: _Optional[int] = ..., placed_local: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...
