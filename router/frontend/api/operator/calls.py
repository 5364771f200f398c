"""What each call of the operator does, for one router or for all routers of the cluster."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import Any, TypeVar

from msgspec import Raw, structs

from baton.clock import Clock
from baton.errors import InvalidRequest, PinNotFound, RequestNotFound
from baton.operator_api import (
    Drain,
    Explain,
    GetHealth,
    GetHistory,
    GetSnapshot,
    GetStatus,
    ListPins,
    ListRequests,
    OperatorCall,
    PinPrefix,
    Profile,
    SetRole,
    Status,
    TraceFile,
    Unpin,
)
from baton.trace import new_mark, trace_path
from kvstore.keys import pack_tokens
from router import events
from router.dashboard import operator_views as views
from router.frontend.api.anthropic_messages import MessageBuilder
from router.frontend.api.openai_chat import ChatBuilder
from router.frontend.api.openai_completions import CompletionBuilder
from router.frontend.api.openai_responses import ResponsesBuilder
from router.frontend.api.operator.other_routers import OtherRouters, joined
from router.frontend.client_sessions import RouterDriver
from router.frontend.dashboard_feed import DashboardFeed
from router.frontend.prompt_tokens import tokenized
from router.frontend.request_parsing import check_length, checked_name, checked_salt
from router.frontend.served_model import ServedModel
from router.requests.explain import RequestRecord
from router.role_changes import PATIENCE
from router.state import ProcessView

A = TypeVar("A")

_ID_PREFIXES = [each.prefix for each in (ChatBuilder, CompletionBuilder, MessageBuilder, ResponsesBuilder)]
_PIN_SECONDS = 3_600.0  # in which a prefix is pinned, unless the call says how many
_LISTED = 10  # requests, unless the call says how many
_STEPS = 100  # of a trace, unless the call says how many
_DEFAULT_TTL_MS = 3_600_000
_MIN_TTL_MS, _MAX_TTL_MS = 1_000, 7 * 24 * 3_600_000


class OperatorCalls:
    """Answers calls. `feed` has the data of the page at /dashboard."""

    def __init__(self, driver: RouterDriver, clock: Clock, others: OtherRouters, feed: DashboardFeed) -> None:
        self._driver, self._clock, self._others, self._feed = driver, clock, others, feed
        self._state = driver.state

    async def answer_of(self, router: str, call: OperatorCall[A]) -> A:
        """Return the answer of the router of that name alone; "": of this one. Raises BatonError."""
        if router in ("", self._driver.me.name):
            return await self.answer(call, alone=True)
        return await self._others.ask(router, call)

    async def answer(self, call: OperatorCall[Any] | events.PinPrefix, *, alone: bool) -> Any:
        """Return the answer for all routers, or for this one `alone`. `checked` has looked at the call. Raises
        BatonError."""
        driver, state, now = self._driver, self._state, self._clock.now()
        ask = _ask_none if alone else self._others.ask_all
        match call:
            case GetHealth():
                return driver.unready or ""
            case GetStatus():
                return reduce(joined, await ask(call), self._status())
            case ListRequests():
                count = call.last or _LISTED
                mine = [views.request_summary(record, now) for record in state.recent(count, None, call.session)]
                every = chain(mine, *await ask(call))
                return sorted(every, key=lambda request: request.age_ms)[:count]
            case Explain():
                return await self._explain(call, ask)
            case GetSnapshot():
                return Raw(self._feed.snapshot())
            case GetHistory():
                return driver.monitor.history()
            case Profile():
                return self._profile(call)
            case Drain():
                driver.handle(events.DrainWorker(call.worker, call.now, call.undo))
                worker = views.process(self._view(call.worker))
                attempts = sum(other.attempts for other in await ask(call))
                return structs.replace(worker, attempts=worker.attempts + attempts)
            case SetRole():
                patience = PATIENCE if call.patience_ms is None else call.patience_ms / 1_000
                driver.handle(events.SetRole(call.worker, call.role, patience))
                return views.process(self._view(call.worker))
            case events.PinPrefix():
                return await driver.pin_prefix(call)
            case Unpin():
                return await self._unpin(call, ask)
            case ListPins():
                every = chain(state.pins(None, now), *await ask(call))
                return sorted(every, key=lambda pin: (pin.id, pin.tenant))
            case _:
                raise AssertionError(f"no call is {call}")

    def _status(self) -> Status:
        driver, state = self._driver, self._state
        me, others = driver.processes()
        card, stats = state.card, state.stats()
        return Status(
            processes=[structs.replace(views.process(me), heartbeat_age_ms=None), *map(views.process, others)],
            log_dir=str(driver.config.cluster.logs),
            counts=views.counts(stats),
            cluster=driver.config.cluster.name,
            model_name=driver.model.name,
            model=structs.replace(card, steps=()) if card else None,
            bottleneck=views.bottleneck(stats),
        )

    async def _explain(self, call: Explain, ask: Callable[..., Any]) -> Any:
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
        try:
            return self._state.explain(name, None)
        except RequestNotFound:
            if not prefix:
                raise
            return self._state.explain(name.removeprefix(prefix), None)

    def _profile(self, call: Profile) -> TraceFile:
        if call.stop and call.steps:
            raise InvalidRequest(f"steps is {call.steps} beside stop; ask for steps or for a stop, not for both")
        if call.stop:
            steps, (mark, node) = 0, self._state.tracing(call.process)
            self._driver.handle(events.StopProfile(call.process))
        else:
            steps, mark = call.steps or _STEPS, new_mark()
            self._driver.handle(events.ProfileProcess(call.process, mark, steps))
            node = self._view(call.process).peer.node
        path = trace_path(self._driver.config.cluster.traces, call.process, mark)
        return TraceFile(str(path), node, steps)

    async def _unpin(self, call: Unpin, ask: Callable[..., Any]) -> None:
        elsewhere = await ask(call)
        try:
            self._driver.handle(events.UnpinPrefix(call.id, call.tenant))
        except PinNotFound:
            if not elsewhere:
                raise

    def _view(self, name: str) -> ProcessView:
        return next(view for view in self._state.processes(self._clock.now()) if view.peer.name == name)


async def _ask_none(call: object) -> list[Any]:
    return []


def checked(call: OperatorCall[Any], model: ServedModel, now: float) -> OperatorCall[Any] | events.PinPrefix:
    """Return a call as it is carried out. Raises ModelMismatch or InvalidRequest, naming the field and its value."""
    if not isinstance(call, PinPrefix):
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
        deadline=now + seconds,
    )


def _prompt(call: PinPrefix, model: ServedModel) -> Sequence[int]:
    match call:
        case PinPrefix(text=str(text), token_ids=None):
            tokens = tokenized([text], model)[0]
        case PinPrefix(text=None, token_ids=list(tokens)):
            pass
        case _:
            raise InvalidRequest("the call has no prompt, or two; set text or token_ids")
    check_length(tokens, model)
    return tokens
