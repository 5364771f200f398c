"""A small client of the public gRPC contract, for the command line, the supervisor and tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import BatonError, ConfigError, Unavailable, all_errors, from_reason
from baton.messages import WorkerRole
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    explain_pb2,
    generation_pb2,
    generation_pb2_grpc,
)

UP = (cluster_pb2.PROCESS_STATE_LIVE, cluster_pb2.PROCESS_STATE_DRAINING)  # states of a running, healthy process
API_KEY = "BATON_API_KEY"
_REASON = "baton-reason"
_NOWHERE = "unix:/dev/null"  # placeholder: no call is made on a channel without an address


class _Keyed(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends an API key with every call."""

    def __init__(self, api_key: str) -> None:
        self._metadata = ("authorization", f"Bearer {api_key}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._keyed(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._keyed(client_call_details), request)

    def _keyed(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), self._metadata])


class Client:
    """A channel to a router's public port, and one to its operator port. The router's errors keep their types here."""

    def __init__(self, address: str = "", operator: str = "", *, api_key: str | None = None) -> None:
        """Open the channels. `address` serves `generate` and health checks, `operator` all other calls.

        Each is a gRPC target. A client with one kind of calls needs only that target. With `operator` alone, health
        checks go there. `api_key`: None takes that of the environment's BATON_API_KEY.
        """
        self.address = address
        self.operator = operator
        # Reconnect to a restarted router within 0.5 s, instead of after gRPC's long back-off.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        options += [("grpc.enable_http_proxy", 0)]
        self._public = grpc.insecure_channel(address or _NOWHERE, options=options)
        self._private = grpc.insecure_channel(operator or _NOWHERE, options=options)
        if key := os.environ.get(API_KEY, "") if api_key is None else api_key:
            self._public = grpc.intercept_channel(self._public, _Keyed(key))
            self._private = grpc.intercept_channel(self._private, _Keyed(key))
        self._cluster = cluster_pb2_grpc.ClusterStub(self._private)
        self._generation = generation_pb2_grpc.GenerationStub(self._public)
        self._cache = cache_pb2_grpc.CacheStub(self._private)
        self._health = health_pb2_grpc.HealthStub(self._public if address else self._private)

    def status(self, timeout: float = 2.0) -> cluster_pb2.GetStatusResponse:
        """Return the cluster's status. Raises BatonError: Unavailable if no router answers."""
        with self._typed():
            return self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=timeout)

    def profile(self, process: str, steps: int = 0, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """Have a worker or store trace its next steps (0: the router's default).

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict while another trace is made.
        """
        with self._typed():
            return self._cluster.Profile(cluster_pb2.ProfileRequest(process=process, steps=steps), timeout=timeout)

    def stop_profile(self, process: str, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """End the trace of a worker or store early; the steps so far are written.

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict if it is not tracing.
        """
        with self._typed():
            return self._cluster.Profile(cluster_pb2.ProfileRequest(process=process, stop=True), timeout=timeout)

    def drain(self, worker: str, *, now: bool = False, undo: bool = False, timeout: float = 5.0) -> cluster_pb2.Process:
        """Stop placing work on a worker, or resume it with `undo`; return the worker's status.

        Raises BatonError: ProcessNotFound if no such worker is live.
        """
        with self._typed():
            asked = cluster_pb2.DrainRequest(worker=worker, now=now, undo=undo)
            return self._cluster.Drain(asked, timeout=timeout).worker

    def set_role(
        self, worker: str, role: WorkerRole, *, patience: float | None = None, timeout: float = 5.0
    ) -> cluster_pb2.Process:
        """Change a worker's role and return its status. Raises BatonError: ProcessNotFound, InvalidRequest.

        After `patience` seconds (None: the router's default) its remaining requests move to other workers.
        """
        wanted = cluster_pb2.ROLE_PREFILL if role == "prefill" else cluster_pb2.ROLE_DECODE
        patience_ms = None if patience is None else round(patience * 1_000)
        with self._typed():
            asked = cluster_pb2.SetRoleRequest(worker=worker, role=wanted, patience_ms=patience_ms)
            return self._cluster.SetRole(asked, timeout=timeout).worker

    def explain(self, request_id: str, timeout: float = 5.0) -> explain_pb2.ExplainResponse:
        """Return the record of a recent request. Raises BatonError: RequestNotFound if there is none."""
        with self._typed():
            return self._cluster.Explain(explain_pb2.ExplainRequest(request_id=request_id), timeout=timeout)

    def requests(self, last: int = 0, timeout: float = 5.0) -> list[explain_pb2.RequestSummary]:
        """Return the last requests, newest first (0: the router's default number). Raises BatonError."""
        with self._typed():
            asked = explain_pb2.ListRequestsRequest(last=last)
            return list(self._cluster.ListRequests(asked, timeout=timeout).requests)

    def serving(self, timeout: float = 2.0) -> bool:
        """Whether the router reports that the cluster serves; False if it does not answer."""
        try:
            response = self._health.Check(  # pyright: ignore[reportAttributeAccessIssue] - the package has no stubs
                health_pb2.HealthCheckRequest(), timeout=timeout
            )
        except grpc.RpcError:
            return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def answers(self, timeout: float = 1.0) -> bool:
        """Whether the router answers a health check at all, serving or not."""
        try:
            self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.RpcError:
            return False
        return True

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout: float | None = None
    ) -> Iterator[generation_pb2.GenerateResponse]:
        """Send a request and yield its stream. Closing the iterator cancels the request. Raises BatonError."""
        if not self.address:
            raise ConfigError("this client knows no router's public port; give it one: Client(address)")
        call = self._generation.Generate(request, timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            raise typed(error, self.address) from None
        finally:
            call.cancel()

    def pin_prefix(
        self, request: cache_pb2.PinPrefixRequest, timeout: float | None = None
    ) -> cache_pb2.PinPrefixResponse:
        """Compute and pin a prefix; return once it is pinned. Raises BatonError."""
        with self._typed():
            return self._cache.PinPrefix(request, timeout=timeout)

    def unpin(self, pin: str, tenant: str = "", timeout: float = 5.0) -> None:
        """End a pin of a tenant. Raises BatonError: PinNotFound if there is none of that name."""
        with self._typed():
            self._cache.UnpinPrefix(cache_pb2.UnpinPrefixRequest(id=pin, tenant=tenant), timeout=timeout)

    def pins(self, timeout: float = 5.0) -> list[cache_pb2.Pin]:
        """Return all pins, ordered by name. Raises BatonError."""
        with self._typed():
            return list(self._cache.ListPins(cache_pb2.ListPinsRequest(), timeout=timeout).pins)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        if not self.operator:
            raise ConfigError("this client knows no router's operator port; give it one: Client(address, operator)")
        try:
            yield
        except grpc.RpcError as error:
            raise typed(error, self.operator) from None

    def close(self) -> None:
        self._public.close()
        self._private.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def typed(error: grpc.RpcError, address: str) -> BatonError:
    """Return the error that the router raised, by its reason or else by its gRPC status."""
    if not isinstance(error, grpc.Call):
        return Unavailable(f"the router at {address} can't be reached: {error}")
    details = error.details() or ""
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # pyright: ignore[reportAssignmentType]
    if reason := dict(metadata).get(_REASON):
        return from_reason(str(reason), details)
    name = error.code().name
    if name == "UNAVAILABLE":
        return Unavailable(f"no router answers at {address} ({details}); `baton status` tells whether it runs")
    if name == "UNIMPLEMENTED":
        return ConfigError(
            f"the port {address} does not serve that: Cluster and Cache are on a router's operator port, Generation is "
            "on its public one; `baton status --json` tells both"
        )
    if name == "DEADLINE_EXCEEDED":
        return Unavailable(f"the router at {address} did not answer in time")
    kind = next((kind for kind in all_errors() if kind.status == name), BatonError)
    return kind(f"{name}: {details}")
