"""The answer to a gRPC call: it streams a request's output, and turns every error into a status.

Owns nothing but one call's conversation. Errors leave through one seam, `status_of` and `abort`: a `BatonError` becomes
the status it names; anything else is our own mistake, is logged, and shows the client no more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import grpc

from baton.errors import BatonError, Overloaded, RequestCancelled, shown
from baton.futures import looked_at
from baton.logs import RequestLog
from baton.messages import FinishReason, PromptTokenLogprob, TokenLogprob
from baton.v1 import generation_pb2
from router.events import RequestEnded, Summary
from router.frontend.generation import Generation, GenerationService, message_fields, name_of
from router.frontend.grpc_api.message_guard import connected
from router.frontend.output_stream import Output, ReadableStream, merged

log = logging.getLogger(__name__)

REASON = "baton-reason"
RETRY_AFTER = "retry-after-ms"
REQUEST_ID = "x-request-id"
LINGER = 15.0  # seconds after a request's end in which its client must read something, or its RPC is ended
_MAX_DETAILS = 1_000  # characters of an error: gRPC's clients take 16 KiB of headers, and one may become 12 bytes
_LAST_WORDS = 1.0  # seconds that gRPC gets to pass on why
_REASONS: dict[FinishReason, generation_pb2.FinishReason] = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}
_WORK = generation_pb2.Work.DESCRIPTOR.fields_by_name  # each has the name of one of `ServingAccount`'s


def status_of(error: BatonError) -> tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]:
    """The status and trailing metadata that a client gets for an error."""
    metadata = [(REASON, error.reason)]
    if isinstance(error, Overloaded):
        metadata.append((RETRY_AFTER, str(error.retry_after_ms)))
    return grpc.StatusCode[error.status], tuple(metadata)


class GenerateCall:
    """One call that generates: from its request to the last message, or to the error that it ends in."""

    def __init__(
        self, service: GenerationService, request: generation_pb2.GenerateRequest, context: Any, linger: float = LINGER
    ) -> None:
        self._service = service
        self._request = request
        self._generations: Sequence[Generation] = ()
        self._context = context
        self._linger = linger
        self._received = service.clock.now()
        self._request_id = ""

    async def serve(self) -> None:
        """Answer. A call that ends early, however it ends, cancels the request."""
        context, request_id = self._context, ""
        left = context.time_remaining()
        deadline = None if left is None else self._received + left
        try:
            request_id = self._request_id = name_of(self._request)
            with connected():
                await context.send_initial_metadata(((REQUEST_ID, request_id),))
            self._service = self._service.of(self._request.model)
            self._generations = await self._service.start(
                request_id, self._received, self._request.ByteSize(), partial(message_fields, self._request), deadline
            )
            streams = [generation.stream for generation in self._generations]
            if not await self._pass_on(streams):
                await self._give_up(streams)
        except BatonError as error:
            await abort(context, error, request_id)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 whatever it is, the client gets a status and never a traceback
            RequestLog(log, request_id).exception("failed in the router")
            await abort(context, BatonError("internal error; the router's log says more"), request_id)
        finally:
            for generation in self._generations:
                generation.close()

    async def _pass_on(self, streams: Sequence[ReadableStream]) -> bool:
        """Write what comes, as fast as the client reads, until all is written (true), or until the request has ended
        and the client reads nothing more of it. Raises BatonError when the request ends in one."""
        writing = asyncio.create_task(self._write_out(streams))
        writing.add_done_callback(looked_at)
        before: list[int] | None = None
        try:
            while not writing.done():
                await asyncio.wait({writing}, timeout=self._linger)
                now = [stream.reads for stream in streams] if all(stream.ended for stream in streams) else None
                if not writing.done() and now is not None and now == before:
                    return False
                before = now
        except asyncio.CancelledError:
            writing.cancel()
            raise
        writing.result()
        return True

    async def _write_out(self, streams: Sequence[ReadableStream]) -> None:
        """Write what comes of a request. Raises BatonError when it ends in one."""
        with connected():
            async with contextlib.aclosing(merged(streams)) as outputs:
                async for index, news in outputs:
                    ended = isinstance(news, RequestEnded)
                    await self._context.write(self._last(news, index) if ended else self._piece(news, index))

    def _piece(self, output: Output, index: int) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(
            system_fingerprint=self._service.fingerprint(self._request.model),
            delta=generation_pb2.Delta(
                text=output.text,
                index=index,
                token_ids=output.tokens,
                logprobs=[_logprob(one) for one in output.logprobs],
                prompt_logprobs=[_logprob(one) for one in output.prompt_logprobs],
            ),
        )

    def _last(self, end: RequestEnded, index: int) -> generation_pb2.GenerateResponse:
        """Return the last message of an output. Raises BatonError where it ended in one."""
        reason, generation = end.finish_reason(), self._generations[index]
        usage, served = end.summary.usage, end.summary.served
        return generation_pb2.GenerateResponse(
            system_fingerprint=self._service.fingerprint(self._request.model),
            finished=generation_pb2.Finished(
                finish_reason=_REASONS[reason],
                usage=generation_pb2.Usage(
                    prompt_tokens=usage.prompt, cached_tokens=usage.cached, completion_tokens=usage.completion
                ),
                timing=_timing(end.summary),
                work=generation_pb2.Work(**{name: getattr(served, name) for name in _WORK}),
                request_id=self._request_id,
                seed=generation.request.sampling.seed,
                index=index,
                stop_string=generation.stream.stop_string,
            ),
        )

    async def _give_up(self, streams: Sequence[ReadableStream]) -> None:
        """End an RPC whose client does not read. Neither the write nor the status that waits behind it is cancelled:
        gRPC still holds them. They end when the client reads, or has gone, and cost no more than a piece until then."""
        for stream in streams:
            stream.abandon()
        error = RequestCancelled(f"the client has read nothing for {self._linger:g} s after its request's end")
        aborting = asyncio.create_task(abort(self._context, error, self._request_id))
        aborting.add_done_callback(looked_at)
        await asyncio.wait({aborting}, timeout=_LAST_WORDS)


async def abort(context: Any, error: BatonError, request_id: str = "") -> NoReturn:
    """End a call with an error's status. The details name the request."""
    code, metadata = status_of(error)
    details = shown(str(error), _MAX_DETAILS)
    named = f"{details} (request {request_id})" if request_id else details
    with connected():
        await context.abort(code, named, metadata)
    raise AssertionError("abort returned")


def _timing(summary: Summary) -> generation_pb2.Timing:
    """Milliseconds since receipt of what happened; the rest stays unset."""
    line, served = summary.timeline, summary.served
    hops = {hop: seconds * 1_000 for hop, seconds in line.hops().items()}
    return generation_pb2.Timing(
        submitted=(summary.submitted - line.received) * 1_000,
        finished=hops.pop("ended", None),
        prefill_queue=served.prefill_queue_ms,
        prefill_compute=served.prefill_compute_ms,
        load_predicted=served.predicted_ms or None,
        load=served.load_ms or None,
        **hops,
    )


def _logprob(one: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=one.token,
        logprob=one.logprob,
        rank=one.rank if isinstance(one, PromptTokenLogprob) else 0,
        top=[generation_pb2.Alternative(token_id=token, logprob=logprob) for token, logprob in one.top],
    )
