"""The routes of the HTTP doors, as an ASGI application.

A request passes through here like this: read the body within its bounds, decode and check it, start one generation for
each sample, and send what comes of them. A client that goes away, or reads nothing after the end, cancels everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import baton
from baton.errors import (
    BatonError,
    BodyTimeout,
    InvalidRequest,
    ModelMismatch,
    Overloaded,
    PayloadTooLarge,
    RequestCancelled,
    shown,
)
from baton.logs import RequestLog
from baton.metrics import PAGE_TYPE
from router.events import Cancelled, Failed, Finished, RequestEnded
from router.frontend.api import errors, openapi
from router.frontend.api.answers import Answer, ChatCompletion, Completion, Sample, Wanted
from router.frontend.api.messages import Message, MessagesRequest, chat_of_messages
from router.frontend.api.parameters import affinity_of, generate_request, token_ids, truncated
from router.frontend.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
    decode,
    refuse_unserved,
    samples,
)
from router.frontend.api.responses import ModelResponse, ResponsesRequest, chat_of_response
from router.frontend.chat_template import TemplateRenderer, cut_at_mark, mark_end, normalized
from router.frontend.generation import Generation, GenerationService
from router.frontend.message_guard import looked_at
from router.frontend.output_stream import Output
from router.frontend.request_parsing import tokenized

log = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
ErrorBody: TypeAlias = Callable[[BatonError], dict[str, Any]]

LINGER = 15.0  # seconds after the end of a request in which its client must read something
_BODY_SECONDS = 30.0  # within which a body must have come
_OTHER_BYTES = 256 * 2**10  # of a body: everything but the prompt
_BYTES_PER_ID = 12  # of a token id as JSON
_BYTES_PER_BYTE = 6  # of text as JSON, where every character is escaped
_BODIES = 512 * 2**20  # bytes of all bodies that are being read or decoded
_MAX_SAMPLES = 2_048  # of one request: prompts times n
_QUICK = 64 * 2**10  # bytes of a body that is decoded on the event loop, in less than a millisecond
_DEFAULT_COMPLETION = 16  # tokens of a completion that sets no max_tokens, as OpenAI's API has it
_MAX_ID = 80
_EVENT_STREAM = "text/event-stream; charset=utf-8"
_JSON = "application/json"


class ClientGone(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True)
class _Order:
    """A checked request: its answer, and what to generate for it."""

    answer: Answer
    fields: GenerationFields
    max_tokens: int | None
    logprobs: int | None


class HttpApi:
    """The application. `app` is the ASGI callable."""

    def __init__(
        self,
        service: GenerationService,
        metrics_page: Callable[[], Awaitable[bytes]],
        *,
        trust_templates: bool = False,
        linger: float = LINGER,
    ) -> None:
        """`trust_templates`: requests may bring chat templates of their own."""
        self._service = service
        self._trust_templates = trust_templates
        self._metrics_page = metrics_page
        self._linger = linger
        model = service.model
        context = model.limits.max_context
        text = model.tokenizer.max_bytes(context) if model.tokenizer else 0
        self._max_body = _OTHER_BYTES + _BYTES_PER_ID * context + _BYTES_PER_BYTE * text
        self._bodies = 0
        self._started = int(time.time())
        self._fingerprint = f"baton-{baton.__version__}"
        self._templates = TemplateRenderer(max(text, 2**20))
        self._token_text = lru_cache(2**16)(self._text_of_token)
        get = partial(Route, methods=["GET"])
        post = partial(Route, methods=["POST"])
        self.app = Starlette(
            routes=[
                post("/v1/completions", self._guarded(self._completions)),
                post("/v1/chat/completions", self._guarded(self._chat_completions)),
                get("/v1/models", self._models),
                get("/v1/models/{model:path}", self._model),
                post("/v1/messages", self._guarded(self._messages, errors.anthropic_body)),
                post("/v1/responses", self._guarded(self._responses)),
                post("/tokenize", self._guarded(self._tokenize)),
                post("/detokenize", self._guarded(self._detokenize)),
                get("/version", self._version),
                get("/live", self._live),
                *(get(path, self._ready) for path in ("/health", "/ready", "/health/ready")),
                get("/metrics", self._metrics),
                get("/openapi.json", self._openapi),
            ],
            exception_handlers={HTTPException: _no_route},
        )

    async def close(self) -> None:
        """End what runs beside the application."""
        await self._templates.close()

    # --- generation --------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        received = self._service.clock.now()
        fields = await self._decoded(request, CompletionRequest)
        refuse_unserved(fields)
        self._check_model(fields.model)
        if fields.prompt is None:
            raise InvalidRequest("the request has no prompt; send a text, token ids, or a list of either")
        prompts = await self._prompts(fields)
        echo = None
        if fields.echo:
            if fields.logprobs is not None:
                raise InvalidRequest("echo with logprobs needs prompt_logprobs, which this server does not support yet")
            if len(prompts) > 1:
                raise InvalidRequest("echo is true for several prompts; send them one by one")
            echo = self._decode(prompts[0])
        wanted = self._wanted("cmpl-", request, fields, logprobs=fields.logprobs is not None, echo=echo)
        answer = Completion(wanted, _samples_of(prompts, samples(fields)))
        most = fields.max_tokens if fields.max_tokens is not None else _DEFAULT_COMPLETION
        return await self._answered(request, _Order(answer, fields, most, fields.logprobs), received)

    async def _chat_completions(self, request: Request) -> Response:
        received = self._service.clock.now()
        fields = await self._decoded(request, ChatCompletionRequest)
        return await self._chat(request, fields, received, "chatcmpl-", ChatCompletion)

    async def _messages(self, request: Request) -> Response:
        received = self._service.clock.now()
        asked = await self._decoded(request, MessagesRequest)
        return await self._chat(request, chat_of_messages(asked), received, "msg_", Message)

    async def _responses(self, request: Request) -> Response:
        received = self._service.clock.now()
        asked = await self._decoded(request, ResponsesRequest)
        answer = partial(ModelResponse, asked)
        return await self._chat(request, chat_of_response(asked), received, "resp_", answer)

    async def _chat(
        self,
        request: Request,
        fields: ChatCompletionRequest,
        received: float,
        prefix: str,
        kind: Callable[[Wanted, list[Sample]], Answer],
    ) -> Response:
        refuse_unserved(fields)
        self._check_model(fields.model)
        prompt = await self._chat_prompt(fields)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        if fields.top_logprobs and not fields.logprobs:
            raise InvalidRequest("top_logprobs is set and logprobs is not true; set both")
        echo = _last_text(fields) if fields.echo else None
        wanted = self._wanted(prefix, request, fields, logprobs=logprobs is not None, echo=echo)
        answer = kind(wanted, _samples_of([prompt], samples(fields)))
        most = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
        return await self._answered(request, _Order(answer, fields, most, logprobs), received)

    def _wanted(
        self, prefix: str, request: Request, fields: GenerationFields, *, logprobs: bool, echo: str | None
    ) -> Wanted:
        options = fields.stream_options
        return Wanted(
            id=f"{prefix}{_name_of(request, fields)}",
            model=self._service.model.name,
            created=int(time.time()),
            fingerprint=self._fingerprint,
            text_of=self._token_text,
            logprobs=logprobs,
            token_ids=bool(fields.return_token_ids),
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
            usage_at_end=bool(options and options.include_usage),
            usage_always=bool(options and options.continuous_usage_stats),
            echo=echo,
        )

    async def _answered(self, request: Request, order: _Order, received: float) -> Response:
        """Start the generations of a request. Raises BatonError if one of them is refused."""
        name, started = _name_of(request, order.fields), list[Generation]()
        answering = _Stream if order.fields.stream else _Whole
        affinity = affinity_of(order.fields.session_id, request.headers)
        with contextlib.ExitStack() as undo:
            for sample in order.answer.samples:
                number = sample.index % samples(order.fields)
                message = generate_request(
                    order.fields, sample.prompt, sample=number, max_tokens=order.max_tokens, logprobs=order.logprobs,
                    affinity=affinity,
                )  # fmt: skip
                started.append(await self._service.start(message, name, received))
                undo.callback(started[-1].close)
                await asyncio.sleep(0)  # many samples of a long prompt take a while: others get their turns
            undo.pop_all()  # the answer closes them
        return answering(order, started, self._linger, name)

    # --- prompts -----------------------------------------------------------------------------------------------------

    async def _prompts(self, fields: CompletionRequest) -> list[Sequence[int]]:
        """The tokens of each prompt. Raises InvalidRequest."""
        given = fields.prompt
        vocabulary = self._service.model.limits.vocab_size
        if isinstance(given, str):
            texts: list[Any] = [given]
        elif given and isinstance(given[0], int):
            texts = [given]
        else:
            texts = list(given or ())
        if not texts:
            raise InvalidRequest("the prompt is an empty list; send at least one prompt")
        if len(texts) > _MAX_SAMPLES:
            raise InvalidRequest(f"the request has {len(texts)} prompts; at most {_MAX_SAMPLES} are allowed")
        most, context = fields.truncate_prompt_tokens, self._service.model.limits.max_context
        prompts: list[Sequence[int]] = []
        for text in texts:
            if isinstance(text, str):
                prompt = await self._encode(text, special=fields.add_special_tokens is not False)
                prompts.append(truncated(prompt, most, context))
            elif isinstance(text, list):
                prompts.append(token_ids(truncated(text, most, context), vocabulary, context))
            else:
                raise InvalidRequest("the prompt mixes texts and token ids; send a list of one kind")
        return prompts

    async def _chat_prompt(self, fields: ChatCompletionRequest | TokenizeRequest) -> Sequence[int]:
        """The tokens of a chat, by the checkpoint's template or the request's own. Raises InvalidRequest."""
        model = self._service.model
        template = model.chat_template
        if fields.chat_template and not self._trust_templates:
            raise InvalidRequest(
                "the request has a chat_template, and this server renders the checkpoint's alone; leave chat_template "
                "out, or set api.trust_request_chat_template"
            )
        source = fields.chat_template or (template.source if template else None)
        if source is None:
            raise InvalidRequest(
                f"{model.name} has no chat template; send chat_template, or use /v1/completions with the whole prompt"
            )
        messages = normalized(fields.messages or ())
        continues = bool(fields.continue_final_message)
        generation = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
        if continues and generation:
            raise InvalidRequest("continue_final_message and add_generation_prompt are both true; choose one")
        variables: dict[str, Any] = {
            **(template.special_tokens if template else {}),
            "messages": messages,
            "tools": fields.tools or None,
            "documents": getattr(fields, "documents", None),
            "add_generation_prompt": generation,
            **(fields.chat_template_kwargs or {}),
        }
        if continues:
            mark_end(messages[-1])
        text = await self._templates.render(source, variables)
        if continues:
            text = cut_at_mark(text)
        prompt = await self._encode(text, special=bool(fields.add_special_tokens))
        most = fields.truncate_prompt_tokens if isinstance(fields, ChatCompletionRequest) else None
        return truncated(prompt, most, model.limits.max_context)

    async def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        model = self._service.model
        return await self._service.apart(len(text), partial(tokenized, text, model, special_tokens=special))

    def _decode(self, tokens: Sequence[int]) -> str:
        tokenizer = self._service.model.tokenizer
        return tokenizer.decode(tokens) if tokenizer else ""

    def _text_of_token(self, token: int) -> str:
        tokenizer = self._service.model.tokenizer
        return tokenizer.text_of(token) if tokenizer else f"token_id:{token}"

    # --- everything else ---------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        fields = await self._decoded(request, TokenizeRequest)
        self._check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("send either prompt or messages")
        if fields.prompt is not None:
            tokens = await self._encode(fields.prompt, special=fields.add_special_tokens is not False)
        else:
            tokens = await self._chat_prompt(fields)
        strings = [self._token_text(token) for token in tokens] if fields.return_token_strs else None
        limit = self._service.model.limits.max_context
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": list(tokens), "token_strs": strings})

    async def _detokenize(self, request: Request) -> Response:
        fields = await self._decoded(request, DetokenizeRequest)
        self._check_model(fields.model)
        model = self._service.model
        if model.tokenizer is None:
            raise InvalidRequest(f"{model.name} has no tokenizer.json, so there is no text")
        limits = model.limits
        tokens = token_ids(fields.tokens, limits.vocab_size, limits.max_context) if fields.tokens else []
        work = partial(model.tokenizer.decode, tokens, special_tokens=True)
        return _json({"prompt": await self._service.apart(4 * len(tokens), work)})

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["model"] != self._service.model.name:
            return _error(_mismatch(request.path_params["model"], self._service.model.name))
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.limits.max_context,
            "permission": [],
        }

    async def _version(self, request: Request) -> Response:
        return _json({"version": baton.__version__})

    async def _live(self, request: Request) -> Response:
        """Answering is the proof: it takes a turn of the loop."""
        return _json({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        if (reason := self._service.driver.unready) is None:
            return _json({"status": "ready"})
        return _json(errors.described(503, reason), 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._metrics_page(), media_type=None, headers={"content-type": PAGE_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return _json(openapi.document())

    def _check_model(self, asked: str | None) -> None:
        if asked and asked != self._service.model.name:
            raise _mismatch(asked, self._service.model.name)

    # --- bodies and errors -------------------------------------------------------------------------------------------

    async def _decoded(self, request: Request, kind: Any) -> Any:
        """Read and decode a body. Raises BatonError."""
        with self._reading() as count:
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    body = await self._body(request, count)
            except TimeoutError:
                raise BodyTimeout(f"the request's body did not come within {_BODY_SECONDS:g} s") from None
            work = partial(decode, body, kind)
            return work() if len(body) < _QUICK else await asyncio.to_thread(work)

    async def _body(self, request: Request, count: Callable[[int], None]) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body:
                raise PayloadTooLarge(f"the request's body has more than {self._max_body} bytes; send less")
            count(len(part))
            parts.append(part)
        return b"".join(parts)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body among those of all bodies."""
        mine = 0

        def count(size: int) -> None:
            nonlocal mine
            if self._bodies + size > _BODIES:
                raise Overloaded("too many large requests are being read; try again")
            mine += size
            self._bodies += size

        try:
            yield count
        finally:
            self._bodies -= mine

    def _guarded(self, endpoint: Endpoint, failed: ErrorBody = errors.body_of) -> Endpoint:
        """Turn errors into answers of the API's own shape."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            try:
                response = await endpoint(request)
            except BatonError as error:
                response = _error(error, failed)
            except asyncio.CancelledError:
                raise
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:  # noqa: BLE001 whatever it is, the client gets a status and never a traceback
                RequestLog(log, shown(given)).exception("failed in the router")
                response = _error(BatonError("internal error; the router's log says more"), failed)
            response.headers.setdefault("x-request-id", given or secrets.token_hex(8))
            return response

        return guarded


def _samples_of(prompts: Sequence[Sequence[int]], n: int) -> list[Sample]:
    if len(prompts) * n > _MAX_SAMPLES:
        raise InvalidRequest(f"{len(prompts)} prompts with n {n} are more than {_MAX_SAMPLES} outputs; send fewer")
    return [
        Sample(index=number * n + sample, prompt=prompt, first_of_prompt=sample == 0)
        for number, prompt in enumerate(prompts)
        for sample in range(n)
    ]


def _last_text(fields: ChatCompletionRequest) -> str:
    content = fields.messages[-1].get("content") if fields.messages else ""
    return content if isinstance(content, str) else ""


def _name_of(request: Request, fields: GenerationFields) -> str:
    """What a request is called in logs and in its id. A name that can't be one is replaced."""
    if (known := getattr(request.state, "name", None)) is not None:
        return known
    given = request.headers.get("x-request-id") or fields.request_id or ""
    if not given or len(given) > _MAX_ID or not given.isascii() or not given.isprintable() or " " in given:
        given = secrets.token_hex(8)
    request.state.name = given
    return given


def _mismatch(asked: str, served: str) -> ModelMismatch:
    return ModelMismatch(f"model {shown(asked)!r} is not served here; this cluster serves {served!r}")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _error(error: BatonError, failed: ErrorBody = errors.body_of) -> Response:
    return Response(msgspec.json.encode(failed(error)), errors.status_of(error), errors.headers_of(error), _JSON)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {shown(request.url.path)}"
    return Response(
        msgspec.json.encode(errors.described(error.status_code, message)), error.status_code, error.headers, _JSON
    )


# --- answers on the wire ----------------------------------------------------------------------------------------------


class _Answering(Response):
    """A response that runs generations to their end, or until the client has gone."""

    def __init__(self, order: _Order, generations: Sequence[Generation], linger: float, name: str) -> None:
        self.answer, self.generations, self._linger = order.answer, generations, linger
        self._stops = frozenset(order.fields.stop_token_ids or ())
        self.raw_headers = [(b"x-request-id", name.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and cancel whatever has not ended."""
        try:
            await self._while_connected(self._answer(scope, receive, send), receive)
        except ClientGone:
            scope.get("state", {}).get("abort", _nothing)()
        finally:
            for generation in self.generations:
                generation.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _while_connected(self, work: Any, receive: Receive) -> None:
        """Do the work. Raises ClientGone if the client closes its connection, or reads nothing after the end."""
        working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
        working.add_done_callback(looked_at)
        before = None
        try:
            while not working.done():
                await asyncio.wait({working, gone}, timeout=self._linger, return_when=asyncio.FIRST_COMPLETED)
                streams = [generation.stream for generation in self.generations]
                now = [(stream.ended, stream.reads) for stream in streams]
                stuck = now == before and all(stream.ended for stream in streams)
                if not working.done() and (gone.done() or stuck):
                    raise ClientGone
                before = now
            working.result()
        finally:
            working.cancel()
            gone.cancel()

    async def _outputs(self) -> AsyncIterator[tuple[Sample, Output | RequestEnded]]:
        """Yield what comes of each sample, as it comes. Raises BatonError when one of them fails."""
        pairs = list(zip(self.answer.samples, self.generations, strict=True))
        if len(pairs) == 1:
            ((sample, generation),) = pairs
            while sample.end is None:
                yield sample, self._checked(sample, await generation.stream.read())
            return
        news: asyncio.Queue[tuple[Sample, Output | RequestEnded]] = asyncio.Queue(1)
        readers = [asyncio.create_task(_read(sample, generation, news)) for sample, generation in pairs]
        try:
            while any(sample.end is None for sample in self.answer.samples):
                sample, what = await news.get()
                yield sample, self._checked(sample, what)
        finally:
            for reader in readers:
                reader.cancel()

    def _checked(self, sample: Sample, news: Output | RequestEnded) -> Output | RequestEnded:
        """Note the end of a sample. Raises the error that it ended in."""
        if not isinstance(news, RequestEnded):
            return news
        match news.outcome:
            case Failed(error=error):
                raise error
            case Cancelled(why=why):
                raise RequestCancelled(why)
            case Finished(reason=reason):
                sample.end = news
                sample.stop_reason = self.generations[sample.index].stream.stop_string
                if reason == "stop" and sample.stop_reason is None and sample.tokens:
                    last = sample.tokens[-1]
                    sample.stop_reason = last if last in self._stops else None
        return news


class _Whole(_Answering):
    """One JSON object at the end."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for sample, news in self._outputs():
                if isinstance(news, Output):
                    sample.take(news)
            response = _json(self.answer.whole())
        except BatonError as error:
            response = _error(error, self.answer.failed)
        response.headers["x-request-id"] = self.headers["x-request-id"]
        await response(scope, receive, send)


class _Stream(_Answering):
    """Server-sent events, an output at a time."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, opened = self.answer, False

        async def event(value: dict[str, Any]) -> None:
            await send({"type": "http.response.body", "body": answer.event(value), "more_body": True})

        async def open_stream() -> None:
            headers = [
                (b"content-type", _EVENT_STREAM.encode()), (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"), *self.raw_headers,
            ]  # fmt: skip
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for chunk in answer.opening():
                await event(chunk)

        try:
            async for sample, news in self._outputs():
                if not opened:  # a request that is refused has a status of its own
                    opened = True
                    await open_stream()
                if not isinstance(news, Output):
                    for chunk in answer.ending(sample):
                        await event(chunk)
                elif (chunk := answer.chunk(sample, news)) is not None:
                    await event(chunk)
            for chunk in answer.closing():
                await event(chunk)
        except BatonError as error:
            if not opened:
                response = _error(error, answer.failed)
                response.headers["x-request-id"] = self.headers["x-request-id"]
                await response(scope, receive, send)
                return
            await event(answer.failed(error))
        await send({"type": "http.response.body", "body": answer.end_of_stream, "more_body": False})


async def _read(sample: Sample, generation: Generation, news: asyncio.Queue[Any]) -> None:
    while True:
        what = await generation.stream.read()
        await news.put((sample, what))
        if isinstance(what, RequestEnded):
            return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _nothing() -> None:
    pass
