"""The public contract's messages, made from what the router knows. Pure."""

from __future__ import annotations

from baton.messages import FinishReason, ModelCard, PromptTokenLogprob, Role, TokenLogprob
from baton.timeline import Timeline
from baton.v1 import cache_pb2, cluster_pb2, explain_pb2, generation_pb2
from router.events import Cancelled, Failed, Finished, Pinned, PinView, RequestOutcome, Summary
from router.frontend.output_stream import Output
from router.members import GoneReason
from router.placement.types import Candidate, PredictedTtft
from router.requests.explain import AttemptAccount, RequestRecord, reason
from router.state import ProcessView, RouterStats

_REASONS: dict[FinishReason, generation_pb2.FinishReason] = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}
_ROLES: dict[Role, cluster_pb2.Role] = {
    "router": cluster_pb2.ROLE_ROUTER,
    "prefill": cluster_pb2.ROLE_PREFILL,
    "decode": cluster_pb2.ROLE_DECODE,
    "store": cluster_pb2.ROLE_STORE,
}
_STATES: dict[GoneReason | None, cluster_pb2.ProcessState] = {
    None: cluster_pb2.PROCESS_STATE_LIVE,
    "silent": cluster_pb2.PROCESS_STATE_SILENT,
    "stuck": cluster_pb2.PROCESS_STATE_STUCK,
    "dead": cluster_pb2.PROCESS_STATE_DEAD,
    "rejected": cluster_pb2.PROCESS_STATE_SILENT,
    "replaced": cluster_pb2.PROCESS_STATE_SILENT,
}


def delta(output: Output, index: int = 0, fingerprint: str = "") -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        system_fingerprint=fingerprint,
        delta=generation_pb2.Delta(
            text=output.text,
            index=index,
            token_ids=output.tokens,
            logprobs=[_logprob(one) for one in output.logprobs],
            prompt_logprobs=[_logprob(one) for one in output.prompt_logprobs],
        ),
    )


def finished(
    reason: FinishReason,
    summary: Summary,
    request_id: str,
    seed: int,
    index: int = 0,
    stop_string: str | None = None,
    fingerprint: str = "",
) -> generation_pb2.GenerateResponse:
    usage, served = summary.usage, summary.served
    return generation_pb2.GenerateResponse(
        system_fingerprint=fingerprint,
        finished=generation_pb2.Finished(
            finish_reason=_REASONS[reason],
            usage=generation_pb2.Usage(
                prompt_tokens=usage.prompt, cached_tokens=usage.cached, completion_tokens=usage.completion
            ),
            timing=timing(summary),
            work=generation_pb2.Work(
                attempts=served.attempts,
                prefill_worker=served.prefill_worker,
                decode_workers=served.decode_workers,
                tokens_computed=served.tokens_computed,
                pages_hit=served.pages_hit,
                pages_shipped=served.pages_shipped,
                pages_on_device=served.pages_on_device,
                pages_fetched=served.pages_fetched,
            ),
            request_id=request_id,
            seed=seed,
            index=index,
            stop_string=stop_string,
        ),
    )


def timing(summary: Summary) -> generation_pb2.Timing:
    """Milliseconds since receipt of what happened; the rest stays unset."""
    line = summary.timeline
    return generation_pb2.Timing(
        submitted=(summary.submitted - line.received) * 1_000,
        placed=_since(line, "placed"),
        accepted=_since(line, "accepted"),
        prefilled=_since(line, "prefilled"),
        started=_since(line, "started"),
        first_token=_since(line, "first_token"),
        finished=_since(line, "ended"),
        prefill_queue=summary.served.prefill_queue_ms,
        prefill_compute=summary.served.prefill_compute_ms,
        load_predicted=summary.served.predicted_ms or None,
        load=summary.served.load_ms or None,
        prefill_sent=_since(line, "prefill_sent"),
    )


def process(view: ProcessView) -> cluster_pb2.Process:
    load = view.load
    return cluster_pb2.Process(
        name=view.peer.name,
        role=_ROLES[view.peer.role],
        node=view.peer.node,
        incarnation=view.peer.incarnation,
        pid=view.peer.pid,
        state=cluster_pb2.PROCESS_STATE_DRAINING if view.draining and not view.gone else _STATES[view.gone],
        load=cluster_pb2.Load(
            running=load.running,
            waiting=load.waiting,
            pages_free=load.pages_free,
            pages_total=load.pages_total,
            tokens_queued=load.tokens_queued,
        ),
        heartbeat_age_ms=view.heartbeat_age * 1_000,
        metrics_address=view.metrics,
        pages_known=view.pages_known,
        attempts=view.attempts,
        becoming=_ROLES[view.changing_to] if view.changing_to else cluster_pb2.ROLE_UNSPECIFIED,
        events_endpoint=view.events,
        replay_endpoint=view.replay,
        numerics=view.numerics,
    )


def bottleneck(stats: RouterStats) -> cluster_pb2.Bottleneck | None:
    now, advice = stats.utilization, stats.advice
    if now is None:
        return None
    if advice is None:
        return cluster_pb2.Bottleneck(prefill=now.prefill, decode=now.decode)
    return cluster_pb2.Bottleneck(
        prefill=now.prefill,
        decode=now.decode,
        advised=_ROLES[advice.role],
        prefill_then=advice.then.prefill,
        decode_then=advice.then.decode,
    )


def model_card(card: ModelCard) -> cluster_pb2.ModelCard:
    return cluster_pb2.ModelCard(
        digest=card.namespace.model,
        kv_dtype=card.namespace.kv_dtype,
        page_size=card.namespace.page_size,
        page_bytes=card.page_bytes,
        vocab_size=card.vocab_size,
        max_context=card.max_context,
        numerics=card.namespace.numerics,
    )


def counts(stats: RouterStats) -> cluster_pb2.Counts:
    return cluster_pb2.Counts(
        queued=stats.queued,
        running=stats.running,
        finished=sum(stats.finished.values()),
        failed=sum(stats.failed.values()),
        cancelled=stats.cancelled,
        attempts=stats.attempts,
        placed_split=stats.placed_split,
        placed_local=stats.placed_local,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
    )


def pin(view: PinView) -> cache_pb2.Pin:
    return cache_pb2.Pin(
        id=view.pin,
        tenant=view.tenant,
        node=view.node,
        tokens=view.tokens,
        pages=view.pages,
        bytes=view.bytes,
        expires_in_ms=int(view.left * 1_000),
    )


def pinned(kept: Pinned) -> cache_pb2.PinPrefixResponse:
    computed = kept.computed
    cached = None if computed is None else max(0, kept.view.tokens - computed)
    return cache_pb2.PinPrefixResponse(pin=pin(kept.view), tokens_computed=computed, tokens_cached=cached)


def request_summary(record: RequestRecord, now: float) -> explain_pb2.RequestSummary:
    account, line = record.account, record.timeline
    usage, last = account.usage, record.attempts[-1] if record.attempts else None
    return explain_pb2.RequestSummary(
        request_id=record.request_id,
        name=record.name,
        state=_request_state(record),
        outcome=_outcome(record.outcome),
        age_ms=(now - line.received) * 1_000,
        priority=record.priority,
        prompt_tokens=usage.prompt,
        cached_tokens=None if line.first_token is None else usage.cached,
        completion_tokens=usage.completion,
        ttft_ms=_ms(line.ttft),
        tpot_ms=_ms(line.tpot(usage.completion)),
        e2e_ms=_since(line, "ended"),
        attempts=record.attempts_begun,
        decode_worker=last.decode if last else "",
        prefill_worker=last.prefill if last else "",
        waits_because=record.waits,
        tenant=record.tenant,
    )


def explained(record: RequestRecord, now: float) -> explain_pb2.ExplainResponse:
    candidates, omitted = record.candidates()
    return explain_pb2.ExplainResponse(
        request=request_summary(record, now),
        candidates=[_candidate(one, chosen=False) for one in candidates],
        candidates_omitted=omitted,
        attempts=[_attempt(record, account) for account in record.attempts],
        attempts_omitted=record.attempts_begun - len(record.attempts),
    )


def _attempt(record: RequestRecord, account: AttemptAccount) -> explain_pb2.ExplainedAttempt:
    candidates, omitted = account.candidates()
    line, first, placed = account.timeline, account.first_token, account.timeline.placed
    return explain_pb2.ExplainedAttempt(
        number=account.number,
        decode_worker=account.decode,
        prefill_worker=account.prefill,
        why=reason(account, candidates),
        candidates=[_candidate(one, chosen=account.chose(one)) for one in candidates],
        candidates_omitted=omitted,
        predicted=explain_pb2.Outlook(
            cached_tokens=account.cached,
            ttft_ms=_ms(account.predicted_ttft),
            tpot_ms=_ms(account.placement.tpot or None),
            start_ms=_ms(account.placement.predicted.total),
        ),
        actual=explain_pb2.Outlook(
            cached_tokens=account.actually_cached,
            ttft_ms=None if first is None or account.resumes else (first - line.received) * 1_000,
            tpot_ms=_ms(line.tpot(record.account.usage.completion)) if not account.resumes else None,
            start_ms=None if first is None or placed is None else (first - placed) * 1_000,
        ),
        hops=explain_pb2.Hops(
            placed=_since(line, "placed"),
            accepted=_since(line, "accepted"),
            prefill_sent=_since(line, "prefill_sent"),
            prefilled=_since(line, "prefilled"),
            started=_since(line, "started"),
            first_token=None if first is None else (first - line.received) * 1_000,
            ended=None if account.ended is None else (account.ended - line.received) * 1_000,
        ),
        notes=account.notes,
        ended_because=account.end_reason,
    )


def _candidate(candidate: Candidate, *, chosen: bool) -> explain_pb2.ExplainedCandidate:
    return explain_pb2.ExplainedCandidate(
        decode_worker=candidate.decode,
        prefill_worker=candidate.prefill,
        chosen=chosen,
        infeasible=candidate.why_not,
        cached_tokens=candidate.cached,
        cost=_cost(candidate.predicted),
    )


def _cost(predicted: PredictedTtft) -> explain_pb2.CostTerms:
    return explain_pb2.CostTerms(
        total_ms=predicted.total * 1_000,
        queue_ms=predicted.queue * 1_000,
        load_ms=predicted.load * 1_000,
        compute_ms=predicted.compute * 1_000,
        transfer_ms=predicted.transfer * 1_000,
        wait_ms=predicted.wait * 1_000,
        step_ms=predicted.step * 1_000,
        delay_ms=predicted.delay * 1_000,
    )


def _request_state(record: RequestRecord) -> explain_pb2.RequestState:
    match record.outcome:
        case Finished():
            return explain_pb2.REQUEST_STATE_FINISHED
        case Failed():
            return explain_pb2.REQUEST_STATE_FAILED
        case Cancelled():
            return explain_pb2.REQUEST_STATE_CANCELLED
        case None:
            return explain_pb2.REQUEST_STATE_RUNNING if record.running else explain_pb2.REQUEST_STATE_QUEUED


def _outcome(outcome: RequestOutcome | None) -> str:
    match outcome:
        case Finished(reason=reason):
            return reason
        case Failed(error=error):
            return f"{error.reason}: {error}"
        case Cancelled(why=why):
            return why
        case None:
            return ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1_000


def _since(line: Timeline, instant: str) -> float | None:
    return _ms(line.between("received", instant))


def _logprob(one: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=one.token,
        logprob=one.logprob,
        rank=one.rank if isinstance(one, PromptTokenLogprob) else 0,
        top=[generation_pb2.Alternative(token_id=token, logprob=logprob) for token, logprob in one.top],
    )
