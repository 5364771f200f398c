"""A router's statistics as Prometheus reads them. Pure: what is counted, and what it means, is the state's to say.

A counter that appears with its first event is not seen to rise, because Prometheus takes its first value as the one
before. So whatever has a known set of labels is told with zeros from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypeVar, get_args

from baton.errors import (
    AttemptsExhausted,
    BatonError,
    ContextTooLong,
    DeadlineExpired,
    InvalidGrammar,
    InvalidRequest,
    NonFiniteLogits,
    ObjectiveUnreachable,
    Overloaded,
    RateLimited,
    RequestCancelled,
    Unavailable,
)
from baton.messages import FinishReason
from baton.samples import Labels, Sample
from router.members import GONE_REASONS
from router.not_cached import REASONS
from router.queueing.admission import REJECTIONS
from router.state import ProcessView, RouterStats

_ERRORS = (
    *(InvalidRequest, ContextTooLong, InvalidGrammar, Overloaded, ObjectiveUnreachable, RateLimited, DeadlineExpired),
    *(RequestCancelled, Unavailable, AttemptsExhausted, NonFiniteLogits, BatonError),
)  # those that end requests
_FINISHED: Mapping[Labels, float] = {(reason,): 0.0 for reason in get_args(FinishReason)}
_FAILED: Mapping[Labels, float] = {(error.reason,): 0.0 for error in _ERRORS}
_REJECTED: Mapping[Labels, float] = {(reason,): 0.0 for reason in REJECTIONS}
Name = TypeVar("Name", bound=str)
_NOT_CACHED: Mapping[Labels, float] = {(reason,): 0.0 for reason in REASONS}
_LOST: Mapping[Labels, float] = dict.fromkeys(product(("prefill", "decode", "store"), GONE_REASONS), 0.0)


def metric_samples(stats: RouterStats) -> Mapping[str, Sample]:
    """Every metric that `stats` tells of."""
    utilization, advice = stats.utilization, stats.advice
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.queued,
        "request_success": {**_FINISHED, **_by(stats.finished)},
        "request_errors": {**_FAILED, **_by(stats.failed), (RequestCancelled.reason,): _cancelled(stats)},
        "request_attempts": stats.attempts,
        "placements": {("split",): stats.placed_split, ("local",): stats.placed_local},
        "slo_requests": {
            (str(level), objective, str(met).lower()): count
            for (level, objective, met), count in stats.attainment.items()
        },
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generated_tokens,
        "prefix_cache_queries": stats.prompt_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "prefix_cache_ceiling": _by(stats.reuse_ceiling),
        "prompt_tokens_not_cached": {**_NOT_CACHED, **_by(stats.not_cached_tokens)},
        "prefix_map_pages": stats.kv_index.pages,
        "prefix_map_repairs": {("gap",): stats.kv_index.gaps, ("digest",): stats.kv_index.divergences},
        "requests_waiting": {
            **{(str(level),): 0.0 for level, _, _ in stats.attainment},
            **{(str(level),): float(count) for level, count in stats.waiting.items()},
        },
        "requests_rejected": {**_REJECTED, **_by(stats.rejected)},
        "prediction_error": {
            (kind, quantile): error
            for kind, score in stats.prediction_errors.items()
            for quantile, error in (("0.5", score.median), ("0.9", score.p90))
        },
        "tenant_tokens": stats.tenant_tokens,
        "pins": _by(stats.pins),
        "peers": {(role,): count for role, count in stats.live.items()},
        "worker_slowdown": _by(stats.slowdowns),
        "attempts_moved": stats.moved,
        "peers_lost": {**_LOST, **stats.lost},
        "predicted_utilization": {}
        if utilization is None
        else {("prefill",): utilization.prefill, ("decode",): utilization.decode},
        "role_advised": {(role,): float(advice is not None and advice.role == role) for role in ("prefill", "decode")},
    }


def heartbeat_age(processes: Sequence[ProcessView]) -> Mapping[Labels, float]:
    """Of the live process of each role that has been silent longest, seconds."""
    oldest: dict[Labels, float] = {}
    for view in processes:
        if view.gone is None:
            role = (view.peer.role,)
            oldest[role] = max(oldest.get(role, 0.0), view.heartbeat_age)
    return oldest


def _by(counts: Mapping[Name, float]) -> Mapping[Labels, float]:
    return {(label,): count for label, count in counts.items()}


def _cancelled(stats: RouterStats) -> float:
    return stats.cancelled + stats.failed.get(RequestCancelled.reason, 0)
