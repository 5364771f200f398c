"""The structs of the operator's API, made from what the router knows. Pure."""

# pyright: strict

from __future__ import annotations

from msgspec import structs

from baton import operator_api as api
from baton.timeline import Timeline
from router.events import Cancelled, Failed, Finished
from router.placement.types import Candidate
from router.requests.explain import AttemptAccount, RequestRecord, reason
from router.views import ProcessView, RouterStats

_MOST_SHARE = 99.0  # of a capacity. Without workers it is infinitely used, which JSON can't say.
_MOST_SECONDS = 1e9  # of a predicted cost, for the same reason


def process(view: ProcessView) -> api.Process:
    return api.Process(
        name=view.peer.name,
        role=view.peer.role,
        node=view.peer.node,
        incarnation=view.peer.incarnation,
        pid=view.peer.pid,
        state=view.gone or ("draining" if view.draining else "live"),
        load=structs.replace(view.load, steps=view.load.steps[-1:]),
        heartbeat_age_ms=max(0.0, view.heartbeat_age) * 1_000,
        metrics_address=view.metrics,
        pages_known=view.pages_known,
        attempts=view.attempts,
        becoming=view.changing_to or "",
        events_endpoint=view.events,
        replay_endpoint=view.replay,
        numerics=view.numerics,
    )


def bottleneck(stats: RouterStats) -> api.Bottleneck | None:
    now, advice = stats.utilization, stats.advice
    if now is None:
        return None
    prefill, decode = _share(now.prefill), _share(now.decode)
    if advice is None:
        return api.Bottleneck(prefill, decode)
    return api.Bottleneck(prefill, decode, advice.role, _share(advice.then.prefill), _share(advice.then.decode))


def counts(stats: RouterStats) -> api.Counts:
    counts = stats.counts
    return api.Counts(
        queued=stats.queued,
        running=stats.running,
        finished=sum(counts.finished.values()),
        failed=sum(counts.failed.values()),
        cancelled=counts.cancelled,
        attempts=counts.attempts,
        placed_split=counts.split,
        placed_local=counts.local,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
    )


def request_summary(record: RequestRecord, now: float) -> api.RequestSummary:
    line, usage = record.timeline, record.account.usage
    last = record.attempts[-1] if record.attempts else None
    state, outcome = _course(record)
    return api.RequestSummary(
        request_id=record.request_id,
        name=record.name,
        state=state,
        outcome=outcome,
        age_ms=(now - line.received) * 1_000,
        priority=record.priority,
        prompt_tokens=usage.prompt,
        cached_tokens=None if line.first_token is None else usage.cached,
        completion_tokens=usage.completion,
        ttft_ms=ms(line.ttft),
        tpot_ms=ms(line.tpot(usage.completion)),
        e2e_ms=ms(line.between("received", "ended")),
        attempts=record.attempts_begun,
        decode_worker=last.decode if last else "",
        prefill_worker=last.prefill if last else "",
        waits_because=record.waits,
        tenant=record.tenant,
        session=record.session,
        not_cached=_not_cached(record),
        cascade=record.cascade,
    )


def _not_cached(record: RequestRecord) -> api.NotCached | None:
    if (why := record.account.not_cached) is None:
        return None
    return api.NotCached(
        reason=why.reason,
        page=why.page,
        token=why.token,
        tokens={**why.tokens},
        tier=why.tier or "",
        evicted_ms=None if why.evicted is None else (record.timeline.received - why.evicted) * 1_000,
        other_request=why.other,
    )


def explanation(record: RequestRecord, now: float) -> api.Explanation:
    candidates, omitted = record.candidates()
    return api.Explanation(
        request=request_summary(record, now),
        attempts=[_attempt(record, account) for account in record.attempts],
        attempts_omitted=record.attempts_begun - len(record.attempts),
        candidates=[_candidate(one, chosen=False) for one in candidates],
        candidates_omitted=omitted,
    )


def _attempt(record: RequestRecord, account: AttemptAccount) -> api.ExplainedAttempt:
    candidates, omitted = account.candidates()
    line, first, placed = account.timeline, account.first_token, account.timeline.placed
    own = {
        "first_token": None if first is None else first - line.received,
        "ended": None if account.ended is None else account.ended - line.received,
    }
    return api.ExplainedAttempt(
        number=account.number,
        decode_worker=account.decode,
        prefill_worker=account.prefill,
        why=reason(account, candidates),
        candidates=[_candidate(one, chosen=account.chose(one)) for one in candidates],
        candidates_omitted=omitted,
        predicted=api.Outlook(
            cached_tokens=account.cached,
            ttft_ms=ms(account.predicted_ttft),
            tpot_ms=ms(account.placement.tpot or None),
            start_ms=ms(account.placement.predicted.total),
        ),
        actual=api.Outlook(
            cached_tokens=account.actually_cached,
            ttft_ms=None if first is None or account.resumes else (first - line.received) * 1_000,
            tpot_ms=ms(line.tpot(record.account.usage.completion)) if not account.resumes else None,
            start_ms=None if first is None or placed is None else (first - placed) * 1_000,
        ),
        hops=hops(line, own),
        notes=account.notes,
        ended_because=account.end_reason,
        proposals_verified=account.verified,
        proposals_accepted=account.accepted,
        speculation_saved_ms=account.saved * 1_000,
    )


def hops(line: Timeline, own: dict[str, float | None] | None = None) -> dict[str, float]:
    """Return milliseconds from receipt to each instant that was reached. `own`: seconds to instants of an attempt,
    where those in the line are the request's."""
    seconds = line.hops() | (own or {})
    return {hop: after * 1_000 for hop, after in seconds.items() if after is not None}


def _candidate(candidate: Candidate, *, chosen: bool) -> api.ExplainedCandidate:
    cost = candidate.predicted
    terms = (cost.total, cost.queue, cost.load, cost.compute, cost.transfer, cost.wait, cost.step, cost.delay)
    return api.ExplainedCandidate(
        decode_worker=candidate.decode,
        prefill_worker=candidate.prefill,
        chosen=chosen,
        infeasible=candidate.why_not,
        cached_tokens=candidate.cached,
        cost=api.CostTerms(*(min(term, _MOST_SECONDS) * 1_000 for term in terms)),
    )


def _course(record: RequestRecord) -> tuple[api.RequestState, str]:
    """Return a request's state, and why it ended."""
    match record.outcome:
        case Finished(reason=reason):
            return "finished", reason
        case Failed(error=error):
            return "failed", f"{error.reason}: {error}"
        case Cancelled(why=why):
            return "cancelled", why
        case None:
            return "running" if record.running else "queued", ""


def _share(used: float) -> float:
    return min(used, _MOST_SHARE)


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1_000
