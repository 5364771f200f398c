"""The gRPC front door: `Generation` of `proto/baton/v1`, with health and reflection beside it.

Owns the server and what it admits. `grpc_calls` streams output and turns errors into statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.api_keys import ANONYMOUS
from baton.doors import ServerTls
from baton.errors import PortInUse
from baton.hosts import bracketed
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.frontend.generation import GenerationService
from router.frontend.grpc_api.grpc_calls import LINGER, GenerateCall, abort
from router.frontend.grpc_api.message_guard import OPEN_CALLS, HealthServicer, MessageGuard
from router.frontend.identity import Gatekeeper, caller
from router.tracing.origin import Origin, origin

_ID_BYTES = 6  # of one token id in a message: at most 5, and a tag where a client does not pack them
# of all other fields of a message together: a grammar has up to 512 KiB, stop strings 64,000
_OTHER_BYTES = 640 * 2**10
_SPARE_RPCS = 1_024  # beyond router.max_concurrent_rpcs: open calls, refusals, and ends that clients do not read
_MAX_STREAMS = 1_024  # of one connection; gRPC's clients wait with more
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 60_000, 20_000  # a client whose machine or process stands still is let go
_HANDSHAKE_MS = 10_000  # in which a new connection's TLS and first HTTP/2 frame must have come
_IDLE_MS = 120_000  # that a connection may have no call; gRPC's clients then connect anew without being told
_TEXTS: Mapping[str, Sequence[int]] = {  # the fields that hold a prompt's text
    "/baton.v1.Generation/Generate": (2,)
}
GENERATION = "baton.v1.Generation"


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Streams of tokens."""

    def __init__(self, service: GenerationService, linger: float = LINGER) -> None:
        self._service = service
        self._linger = linger

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802 gRPC's name
        await GenerateCall(self._service, request, context, self._linger).serve()


class ClientServer:
    """The public gRPC server: `Generation`, health and reflection, and nothing by which a client could change or watch
    the cluster."""

    def __init__(self, service: GenerationService, gate: Gatekeeper) -> None:
        driver = service.driver
        max_rpcs = driver.config.router.max_concurrent_rpcs
        context, max_text = service.most_bytes
        max_bytes = _OTHER_BYTES + _ID_BYTES * context
        self._guard = MessageGuard(abort, max_rpcs, max_bytes, _TEXTS, admit=partial(_admit, gate))
        self._grpc = grpc.aio.server(
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
                ("grpc.so_reuseport", int(driver.config.cluster.routers > 1)),  # gRPC's own default is 1
            ],
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(service), self._grpc)
        names = (GENERATION, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self._serving: bool | None = None

    async def start(self, host: str, port: int, tls: ServerTls | None = None) -> str:
        """Listen, with TLS if it is given; returns "host:port". Raises PortInUse."""
        address, server = f"{bracketed(host)}:{port}", self._grpc
        try:
            bound = server.add_secure_port(address, _credentials(tls)) if tls else server.add_insecure_port(address)
        except RuntimeError:
            bound = 0
        if not bound:
            raise PortInUse(f"can't listen on {address}; stop what listens there or change router.grpc_port")
        self.set_serving(False)
        await server.start()
        return f"{bracketed(host)}:{bound}"

    def refuse_connections(self, patience: float) -> None:
        """Stop listening: other processes that listen at the port get what comes from now on, and clients go there with
        their next call. Calls that run may go on for so many seconds."""
        self._ending = asyncio.create_task(self.stop(patience))

    def set_serving(self, serving: bool) -> None:
        """What health checks are told."""
        if serving == self._serving:
            return
        self._serving = serving
        for service in ("", GENERATION):
            self._health.set(service, serving=serving)

    @property
    def undecodable(self) -> int:
        """Messages so far that were none."""
        return self._guard.undecodable

    async def stop(self, grace: float) -> None:
        for service in ("", GENERATION):
            self._health.set(service, serving=False)
        await self._grpc.stop(grace)


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

    mutual = tls.client_ca is not None
    # Its documentation says that None stands for no change. The stubs do not.
    follows: Any = renewed
    return grpc.dynamic_ssl_server_credentials(configured(), follows, require_client_authentication=mutual)


def _admit(gate: Gatekeeper, method: str, metadata: Mapping[str, str]) -> Callable[[], None]:
    """Identify the client of an RPC and count the RPC until its end. Raises BatonError."""
    if method.startswith(OPEN_CALLS):
        caller.set(ANONYMOUS)
        return lambda: None
    identity = gate.identify(metadata)
    caller.set(identity)
    origin.set(Origin(metadata))
    return gate.enter(identity)
