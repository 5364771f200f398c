"""The routes of the HTTP doors, as an ASGI application.

A request passes through here like this: read the body within its bounds, decode and check it, start one generation for
each sample, and send what comes of them. A client that goes away, or reads nothing after the end, cancels everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

import baton
from baton.config import ApiConfig, Repair
from baton.errors import (
    BatonError,
    DeadlineExpired,
    InvalidGrammar,
    InvalidRequest,
    ModelMismatch,
    PermissionDenied,
    Unavailable,
    shown,
)
from baton.logs import RequestLog
from baton.messages import TOKEN_BYTES
from baton.metrics import PAGE_TYPE
from baton.operator_api import LoadAdapter, UnloadAdapter
from router.frontend.api import errors, openapi
from router.frontend.api.anthropic_messages import (
    CountTokensRequest,
    MessageBuilder,
    MessagesRequest,
    MessageTokensCount,
    anthropic_body,
    anthropic_described,
    chat_of_messages,
)
from router.frontend.api.batch_store import BatchStore
from router.frontend.api.batches import BatchRoutes
from router.frontend.api.dashboard import DashboardRoutes
from router.frontend.api.errors import ErrorBody, error_response, json_response
from router.frontend.api.gates import ADAPTER_PATHS, BodyReader, Headers, KeyGate, behind_site_gate, request_name
from router.frontend.api.model_cards import ModelCards, is_anthropic
from router.frontend.api.openai_chat import ChatBuilder, ChatCompletionRequest
from router.frontend.api.openai_completions import CompletionBuilder, CompletionRequest
from router.frontend.api.openai_responses import ResponsesBuilder, ResponsesRequest, chat_of_response
from router.frontend.api.operator_server import ADAPTER_SECONDS, OperatorCalls
from router.frontend.api.prompts import ChatOrder, PromptBuilder, TemplateRenderer
from router.frontend.api.protocol import (
    DetokenizeRequest,
    GenerationFields,
    GenerationOrder,
    TokenizeRequest,
    affinity_of,
    in_words_of,
    name_field,
    refuse_unserved,
    request_fields,
    rule_entries,
    samples,
    session_of,
    token_ids,
)
from router.frontend.api.response_builder import Choice, ResponseBuilder, ResponseOptions
from router.frontend.api.streaming import EventStream, WholeResponse
from router.frontend.api.token_logprobs import TokenNames
from router.frontend.api.tools import ToolPlan, checked, fitted, planned
from router.frontend.chat.repairs import HEADER, Repairs
from router.frontend.generation import Generation, GenerationService
from router.frontend.identity import Gatekeeper, caller
from router.frontend.router_driver import RouterDriver
from router.frontend.served_model import tokenized

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

LINGER = 15.0  # seconds after the end of a request in which its client must read something
NOT_CACHED = "baton-not-cached"  # a request with this header is told why its prompt was not cached
_DEFAULT_COMPLETION = 16  # tokens of a completion that sets no max_tokens, as OpenAI's API has it
_MAX_RULES = 2**20  # entries of logit_bias, allowed_token_ids and bad_words, over all prompts of a request
_JSON = "application/json"


class PlannedChat(Struct, frozen=True):
    """A checked chat of any API."""

    prompts: PromptBuilder  # of its model
    fields: ChatCompletionRequest
    plan: ToolPlan
    order: ChatOrder


class HttpApi:
    """The application. `app` is the ASGI callable."""

    def __init__(
        self,
        service: GenerationService,
        metrics_page: Callable[[], Awaitable[bytes]],
        gate: Gatekeeper,
        dashboard: OperatorCalls | None = None,
        config: ApiConfig | None = None,
        *,
        batches: BatchStore | None = None,
    ) -> None:
        """`dashboard`: gives out the data of the page at /dashboard; none: there is no such page. `batches`: where
        clients' files and batches are kept; none: there are none."""
        config = config or ApiConfig()
        self._service = service
        self._config = config
        self._metrics_page = metrics_page
        self._bodies = BodyReader(service)
        self._templates = TemplateRenderer(max(service.most_bytes[1], 2**20))
        trust = config.trust_request_chat_template
        self._prompts = {each: PromptBuilder(each, self._templates, trust_templates=trust) for each in service.all}
        self._cards, self._calls = ModelCards([each.model for each in service.all], int(time.time())), dashboard
        guarded = partial(_Guarded, repairs=config.repairs, driver=service.driver)
        self._batches = BatchRoutes(batches, service, gate, self._bodies, guarded) if batches else None
        get = partial(Route, methods=["GET"])
        post = partial(Route, methods=["POST"])
        openai_chat = partial(self._chat, ChatCompletionRequest, lambda fields, repairs: fields, ChatBuilder)
        messages = partial(self._chat, MessagesRequest, chat_of_messages, MessageBuilder)
        responses = partial(self._chat, ResponsesRequest, chat_of_response, ResponsesBuilder)
        self._router = Router(
            [
                post("/v1/completions", guarded(self._completions)),
                post("/v1/chat/completions", guarded(openai_chat)),
                get("/v1/models", self._models),
                get("/v1/models/{model:path}", self._model),
                post("/v1/messages", guarded(messages, anthropic_body)),
                post("/v1/messages/count_tokens", guarded(self._count_tokens, anthropic_body)),
                post("/v1/responses", guarded(responses)),
                post("/tokenize", guarded(self._tokenize)),
                post("/detokenize", guarded(self._detokenize)),
                get("/version", self._version),
                get("/live", self._live),
                *(get(path, self._ready) for path in ("/health", "/ready", "/health/ready")),
                get("/metrics", self._metrics),
                post(ADAPTER_PATHS[0], guarded(partial(self._adapter, LoadAdapter))),
                post(ADAPTER_PATHS[1], guarded(partial(self._adapter, UnloadAdapter))),
                get("/openapi.json", self._openapi),
                *(self._batches.routes if self._batches is not None else ()),
                *(DashboardRoutes(dashboard, service.clock).routes if dashboard is not None else ()),
            ],
            redirect_slashes=False,  # to an address that need not be the client's; KeyGate cuts them
        )
        self.app = behind_site_gate(KeyGate(self._routes, gate), gate, config)

    async def run(self) -> None:
        """Execute batches until the router ends."""
        if self._batches is None:
            await asyncio.Event().wait()
        else:
            await self._batches.run(self._routes)

    async def _routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # then the router raises where it has no route
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await _no_route(Request(scope), error)(scope, receive, send)

    async def close(self) -> None:
        """End what runs beside the application."""
        await self._templates.close()

    def _of(self, name: str | None) -> PromptBuilder:
        """Return what makes the prompts of the model that a request names, which knows its service. Raises
        ModelMismatch."""
        return self._prompts[self._service.of(name)]

    # --- generation --------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        received = self._service.clock.now()
        work = partial(self._completion_of, caller.get().tenant)
        service, fields, most, prompts, echo = await self._bodies.read_body(request, CompletionRequest, work)
        scored = fields.prompt_logprobs
        if fields.echo and scored is None:
            scored = fields.logprobs
        most = max(most, 1) if _shows_prompt_alone(fields, echo) else most
        order = GenerationOrder(fields, prompts, most, fields.logprobs, self._config.clamp_max_tokens, scored)

        def builder() -> ResponseBuilder:
            scores = fields.logprobs is not None
            options = self._options(CompletionBuilder, service, request, fields, logprobs=scores, echo=echo)
            return CompletionBuilder(options, _choices_of(prompts, samples(fields)))

        with in_words_of(fields):
            return await self._answered(service, request, order, received, builder)

    def _completion_of(
        self, tenant: str, fields: CompletionRequest
    ) -> tuple[GenerationService, CompletionRequest, int, list[Sequence[int]], str | None]:
        """Check a completion. Return it with its model's service, its max_tokens, the tokens of its prompts and the
        text to echo."""
        refuse_unserved(fields)
        builder = self._of(fields.model)
        if fields.prompt is None:
            raise InvalidRequest("the request has no prompt; send a text, token ids, or a list of either")
        most = fields.max_tokens if fields.max_tokens is not None else _DEFAULT_COMPLETION
        prompts = builder.of_completion(fields, most, tenant)
        echo = None
        if fields.echo:
            if len(prompts) > 1:
                raise InvalidRequest("echo is true for several prompts; send them one by one")
            tokenizer = builder.service.model.tokenizer
            echo = tokenizer.decode(prompts[0]) if tokenizer else ""
        _check_prompt_logprobs(fields)
        return builder.service, fields, most, prompts, echo

    async def _count_tokens(self, request: Request) -> Response:
        repairs: Repairs = request.scope["state"]["repairs"]
        work = partial(self._chat_of, chat_of_messages, repairs)
        _, chat = await self._bodies.read_body(request, CountTokensRequest, work)
        return json_response(MessageTokensCount(len((await chat.prompts.of_chat(chat.order, repairs)).tokens)))

    def _chat_of(
        self, converted: Callable[[T, Repairs], ChatCompletionRequest], repairs: Repairs, body: T
    ) -> tuple[T, PlannedChat]:
        """Check a chat of any API. Return the request as it came, and as a chat."""
        fields = converted(body, repairs)
        if fields.max_completion_tokens is not None:
            fields.max_tokens = fields.max_completion_tokens
        refuse_unserved(fields)
        prompts = self._of(fields.model)
        model = prompts.service.model
        fields, plan = planned(fields, model.format_of(tools=fields.tools))
        if fields.top_logprobs and not fields.logprobs:
            raise InvalidRequest("top_logprobs is set and logprobs is not true; set both")
        _check_prompt_logprobs(fields)
        return body, PlannedChat(prompts, fields, plan, prompts.chat_order(fields, repairs))

    async def _chat(
        self, kind: type[T], converted: Callable[[T, Repairs], ChatCompletionRequest], builder: type[ResponseBuilder],
        request: Request,
    ) -> Response:  # fmt: skip
        received = self._service.clock.now()
        repairs: Repairs = request.scope["state"]["repairs"]
        body, chat = await self._bodies.read_body(request, kind, partial(self._chat_of, converted, repairs))
        plan, service = chat.plan, chat.prompts.service
        model = service.model
        prompt = await chat.prompts.of_chat(chat.order, repairs)
        with in_words_of(body):
            fields, frame = await fitted(chat.fields, plan, prompt, service, repairs)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        form = model.format_of(tools=fields.tools)
        order = GenerationOrder(
            fields,
            [prompt.tokens],
            fields.max_tokens,
            logprobs,
            kind is not ChatCompletionRequest or self._config.clamp_max_tokens,
            fields.prompt_logprobs,
            model.special_tokens(form.markers(plan.calls, constrained=plan.constrained)),
            "tools" if plan.forced else "",
            chat.order.template,
            frame,
        )

        def built() -> ResponseBuilder:
            echo = _last_text(fields) if fields.echo else None
            scores = logprobs is not None
            options = self._options(builder, service, request, fields, logprobs=scores, echo=echo, body=body)
            outputs = _choices_of(order.prompts, samples(fields))
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in fields.tools or ()}
            tools = {name: schemas[name] for name in plan.names if name in schemas}
            for output in outputs:
                output.parser = form.parser(
                    plan.calls, tools, constrained=plan.constrained, plain=plan.plain, prompt=prompt.end,
                    continued=prompt.continued, texts=plan.texts, rescues=partial(self._rescues, repairs),
                    show_reasoning=fields.include_reasoning is not False, parallel_calls=plan.parallel,
                )  # fmt: skip
            return builder(options, outputs)

        with in_words_of(body):
            return await self._answered(service, request, order, received, built)

    def _options(
        self, builder: type[ResponseBuilder], service: GenerationService, request: Request, fields: GenerationFields,
        *, logprobs: bool, echo: str | None, body: Any = None,
    ) -> ResponseOptions:  # fmt: skip
        streamed = fields.stream_options
        return ResponseOptions(
            request=body,
            id=f"{builder.prefix}{_name_of(request, fields)}",
            model=service.model.answered_as(fields.model),
            created=int(time.time()),
            fingerprint=lambda: service.fingerprint(fields.model or "") or None,
            names=TokenNames(service.model.tokenizer, bool(fields.return_tokens_as_token_ids)),
            logprobs=logprobs,
            token_ids=bool(fields.return_token_ids),
            usage_at_end=bool(streamed and streamed.include_usage),
            usage_always=bool(streamed and streamed.continuous_usage_stats),
            echo=echo,
            reasoning_end=service.model.reasoning_end,
            prompt_logprobs=fields.prompt_logprobs is not None,
            not_cached=request.scope["state"]["headers"].get(NOT_CACHED, "false").lower() in ("1", "true"),
            prompt_only=_shows_prompt_alone(fields, echo),
        )

    def _rescues(self, repairs: Repairs) -> bool:
        """Whether calls count in reasoning that never ended. Those that do are counted."""
        self._service.driver.repairs.update(["reasoning"] if "reasoning" in repairs.allowed else [])
        return "reasoning" in repairs.allowed

    async def _answered(
        self, service: GenerationService, request: Request, order: GenerationOrder, received: float,
        builder: Callable[[], ResponseBuilder],
    ) -> Response:  # fmt: skip
        """Start the generations of a request, then begin with its response. Raises BatonError if one is refused."""
        name, started = _name_of(request, order.fields), list[Generation]()
        rules = rule_entries(order.fields)
        if len(order.prompts) * rules > _MAX_RULES:
            raise InvalidRequest(
                f"logit_bias, allowed_token_ids and bad_words have {rules} entries for each of {len(order.prompts)} "
                f"prompts, more than {_MAX_RULES} in all; send fewer prompts"
            )
        headers: Headers = request.scope["state"]["headers"]
        affinity = affinity_of(order.fields.session_id, headers)
        read = partial(request_fields, order, affinity=affinity, session=session_of(affinity, order.fields, headers))
        with contextlib.ExitStack() as undo:
            for prompt in order.prompts:
                # Tokens of an array are copied at once, 1 ms for a million.
                size = TOKEN_BYTES * (rules + (0 if isinstance(prompt, array) else len(prompt)))
                try:
                    most = _fitting(service, order, len(prompt), request.scope["state"]["repairs"])
                    fields = partial(read, prompt, most)
                    generations = await service.start(name, received, size, fields, further=bool(started))
                except InvalidGrammar as error:
                    error.field = error.field or order.grammar_of
                    raise name_field(error, order.fields) from None
                for generation in generations:
                    started.append(generation)
                    undo.callback(generation.close)
            answering = EventStream if order.fields.stream else WholeResponse
            response = answering(order, builder(), started, LINGER, name, service)
            undo.pop_all()  # the answer closes them
        return response

    # --- everything else ---------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        repairs: Repairs = request.scope["state"]["repairs"]
        work = partial(self._prompt_of, repairs)
        builder, fields, prompt = await self._bodies.read_body(request, TokenizeRequest, work)
        tokens = (await builder.of_chat(prompt, repairs)).tokens if isinstance(prompt, ChatOrder) else prompt
        strings, model = None, builder.service.model
        if fields.return_token_strs:
            spell = TokenNames(model.tokenizer).own
            strings = await self._service.apart(TOKEN_BYTES * len(tokens), lambda: [*map(spell, tokens)])
        limit = model.limits.max_context
        return json_response(
            openapi.Tokens(count=len(tokens), max_model_len=limit, tokens=list(tokens), token_strs=strings)
        )

    def _prompt_of(
        self, repairs: Repairs, fields: TokenizeRequest
    ) -> tuple[PromptBuilder, TokenizeRequest, ChatOrder | Sequence[int]]:
        """Check what is to be tokenized. Return it with its model's builder, and with its tokens or the chat that is to
        be rendered."""
        builder = self._of(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("send either prompt or messages")
        if fields.prompt is not None:
            special = fields.add_special_tokens is not False
            return builder, fields, tokenized([fields.prompt], builder.service.model, special_tokens=special)[0]
        fields.tools = list(checked(fields.tools or ()).values())  # as a chat has them
        return builder, fields, builder.chat_order(fields, repairs)

    async def _detokenize(self, request: Request) -> Response:
        return json_response(
            openapi.DetokenizedText(await self._bodies.read_body(request, DetokenizeRequest, self._text_of))
        )

    def _text_of(self, fields: DetokenizeRequest) -> str:
        model = self._service.of(fields.model).model
        if model.tokenizer is None:
            raise InvalidRequest(f"{model.name} has no tokenizer.json, so there is no text")
        limits = model.limits
        tokens = token_ids(fields.tokens, limits.vocab_size, limits.max_context) if fields.tokens else []
        return model.tokenizer.decode(tokens, special_tokens=True)

    async def _adapter(self, kind: type[LoadAdapter | UnloadAdapter], request: Request) -> Response:
        """Load or unload an adapter, as vLLM's API does, for a client with an operator's key."""
        if not caller.get().operator or self._calls is None:
            raise PermissionDenied(
                "adapters are changed with an operator's API key (`baton keys add NAME --operator`), or with "
                "`baton adapters` on this machine"
            )
        call = await self._bodies.read_body(request, kind, lambda call: call)
        try:
            async with asyncio.timeout(ADAPTER_SECONDS):
                await self._calls.answer(call, alone=True)
        except TimeoutError:
            raise DeadlineExpired(f"the adapter was not loaded within {ADAPTER_SECONDS:g} s") from None
        what = "added" if kind is LoadAdapter else "removed"
        return PlainTextResponse(f"Success: LoRA adapter '{call.lora_name}' {what} successfully.")

    async def _models(self, request: Request) -> Response:
        return json_response(self._cards.all(request.headers))

    async def _model(self, request: Request) -> Response:
        try:
            return json_response(self._cards.one(request.path_params["model"], request.headers))
        except ModelMismatch as error:
            failed = anthropic_body if is_anthropic(request.headers) else errors.body_of
            return error_response(error, failed)

    async def _version(self, request: Request) -> Response:
        return json_response(openapi.Version(baton.__version__))

    async def _live(self, request: Request) -> Response:
        """Answering is the proof: it takes a turn of the loop."""
        return json_response(openapi.Status("live"))

    async def _ready(self, request: Request) -> Response:
        if (reason := self._service.unready) is None:
            return json_response(openapi.Status("ready"))
        return json_response(errors.described(503, reason), 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._metrics_page(), media_type=None, headers={"content-type": PAGE_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi.document())


# --- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Guarded:
    """An endpoint as an ASGI application, whose errors are answers of the API's own shape."""

    endpoint: Endpoint
    failed: ErrorBody = errors.body_of
    _: KW_ONLY
    repairs: bool | Sequence[Repair]
    driver: RouterDriver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, failed = Request(scope, receive), self.failed
        repairs = scope["state"]["repairs"] = Repairs(self.repairs)
        try:
            response = await self.endpoint(request)
        except BatonError as error:
            response = error_response(error, failed)
        except asyncio.CancelledError:
            if not self.driver.stopping:
                raise
            response = error_response(Unavailable("the router has stopped; ask again, or ask another"), failed)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception:  # noqa: BLE001 whatever it is, the client gets a status and never a traceback
            RequestLog(log, _name_of(request)).exception("failed in the router")
            response = error_response(BatonError("internal error; the router's log says more"), failed)
        name = response.headers.setdefault("x-request-id", _name_of(request))
        if failed is anthropic_body:
            response.headers["request-id"] = name
        if repairs.kinds:
            response.headers[HEADER] = ", ".join(repairs.kinds)
            self.driver.repairs.update(repairs.kinds.keys())
        await response(scope, receive, send)


def _fitting(service: GenerationService, order: GenerationOrder, prompt: int, repairs: Repairs) -> int | None:
    """The tokens to generate: as many as were asked for, or where that may be lowered as many as fit."""
    most = order.max_tokens
    if most is None or not order.clamped:
        return most
    room = service.driver.state.most_tokens - prompt
    return room if 0 < room < most and repairs.make("limit") else most


def _choices_of(prompts: Sequence[Sequence[int]], n: int) -> list[Choice]:
    choices: list[Choice] = []
    for number, prompt in enumerate(prompts):
        leader = Choice(index=number * n, prompt=prompt)
        choices += [leader, *(Choice(number * n + other, prompt, leader) for other in range(1, n))]
    return choices


def _check_prompt_logprobs(fields: GenerationFields) -> None:
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest("prompt_logprobs and stream are both set; the log-probabilities of a prompt come whole")
    if isinstance(fields, CompletionRequest) and fields.echo and fields.max_tokens == 0 and fields.stream:
        raise InvalidRequest("echo and stream are set with max_tokens 0; leave stream out")


def _shows_prompt_alone(fields: GenerationFields, echo: str | None) -> bool:
    """Whether no output is shown: the request asks for no token after the text that is repeated."""
    return echo is not None and fields.max_tokens == 0


def _last_text(fields: ChatCompletionRequest) -> str:
    content = fields.messages[-1].get("content") if fields.messages else ""
    return content if isinstance(content, str) else ""


def _name_of(request: Request, fields: GenerationFields | None = None) -> str:
    """What a request is called in logs and in its id. A name that can't be one is replaced."""
    state = request.scope["state"]
    if "name" not in state:
        state["name"] = request_name(state["headers"], (fields and fields.request_id) or "")
    return state["name"]


def _no_route(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}: {request.method} {shown(request.url.path)}"
    anthropic = is_anthropic(request.headers) or request.url.path.startswith("/v1/messages")
    body = (anthropic_described if anthropic else errors.described)(error.status_code, message)
    return Response(msgspec.json.encode(body), error.status_code, error.headers, _JSON)
