"""The gRPC front doors: `Generation` of `proto/baton/v1` for clients, `Cache` and `Cluster` for the operator.

Health and reflection are on both. A server answers a call of a service that it lacks with UNIMPLEMENTED.

Owns the servers and what they admit. `grpc_calls` streams output and turns errors into statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton import operator_port
from baton.api_keys import ANONYMOUS
from baton.doors import ServerTls
from baton.errors import InvalidRequest, PinNotFound, PortInUse, RequestNotFound
from baton.hosts import bracketed
from baton.messages import UNREADABLE
from baton.operator_address import Loopback, parse_operator
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    explain_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from router.frontend import responses
from router.frontend.client_sessions import RouterDriver
from router.frontend.dashboard_feed import DashboardAsk, DashboardFeed
from router.frontend.generation import GenerationService
from router.frontend.grpc_api.grpc_calls import LINGER, GenerateCall, abort, typed
from router.frontend.grpc_api.message_guard import Admit, MessageGuard
from router.frontend.grpc_api.open_calls import PREFIXES, HealthServicer
from router.frontend.identity import THIS_USER, Gatekeeper, caller
from router.frontend.other_routers import DASHBOARD, OtherRouters, add_status, newest
from router.frontend.request_parsing import (
    ValidatedPin,
    name_of,
    parse_pin_request,
    pin_of,
    role_of,
    steps_of,
)
from router.role_changes import PATIENCE
from router.tracing.origin import Origin, origin

_ID_BYTES = 6  # of one token id in a message: at most 5, and a tag where a client does not pack them
_OTHER_BYTES = (
    640 * 2**10
)  # of all other fields of a message together: a grammar has up to 512 KiB, stop strings 64,000
_SPARE_RPCS = 1_024  # beyond router.max_concurrent_rpcs: open calls, refusals, and ends that clients do not read
_MAX_STREAMS = 1_024  # of one connection; gRPC's clients wait with more
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 60_000, 20_000  # a client whose machine or process stands still is let go
_HANDSHAKE_MS = 10_000  # in which a new connection's TLS and first HTTP/2 frame must have come
_IDLE_MS = 120_000  # that a connection may have no call; gRPC's clients then connect anew without being told
_TEXTS: Mapping[str, Sequence[int]] = {  # the fields that hold a prompt's text
    "/baton.v1.Generation/Generate": (2,),
    "/baton.v1.Cache/PinPrefix": (2,),
}
_LISTED = 10  # requests, unless the client says how many
_OPERATOR_RPCS = 256
GENERATION, CACHE, CLUSTER = "baton.v1.Generation", "baton.v1.Cache", "baton.v1.Cluster"


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Streams of tokens."""

    def __init__(self, service: GenerationService, linger: float = LINGER) -> None:
        self._service = service
        self._linger = linger

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802 gRPC's name
        answer = GenerateCall(self._service, request, context, self._linger)
        async with typed(context):
            await answer.serve(name_of(request))


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Prefixes that are to be pinned."""

    def __init__(self, service: GenerationService, others: OtherRouters) -> None:
        self._service = service
        self._driver = service.driver
        self._others = others

    async def PinPrefix(self, request: cache_pb2.PinPrefixRequest, context: Any) -> cache_pb2.PinPrefixResponse:  # noqa: N802
        left = context.time_remaining()
        deadline = None if left is None else self._service.clock.now() + left
        async with typed(context):
            order = await self._parse(request, pin_of(request))
            return responses.pinned(await self._driver.pin_prefix(order, deadline))
        raise AssertionError("abort returned")

    async def UnpinPrefix(self, request: cache_pb2.UnpinPrefixRequest, context: Any) -> cache_pb2.UnpinPrefixResponse:  # noqa: N802
        elsewhere = await self._others.ask(context, cache_pb2_grpc.CacheStub, "UnpinPrefix", request)
        async with typed(context):
            try:
                self._driver.unpin_prefix(request.id, request.tenant)
            except PinNotFound:
                if not elsewhere:
                    raise
        return cache_pb2.UnpinPrefixResponse()

    async def ListPins(  # noqa: N802
        self, request: cache_pb2.ListPinsRequest, context: Any
    ) -> cache_pb2.ListPinsResponse:
        pins = [*map(responses.pin, self._driver.pins())]
        for other in await self._others.ask(context, cache_pb2_grpc.CacheStub, "ListPins", request):
            pins += other.pins
        return cache_pb2.ListPinsResponse(pins=sorted(pins, key=lambda pin: (pin.id, pin.tenant)))

    async def _parse(self, request: cache_pb2.PinPrefixRequest, pin: str) -> ValidatedPin:
        work = partial(parse_pin_request, request, pin, self._driver.model)
        return await self._service.apart(request.ByteSize(), work)


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """What the cluster looks like, to this router and the others."""

    def __init__(self, driver: RouterDriver, others: OtherRouters) -> None:
        self._driver = driver
        self._others = others

    async def GetStatus(  # noqa: N802 gRPC's name
        self, request: cluster_pb2.GetStatusRequest, context: Any
    ) -> cluster_pb2.GetStatusResponse:
        driver = self._driver
        me, others = driver.processes()
        first = responses.process(me)
        first.ClearField("heartbeat_age_ms")
        card, stats = driver.state.card, driver.state.stats()
        status = cluster_pb2.GetStatusResponse(
            processes=[first, *map(responses.process, others)],
            model=responses.model_card(card) if card else None,
            log_dir=str(driver.config.cluster.logs),
            counts=responses.counts(stats),
            bottleneck=responses.bottleneck(stats),
            cluster=driver.config.cluster.name,
            model_name=driver.model.name,
        )
        for other in await self._others.ask(context, cluster_pb2_grpc.ClusterStub, "GetStatus", request):
            add_status(status, other)
        return status

    async def Profile(  # noqa: N802 gRPC's name
        self, request: cluster_pb2.ProfileRequest, context: Any
    ) -> cluster_pb2.ProfileResponse:
        async with typed(context):
            steps = steps_of(request)
            if request.stop:
                path, node = self._driver.stop_profile(request.process)
            else:
                path, node = self._driver.profile(request.process, steps)
            return cluster_pb2.ProfileResponse(path=str(path), node=node, steps=steps)
        raise AssertionError("abort returned")

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Any) -> cluster_pb2.DrainResponse:  # noqa: N802
        async with typed(context):
            worker = responses.process(self._driver.drain(request.worker, request.now, request.undo))
            for other in await self._others.ask(context, cluster_pb2_grpc.ClusterStub, "Drain", request):
                worker.attempts += other.worker.attempts
            return cluster_pb2.DrainResponse(worker=worker)
        raise AssertionError("abort returned")

    async def SetRole(  # noqa: N802 gRPC's name
        self, request: cluster_pb2.SetRoleRequest, context: Any
    ) -> cluster_pb2.SetRoleResponse:
        async with typed(context):
            patience = request.patience_ms / 1_000 if request.HasField("patience_ms") else PATIENCE
            view = self._driver.set_role(request.worker, role_of(request), patience)
            return cluster_pb2.SetRoleResponse(worker=responses.process(view))
        raise AssertionError("abort returned")

    async def Explain(self, request: explain_pb2.ExplainRequest, context: Any) -> explain_pb2.ExplainResponse:  # noqa: N802
        async with typed(context):
            try:
                return responses.explained(*self._driver.explain(request.request_id))
            except RequestNotFound:
                found = await self._others.ask(context, cluster_pb2_grpc.ClusterStub, "Explain", request)
                if not found:
                    raise
                return min(found, key=lambda one: one.request.age_ms)
        raise AssertionError("abort returned")

    async def ListRequests(  # noqa: N802 gRPC's name
        self, request: explain_pb2.ListRequestsRequest, context: Any
    ) -> explain_pb2.ListRequestsResponse:
        count = request.last or _LISTED
        records, now = self._driver.recent(count)
        mine = [responses.request_summary(record, now) for record in records]
        others = await self._others.ask(context, cluster_pb2_grpc.ClusterStub, "ListRequests", request)
        return explain_pb2.ListRequestsResponse(requests=newest(mine, others, count))


class _GrpcServer:
    """A gRPC server with health and reflection beside the services that are added to it."""

    def __init__(
        self, own: Sequence[str], driver: RouterDriver, max_rpcs: int, admit: Admit, *, shared: bool = False
    ) -> None:
        """`own` are the names of its services. `shared`: other routers listen at the same port."""
        self._own = tuple(own)
        limits, tokenizer = driver.model.limits, driver.model.tokenizer
        max_bytes = _OTHER_BYTES + _ID_BYTES * limits.max_context
        max_text = tokenizer.max_bytes(limits.max_context) if tokenizer else 0
        self._guard = MessageGuard(abort, max_rpcs, max_bytes, _TEXTS, admit=admit)
        self.grpc = grpc.aio.server(
            interceptors=(self._guard,),
            maximum_concurrent_rpcs=max_rpcs + _SPARE_RPCS,
            options=[
                ("grpc.max_receive_message_length", max_bytes + max_text),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.max_allowed_incoming_connections", max_rpcs + _SPARE_RPCS),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
                ("grpc.so_reuseport", int(shared)),  # gRPC's own default is 1
            ],
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*own, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)
        self._serving: bool | None = None

    async def start(self, address: str, remedy: str, tls: ServerTls | None = None) -> int:
        """Listen, with TLS if it is given; returns the port, which is 1 for a Unix socket. Raises
        PortInUse, with what to do about it."""
        try:
            bound = (
                self.grpc.add_secure_port(address, _credentials(tls)) if tls else self.grpc.add_insecure_port(address)
            )
        except RuntimeError:
            bound = 0
        if not bound:
            raise PortInUse(f"can't listen on {address}; {remedy}")
        self.set_serving(False)
        await self.grpc.start()
        return bound

    def set_serving(self, serving: bool) -> None:
        """What health checks are told. The router itself answers, so `Cluster` always serves."""
        if serving == self._serving:
            return
        self._serving = serving
        for service in ("", *self._own):
            self._health.set(service, serving=serving or service == CLUSTER)

    @property
    def undecodable(self) -> int:
        """Messages so far that were none."""
        return self._guard.undecodable

    async def stop(self, grace: float) -> None:
        for service in ("", *self._own):
            self._health.set(service, serving=False)
        await self.grpc.stop(grace)


class ClientServer:
    """The public gRPC server: `Generation`, and nothing by which a client could change or watch the cluster."""

    def __init__(self, service: GenerationService, gate: Gatekeeper) -> None:
        max_rpcs = service.driver.config.router.max_concurrent_rpcs
        shared = service.driver.config.cluster.routers > 1
        self._server = _GrpcServer((GENERATION,), service.driver, max_rpcs, partial(_admit, gate, False), shared=shared)
        generation = GenerationServicer(service)
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, self._server.grpc)

    async def start(self, host: str, port: int, tls: ServerTls | None = None) -> str:
        """Listen, with TLS if it is given; returns "host:port". Raises PortInUse."""
        remedy = "stop what listens there or change router.grpc_port"
        bound = await self._server.start(f"{bracketed(host)}:{port}", remedy, tls)
        return f"{bracketed(host)}:{bound}"

    def refuse_connections(self, patience: float) -> None:
        """Stop listening: other processes that listen at the port get what comes from now on, and clients go there with
        their next call. Calls that run may go on for so many seconds."""
        self._ending = asyncio.create_task(self._server.stop(patience))

    def set_serving(self, serving: bool) -> None:
        """What health checks are told."""
        self._server.set_serving(serving)

    @property
    def undecodable(self) -> int:
        """Messages so far that were none."""
        return self._server.undecodable

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)


class OperatorServer:
    """The operator's gRPC servers: `Cluster`, `Cache` and the data of the page at /dashboard, on a Unix socket of this
    user's or on loopback. On loopback a call needs an operator's key, once there are keys.

    A socket's file may be removed while the router lives, such as with $XDG_RUNTIME_DIR when the user logs out. Then
    another server listens anew, and connections to the first one live on."""

    def __init__(
        self, service: GenerationService, gate: Gatekeeper, others: OtherRouters, dashboard: DashboardFeed
    ) -> None:
        self._driver = service.driver
        self._gate = gate
        self._cache, self._cluster = CacheServicer(service, others), ClusterServicer(service.driver, others)
        self._dashboard = dashboard
        self._servers: list[_GrpcServer] = []
        self._path: Path | None = None  # of the socket

    async def start(self, setting: str, cluster: str, router: str) -> str:
        """Listen where `router.operator` says; returns the gRPC target. Raises ConfigError, StartupError, PortInUse."""
        chosen = parse_operator(setting)
        admit = partial(_admit, self._gate, True) if isinstance(chosen, Loopback) else _admit_this_user
        server = _GrpcServer((CLUSTER, CACHE), self._driver, _OPERATOR_RPCS, admit)
        cache_pb2_grpc.add_CacheServicer_to_server(self._cache, server.grpc)
        cluster_pb2_grpc.add_ClusterServicer_to_server(self._cluster, server.grpc)
        read = grpc.unary_unary_rpc_method_handler(self._read, request_deserializer=bytes)
        service_name, _, method = DASHBOARD.strip("/").partition("/")
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, {method: read}),))
        remedy = "stop what listens there or change router.operator"
        if isinstance(chosen, Loopback):
            bound = await server.start(str(chosen), remedy)
            target = str(chosen._replace(port=bound))
        else:
            path = chosen or operator_port.default_path(cluster, router)
            operator_port.prepare(path, is_default=chosen is None)
            target = operator_port.target(path)
            await server.start(target, remedy)
            with contextlib.suppress(FileNotFoundError):  # removed already; see `lost`
                path.chmod(0o600)
            self._path = path
        self._servers.append(server)
        return target

    async def _read(self, asked: bytes, context: Any) -> bytes:
        """A part of the page's data, as JSON, for another router. `asked` is a DashboardAsk as JSON."""
        async with typed(context):
            try:
                ask = msgspec.json.decode(asked, type=DashboardAsk)
            except UNREADABLE:
                raise InvalidRequest("this is no request of a router") from None
            return self._dashboard.read(ask)
        raise AssertionError("abort returned")

    @property
    def lost(self) -> bool:
        """Whether the socket's file has been removed, so that no new connection finds it."""
        return self._path is not None and not os.path.lexists(self._path)

    def set_serving(self, serving: bool) -> None:
        """What health checks are told."""
        for server in self._servers:
            server.set_serving(serving)

    @property
    def undecodable(self) -> int:
        """Messages so far that were none."""
        return sum(server.undecodable for server in self._servers)

    async def stop(self, grace: float) -> None:
        await asyncio.gather(*(server.stop(grace) for server in self._servers))


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Return credentials that use the certificate and the authorities as they are at each handshake."""
    shown = tls.certificate

    def configured() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(shown.key, shown.chain)], tls.client_ca)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if shown is tls.certificate:
            return None
        shown = tls.certificate
        return configured()

    asked = tls.client_ca is not None
    # Its documentation says that None stands for no change. The stubs do not.
    follows: Any = renewed
    return grpc.dynamic_ssl_server_credentials(configured(), follows, require_client_authentication=asked)


def _admit(gate: Gatekeeper, operator: bool, method: str, metadata: Mapping[str, str]) -> Callable[[], None]:
    """Identify the client of an RPC and count the RPC until its end. Raises BatonError."""
    if method.startswith(PREFIXES):
        caller.set(ANONYMOUS)
        return _nothing
    identity = gate.identify(metadata, operator=operator)
    caller.set(identity)
    origin.set(Origin(metadata))
    return gate.enter(identity)


def _admit_this_user(method: str, metadata: Mapping[str, str]) -> Callable[[], None]:
    """Admit every call: the kernel lets this user alone open the socket."""
    caller.set(THIS_USER)
    return _nothing


def _nothing() -> None:
    pass
