"""What a router's state shows to metrics, the dashboard and operators: snapshots. The state itself knows no metrics."""

# pyright: strict

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.messages import LoadReport, Peer, Role, WorkerRole
from router.members import GoneReason
from router.placement.kv_index import KvIndexStats
from router.placement.prediction_error import PredictionError, PredictionKind
from router.placement.utilization import PoolUtilization, RoleAdvice
from router.requests.counts import RequestCounts
from router.requests.slo_attainment import Objective


@dataclass(frozen=True)
class ProcessView:
    """One process, as the router sees it."""

    peer: Peer
    load: LoadReport
    gone: GoneReason | None
    heartbeat_age: float  # seconds
    metrics: str  # host:port
    pages_known: int
    events: str = ""  # ZMQ endpoint of its KV events
    replay: str = ""  # the socket that sends missed batches again
    draining: bool = False  # it is given nothing new
    attempts: int = 0  # that it was given and that have not ended
    changing_to: WorkerRole | None = None  # once it is empty
    numerics: str = ""  # class of a worker's arithmetic


@dataclass(frozen=True)
class RouterStats:
    """Counts since the start, and the present size of things."""

    queued: int
    running: int
    live: Mapping[Role, int]
    lost: Mapping[tuple[Role, GoneReason], int]  # processes that went
    counts: RequestCounts  # a copy
    slowdowns: Mapping[str, float]  # of live workers, by name: see `router.placement.slowness`
    attainment: Mapping[tuple[int, Objective, bool], int]  # requests by level of priority and whether they met it
    reuse_ceiling: Mapping[str, float]  # by window
    kv_index: KvIndexStats
    pins: Mapping[str, int]  # prefixes that are kept pinned, or are to be, by phase
    waiting: Mapping[int, int]  # in the queue, by level of priority
    running_adapters: Sequence[str]  # names of the LoRA adapters of requests that run, in order,
    waiting_adapters: Sequence[str]  # and of those in the queue
    rejected: Mapping[str, int]  # requests that no worker had begun, by reason
    tenant_tokens: Mapping[tuple[str, str], int]  # by tenant (a bounded number) and kind
    prediction_errors: Mapping[PredictionKind, PredictionError]  # of predictions
    utilization: PoolUtilization | None  # of prefill and decode workers; none: not known yet
    advice: RoleAdvice | None  # another role for one of them
