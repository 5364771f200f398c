"""The operator's API: status, explain, pins, drain, roles and profile, as JSON on a Unix socket or a port of loopback.

The kernel lets this user alone open the socket. On loopback a call needs an operator's key, once there are keys. No web
page is a client: a browser that reaches the port, also through ssh, gets status 403. `baton.operator_api` has the calls
and their answers.

Clients share one port among all routers, so no client knows which router has its request. So each call asks the other
routers, too, at their operator's addresses, which follow from their names. One that does not answer is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton import operator_api as api
from baton import operator_port
from baton.checkpoint_files import canonical, read_config
from baton.client import AsyncClient
from baton.clock import Clock
from baton.config import Config
from baton.errors import (
    BatonError,
    DeadlineExpired,
    InvalidRequest,
    ModelError,
    ModelMismatch,
    Overloaded,
    PermissionDenied,
    PinNotFound,
    RequestNotFound,
    Unavailable,
    UnsupportedField,
    shown,
)
from baton.futures import looked_at
from baton.hosts import host_of_header, names_this_machine
from baton.logs import RateLimitedLog
from baton.operator_address import Loopback, parse_operator, router_names
from baton.ports import FixedPort
from baton.trace import new_mark, trace_path
from kvstore.keys import pack_tokens
from router import events
from router.dashboard import operator_views as views
from router.frontend.api.anthropic_messages import MessageBuilder
from router.frontend.api.errors import error_response, json_response
from router.frontend.api.gates import BodyReader, check_places
from router.frontend.api.openai_chat import ChatBuilder
from router.frontend.api.openai_completions import CompletionBuilder
from router.frontend.api.openai_responses import ResponsesBuilder
from router.frontend.api.server import ApiServer
from router.frontend.api.streaming import disconnected
from router.frontend.chat.repairs import Repairs
from router.frontend.generation import GenerationService, check_length, checked_name, checked_salt
from router.frontend.identity import THIS_USER, Gatekeeper, caller, note_refusal
from router.frontend.router_driver import RouterDriver
from router.frontend.served_model import ServedModel, tokenized
from router.requests.explain import RequestRecord
from router.role_changes import PATIENCE
from router.views import ProcessView

log = logging.getLogger(__name__)
of_routers = RateLimitedLog(log)

A = TypeVar("A")

_CALLS_AT_ONCE = 256
_SECONDS = 10.0  # in which a call is answered, and a pin after its deadline
ADAPTER_SECONDS = 120.0  # in which all workers have loaded an adapter
_ROUTER_SECONDS = 1.0  # for the answer of another router
_ID_PREFIXES = [each.prefix for each in (ChatBuilder, CompletionBuilder, MessageBuilder, ResponsesBuilder)]
_PIN_SECONDS = 3_600.0  # in which a prefix is pinned, unless the call says how many
_LISTED = 10  # requests, unless the call says how many
_STEPS = 100  # of a trace, unless the call says how many
_DEFAULT_TTL_MS = 3_600_000
_MIN_TTL_MS, _MAX_TTL_MS = 1_000, 7 * 24 * 3_600_000


class OperatorServer:
    """Owns the sockets, and what they admit.

    A socket's file may be removed while the router lives, such as with $XDG_RUNTIME_DIR when the user logs out. Then
    another server listens anew, and connections to the first one live on."""

    def __init__(self, service: GenerationService, gate: Gatekeeper, calls: OperatorCalls) -> None:
        self._clock, self._bodies = service.clock, BodyReader(service)
        self._gate, self._calls = gate, calls
        self._servers: list[ApiServer] = []
        self._path: Path | None = None  # of the socket

    async def start(self, setting: str, cluster: str, router: str) -> str:
        """Listen where `router.operator` says; returns the address. Raises ConfigError, StartupError, PortInUse."""
        chosen = parse_operator(setting)
        if isinstance(chosen, Loopback):
            listener = await FixedPort("router.operator", chosen.host, chosen.port, "router.operator").listener()
            address = str(chosen._replace(port=listener.getsockname()[1]))
        else:
            path = chosen or operator_port.default_path(cluster, router)
            listener = operator_port.listen(path, is_default=chosen is None)
            self._path, address = path, operator_port.target(path)
        server = ApiServer(self._app(self._gate if isinstance(chosen, Loopback) else None), _CALLS_AT_ONCE)
        await server.serve(listener)
        self._servers.append(server)
        return address

    @property
    def lost(self) -> bool:
        """Whether the socket's file has been removed, so that no new connection finds it."""
        return self._path is not None and not os.path.lexists(self._path)

    async def stop(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        await asyncio.gather(*(server.stop() for server in self._servers))

    def _app(self, gate: Gatekeeper | None) -> Starlette:
        """Return the ASGI application. `gate` asks for an operator's key; none: the kernel admits this user alone."""
        return Starlette(
            routes=[
                Route(path, partial(self._answer, kind, gate), methods=[method])
                for kind, (method, path, _) in api.CALLS.items()
            ],
            exception_handlers={HTTPException: _no_route},
        )

    async def _answer(self, kind: type[api.OperatorCall[Any]], gate: Gatekeeper | None, request: Request) -> Response:
        try:
            with _admitted(request, gate):
                call = await self._read(kind, request)
                work = self._calls.answer(call, alone=api.ONE_ROUTER in request.headers)
                return json_response(await self._in_time(call, work, request))
        except BatonError as error:
            return error_response(error)
        except Exception:  # whatever it is, the client gets a status and never a traceback
            log.exception("failed in the router")
            return error_response(BatonError("internal error; the router's log says more"))

    async def _read(
        self, kind: type[api.OperatorCall[Any]], request: Request
    ) -> api.OperatorCall[Any] | events.PinPrefix:
        if request.method == "POST":
            request.scope.setdefault("state", {}).update(headers=request.headers, repairs=Repairs(setting=False))
            return await self._bodies.read_body(
                request, kind, lambda call: checked(call, self._calls.serving(call).model, self._clock.now())
            )
        try:
            return msgspec.convert(dict(request.query_params), kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"the query of {request.url.path} is not as it must be: {shown(str(error), 300)}"
            ) from None

    async def _in_time(self, call: api.OperatorCall[Any] | events.PinPrefix, work: Awaitable[A], request: Request) -> A:
        """Do the work of a call. It is cancelled once its time is up, or its client has closed the connection."""
        seconds = _SECONDS
        if isinstance(call, events.PinPrefix):
            seconds += (call.deadline or 0.0) - self._clock.now()
        elif isinstance(call, api.LoadAdapter):
            seconds = ADAPTER_SECONDS
        working = asyncio.ensure_future(work)
        working.add_done_callback(looked_at)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            await asyncio.wait({working, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise DeadlineExpired(f"the call has not been answered within {seconds:g} s, or its client has gone")
            return working.result()
        finally:
            working.cancel()
            gone.cancel()


@contextlib.contextmanager
def _admitted(request: Request, gate: Gatekeeper | None) -> Iterator[None]:
    """Identify the client and count the call until its end. Raises BatonError."""
    try:
        _check_no_page(request)
        check_places(request.scope, operator=False)
        identity = gate.identify(request.headers, operator=True) if gate else THIS_USER
        leave = gate.enter(identity) if gate else None
    except BatonError as error:
        if not isinstance(error, Overloaded):
            note_refusal(f"{request.method} {request.url.path}", "the operator's port", error)
        raise
    caller.set(identity)
    try:
        yield
    finally:
        if leave is not None:
            leave()


def _check_no_page(request: Request) -> None:
    """Raise PermissionDenied for what a web page sends. Its name may point to loopback (DNS rebinding)."""
    host = request.headers.get("host", "")
    if "origin" in request.headers or "sec-fetch-site" in request.headers:
        raise PermissionDenied("a web page sends this call, and none may; use `baton` or curl")
    if not names_this_machine(host_of_header(host)):
        raise PermissionDenied(f"the call is for the host {shown(host)!r}, which is no name of this machine")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = ", ".join(f"{method} {path}" for method, path, _ in api.CALLS.values())
    response = error_response(
        InvalidRequest(f"there is no call {request.method} {shown(request.url.path)}; there are {known}")
    )
    response.status_code = error.status_code
    return response


class OperatorCalls:
    """Does what each call asks for, for one router or for all routers of the cluster."""

    def __init__(
        self,
        drivers: Sequence[RouterDriver],
        clock: Clock,
        others: OtherRouters,
        snapshots: Sequence[Callable[[], bytes]],
    ) -> None:
        """`drivers`: one for each model, the first model's first. `snapshots` return the data of the page at
        /dashboard, as JSON, of each model."""
        self._drivers, self._clock, self._others, self._snapshots = drivers, clock, others, snapshots
        self._driver = drivers[0]

    def serving(self, call: api.OperatorCall[Any] | events.PinPrefix) -> RouterDriver:
        """Return the driver of the model that a call names; where it names none, the first. Raises ModelMismatch."""
        if not (name := getattr(call, "model", "")):
            return self._driver
        if (driver := next((each for each in self._drivers if each.model.has(name)), None)) is not None:
            return driver
        known = ", ".join(repr(each.model.name) for each in self._drivers)
        raise ModelMismatch(f"no workers are of a model {shown(repr(name))}; there are those of {known}")

    async def answer_of(self, router: str, call: api.OperatorCall[A]) -> A:
        """Return the answer of the router of that name alone; "": of this one. Raises BatonError."""
        if router in ("", self._driver.me.name):
            return await self.answer(call, alone=True)
        return await self._others.ask(router, call)

    async def answer(self, call: api.OperatorCall[Any] | events.PinPrefix, *, alone: bool) -> Any:
        """Return the answer for all routers, or for this one `alone`. `checked` has looked at the call. Raises
        BatonError."""
        states, now = [each.state for each in self._drivers], self._clock.now()
        ask = _ask_none if alone else self._others.ask_all
        match call:
            case api.GetHealth():
                reasons = [each.unready for each in self._drivers]
                return "" if None in reasons else reasons[0]
            case api.GetStatus():
                return reduce(joined, await ask(call), self._status())
            case api.ListRequests():
                count = call.last or _LISTED
                records = chain.from_iterable(state.recent(count, call.session) for state in states)
                mine = [views.request_summary(record, now) for record in records]
                every = chain(mine, *await ask(call))
                return sorted(every, key=lambda request: request.age_ms)[:count]
            case api.Explain():
                return await self._explain(call, ask)
            case api.GetSnapshot():
                return Raw(self._snapshots[self._drivers.index(self.serving(call))]())
            case api.GetHistory():
                return self.serving(call).monitor.history()
            case api.Profile():
                return self._profile(call)
            case api.Drain():
                self._with(call.worker).handle(events.DrainWorker(call.worker, call.now, call.undo))
                worker = views.process(self._view(call.worker))
                attempts = sum(other.attempts for other in await ask(call))
                return structs.replace(worker, attempts=worker.attempts + attempts)
            case api.SetRole():
                patience = PATIENCE if call.patience_ms is None else call.patience_ms / 1_000
                self._with(call.worker).handle(events.SetRole(call.worker, call.role, patience))
                return views.process(self._view(call.worker))
            case api.ReloadWeights():
                await ask(call)
                patience = PATIENCE if call.patience_ms is None else call.patience_ms / 1_000
                self.serving(call).handle(events.ReloadWeights(call.path, patience))
                return None
            case events.PinPrefix():
                return await self.serving(call).pin_prefix(call)
            case api.Unpin():
                return await self._unpin(call, ask)
            case api.LoadAdapter():
                if call.load_inplace:
                    raise UnsupportedField("load_inplace is true; unload the adapter, and load it under a new name")
                driver = self.serving(call)
                further = (one for one in self._drivers if one is not driver and one.model.has(call.lora_name))
                if other := next(further, None):
                    raise InvalidRequest(f"{shown(repr(call.lora_name))} is a name of the model {other.model.name!r}")
                return await driver.load_adapter(call.lora_name, call.lora_path)
            case api.UnloadAdapter():
                having = (one for one in self._drivers if call.lora_name in one.state.served_adapters)
                return next(having, self._driver).unload_adapter(call.lora_name)
            case api.ListAdapters():
                served = chain.from_iterable(state.served_adapters.items() for state in states)
                return [api.LoraAdapter(name, path) for name, path in sorted(served)]
            case api.ListPins():
                every = chain(*(state.pins(now) for state in states), *await ask(call))
                return sorted(every, key=lambda pin: (pin.id, pin.tenant))
            case _:
                raise AssertionError(f"no call is {call}")

    def _status(self) -> api.Status:
        """Return this router's status: of all models, the processes and counts together."""
        first, *further = map(self._status_of, self._drivers)
        return reduce(_with_model, further, first)

    def _status_of(self, driver: RouterDriver) -> api.Status:
        me, others = driver.processes()
        card, stats = driver.state.card, driver.state.stats()
        return api.Status(
            processes=[
                structs.replace(views.process(me), heartbeat_age_ms=None),
                *(structs.replace(views.process(each), model=driver.model.name) for each in others),
            ],
            log_dir=str(driver.config.cluster.logs),
            counts=views.counts(stats),
            cluster=driver.config.cluster.name,
            model_name=driver.model.name,
            model=structs.replace(card, steps=()) if card else None,
            bottleneck=views.bottleneck(stats),
        )

    async def _explain(self, call: api.Explain, ask: Callable[..., Any]) -> Any:
        if not call.request_id:
            raise InvalidRequest("no request is named")
        try:
            return views.explanation(self._record_of(call.request_id), self._clock.now())
        except RequestNotFound:
            if not (answers := await ask(call)):
                raise
            return min(answers, key=lambda one: one.request.age_ms)

    def _record_of(self, name: str) -> RequestRecord:
        """The request of that name, or of an answer's id. Raises RequestNotFound."""
        prefix = next((prefix for prefix in _ID_PREFIXES if name.startswith(prefix)), "")
        for one in dict.fromkeys((name, name.removeprefix(prefix))):
            matches: list[tuple[float, bool, RequestRecord]] = []
            for each in self._drivers:
                with contextlib.suppress(RequestNotFound):
                    record = each.state.explain(one)
                    answered = record.cascade is None or record.cascade.chosen == each.model.name
                    matches.append((record.timeline.received, answered, record))
            if matches:
                return max(matches, key=lambda each: each[:2])[2]
        return self._driver.state.explain(name)  # raises

    def _profile(self, call: api.Profile) -> api.TraceFile:
        if call.stop and call.steps:
            raise InvalidRequest(f"steps is {call.steps} beside stop; ask for steps or for a stop, not for both")
        if call.stop:
            steps, (mark, node) = 0, self._with(call.process).state.profiles.tracing(call.process)
            self._with(call.process).handle(events.StopProfile(call.process))
        else:
            steps, mark = call.steps or _STEPS, new_mark()
            self._with(call.process).handle(events.ProfileProcess(call.process, mark, steps))
            node = self._view(call.process).peer.node
        path = trace_path(self._driver.config.cluster.traces, call.process, mark)
        return api.TraceFile(str(path), node, steps)

    async def _unpin(self, call: api.Unpin, ask: Callable[..., Any]) -> None:
        missing: list[PinNotFound] = []
        elsewhere = await ask(call)
        for driver in self._drivers:
            try:
                driver.handle(events.UnpinPrefix(call.id, call.tenant))
            except PinNotFound as error:
                missing.append(error)
        if not elsewhere and len(missing) == len(self._drivers):
            raise missing[0]

    def _view(self, name: str) -> ProcessView:
        processes = chain.from_iterable(each.state.processes(self._clock.now()) for each in self._drivers)
        return next(view for view in processes if view.peer.name == name)

    def _with(self, process: str) -> RouterDriver:
        """Return the driver of the model whose worker or store has that name; where none has it, the first."""
        now = self._clock.now()
        return next(
            (one for one in self._drivers if any(view.peer.name == process for view in one.state.processes(now))),
            self._driver,
        )


async def _ask_none(call: object) -> list[Any]:
    return []


def checked(call: api.OperatorCall[Any], model: ServedModel, now: float) -> api.OperatorCall[Any] | events.PinPrefix:
    """Return a call as it is carried out. Raises ModelMismatch or InvalidRequest, naming the field and its value."""
    if isinstance(call, api.ReloadWeights):
        check_reload(Path(call.path), model)
    if not isinstance(call, api.PinPrefix):
        return call
    model.check(call.model)
    ttl_ms = _DEFAULT_TTL_MS if call.ttl_ms is None else call.ttl_ms
    if not _MIN_TTL_MS <= ttl_ms <= _MAX_TTL_MS:
        raise InvalidRequest(f"ttl_ms is {ttl_ms}; it must be from {_MIN_TTL_MS} (1 second) to {_MAX_TTL_MS} (7 days)")
    seconds = _PIN_SECONDS if call.timeout_ms is None else call.timeout_ms / 1_000
    return events.PinPrefix(
        name="",
        pin=checked_name("id", call.id) or secrets.token_hex(8),
        tokens=pack_tokens(_prompt(call, model)),
        ttl=ttl_ms / 1_000,
        tenant=checked_name("tenant", call.tenant),
        salt=checked_salt(call.cache_salt),
        adapter=model.adapter_of(call.model),
        model=call.model,
        deadline=now + seconds,
    )


def check_reload(path: Path, model: ServedModel) -> None:
    """Raise InvalidRequest unless `path` holds a checkpoint of the served model."""
    if not path.is_absolute():
        raise InvalidRequest(f"path is {shown(str(path))!r}; give the absolute path of a checkpoint's directory")
    try:
        config = canonical(read_config(path))
    except ModelError as error:
        raise InvalidRequest(str(error)) from None
    if config != model.config:
        raise InvalidRequest(
            f"config.json in {shown(str(path))} is of another model than the served one; start a cluster with it"
        )


def _prompt(call: api.PinPrefix, model: ServedModel) -> Sequence[int]:
    match call:
        case api.PinPrefix(text=str(text), token_ids=None):
            tokens = tokenized([text], model)[0]
        case api.PinPrefix(text=None, token_ids=list(tokens)):
            pass
        case _:
            raise InvalidRequest("the call has no prompt, or two; set text or token_ids")
    check_length(tokens, model)
    return tokens


class OtherRouters:
    """Asks the other routers. A cluster of one router has none."""

    def __init__(self, config: Config, me: str, key: str | None) -> None:
        """`key`: an operator's, for ports on loopback."""
        self._config = config
        self._key = key or ""
        self.names = [name for name in router_names(config.cluster.routers) if name != me]

    @property
    def targets(self) -> list[str]:
        """Their operator's addresses, as they are now: a socket moves if its folder is removed."""
        return [*map(self._target, self.names)]

    async def ask_all(self, call: api.OperatorCall[A]) -> list[A]:
        """Return the answers of those that have one."""
        answers = await asyncio.gather(*(self.ask(name, call) for name in self.names), return_exceptions=True)
        replies: list[A] = []
        for name, answer in zip(self.names, answers, strict=True):
            if isinstance(answer, Unavailable):
                of_routers.warning("%s does not answer: %s", name, answer)
            elif not isinstance(answer, BaseException):
                replies.append(answer)
            elif not isinstance(answer, BatonError):
                raise answer
        return replies

    async def ask(self, name: str, call: api.OperatorCall[A]) -> A:
        """Return one router's own answer. Raises BatonError."""
        if name not in self.names:
            raise RequestNotFound(f"there is no router {name!r} here; the others are {self.names}")
        async with AsyncClient(operator=self._target(name), api_key=self._key, one_router=True) as client:
            return await client.ask(call, _ROUTER_SECONDS)

    def _target(self, name: str) -> str:
        return operator_port.target_of(self._config.router.operator, self._config.cluster.name, name)


def _with_model(first: api.Status, further: api.Status) -> api.Status:
    """Return a router's status with another model's processes and requests added."""
    counts = structs.asdict(further.counts)
    sums = {name: count + counts[name] for name, count in structs.asdict(first.counts).items()}
    return structs.replace(first, processes=[*first.processes, *further.processes[1:]], counts=api.Counts(**sums))


def joined(mine: api.Status, other: api.Status) -> api.Status:
    """Return a status with another router's added: that router itself, its requests, its attempts on each worker."""
    first, *rest = mine.processes
    attempts = {process.incarnation: process.attempts for process in other.processes[1:]}
    rest = [structs.replace(one, attempts=one.attempts + attempts.get(one.incarnation, 0)) for one in rest]
    sums = {name: count + getattr(other.counts, name) for name, count in structs.asdict(mine.counts).items()}
    use, more = mine.bottleneck, other.bottleneck
    if use and more:
        # Each tells the use that its own requests make. What one worker more would do can't be added.
        use = api.Bottleneck(use.prefill + more.prefill, use.decode + more.decode)
    processes = [first, other.processes[0], *rest]
    return structs.replace(mine, processes=processes, counts=api.Counts(**sums), bottleneck=use)
