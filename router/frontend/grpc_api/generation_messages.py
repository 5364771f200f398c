"""The messages of a `Generation` stream, made from a request's output. Pure."""

from __future__ import annotations

from baton.messages import FinishReason, PromptTokenLogprob, TokenLogprob
from baton.timeline import Timeline
from baton.v1 import generation_pb2
from router.events import Summary
from router.frontend.output_stream import Output

_REASONS: dict[FinishReason, generation_pb2.FinishReason] = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
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


def _since(line: Timeline, instant: str) -> float | None:
    seconds = line.between("received", instant)
    return None if seconds is None else seconds * 1_000


def _logprob(one: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=one.token,
        logprob=one.logprob,
        rank=one.rank if isinstance(one, PromptTokenLogprob) else 0,
        top=[generation_pb2.Alternative(token_id=token, logprob=logprob) for token, logprob in one.top],
    )
