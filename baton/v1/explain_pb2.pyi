from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_FAILED: RequestState
REQUEST_STATE_CANCELLED: RequestState

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request", "attempts", "attempts_omitted", "candidates", "candidates_omitted")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_OMITTED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_OMITTED_FIELD_NUMBER: _ClassVar[int]
    request: RequestSummary
    attempts: _containers.RepeatedCompositeFieldContainer[ExplainedAttempt]
    attempts_omitted: int
    candidates: _containers.RepeatedCompositeFieldContainer[ExplainedCandidate]
    candidates_omitted: int
    def __init__(self, request: _Optional[_Union[RequestSummary, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[ExplainedAttempt, _Mapping]]] = ..., attempts_omitted: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[ExplainedCandidate, _Mapping]]] = ..., candidates_omitted: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: int
    def __init__(self, last: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("request_id", "name", "state", "outcome", "age_ms", "priority", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms", "tpot_ms", "e2e_ms", "attempts", "decode_worker", "prefill_worker", "waits_because", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    WAITS_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    name: str
    state: RequestState
    outcome: str
    age_ms: float
    priority: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    attempts: int
    decode_worker: str
    prefill_worker: str
    waits_because: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., outcome: _Optional[str] = ..., age_ms: _Optional[float] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., attempts: _Optional[int] = ..., decode_worker: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., waits_because: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainedAttempt(_message.Message):
    __slots__ = ("number", "decode_worker", "prefill_worker", "why", "candidates", "candidates_omitted", "predicted", "actual", "hops", "notes", "ended_because")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_OMITTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    ENDED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    decode_worker: str
    prefill_worker: str
    why: str
    candidates: _containers.RepeatedCompositeFieldContainer[ExplainedCandidate]
    candidates_omitted: int
    predicted: Outlook
    actual: Outlook
    hops: Hops
    notes: _containers.RepeatedScalarFieldContainer[str]
    ended_because: str
    def __init__(self, number: _Optional[int] = ..., decode_worker: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., why: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[ExplainedCandidate, _Mapping]]] = ..., candidates_omitted: _Optional[int] = ..., predicted: _Optional[_Union[Outlook, _Mapping]] = ..., actual: _Optional[_Union[Outlook, _Mapping]] = ..., hops: _Optional[_Union[Hops, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., ended_because: _Optional[str] = ...) -> None: ...

class ExplainedCandidate(_message.Message):
    __slots__ = ("decode_worker", "prefill_worker", "chosen", "infeasible", "cached_tokens", "cost")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    INFEASIBLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    prefill_worker: str
    chosen: bool
    infeasible: str
    cached_tokens: int
    cost: CostTerms
    def __init__(self, decode_worker: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., chosen: _Optional[bool] = ..., infeasible: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., cost: _Optional[_Union[CostTerms, _Mapping]] = ...) -> None: ...

class Outlook(_message.Message):
    __slots__ = ("cached_tokens", "ttft_ms", "tpot_ms", "start_ms")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    ttft_ms: float
    tpot_ms: float
    start_ms: float
    def __init__(self, cached_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., start_ms: _Optional[float] = ...) -> None: ...

class CostTerms(_message.Message):
    __slots__ = ("total_ms", "queue_ms", "load_ms", "compute_ms", "transfer_ms", "wait_ms", "step_ms", "delay_ms")
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    total_ms: float
    queue_ms: float
    load_ms: float
    compute_ms: float
    transfer_ms: float
    wait_ms: float
    step_ms: float
    delay_ms: float
    def __init__(self, total_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ..., step_ms: _Optional[float] = ..., delay_ms: _Optional[float] = ...) -> None: ...

class Hops(_message.Message):
    __slots__ = ("placed", "accepted", "prefill_sent", "prefilled", "started", "first_token", "ended")
    PLACED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SENT_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    placed: float
    accepted: float
    prefill_sent: float
    prefilled: float
    started: float
    first_token: float
    ended: float
    def __init__(self, placed: _Optional[float] = ..., accepted: _Optional[float] = ..., prefill_sent: _Optional[float] = ..., prefilled: _Optional[float] = ..., started: _Optional[float] = ..., first_token: _Optional[float] = ..., ended: _Optional[float] = ...) -> None: ...
