"""A small client of the public gRPC contract, for the command line, the supervisor and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

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

UP = (cluster_pb2.PROCESS_STATE_LIVE, cluster_pb2.PROCESS_STATE_DRAINING)  # the process is there, and well
_REASON = "baton-reason"
_NOWHERE = "unix:/dev/null"  # no call is made on a channel that has no address


class Client:
    """A channel to a router's public port, and one to its operator's. Errors come back as the types they were raised as
    there."""

    def __init__(self, address: str = "", operator: str = "") -> None:
        """`address` is for `generate` and health checks, `operator` for all other calls. Each is a gRPC target, and a
        client that makes only one kind of calls needs only that one. With `operator` alone, health is asked there."""
        self.address = address
        self.operator = operator
        # A router that is restarted on the same port is found again at once, not after gRPC's long back-off.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        options += [("grpc.enable_http_proxy", 0)]
        self._public = grpc.insecure_channel(address or _NOWHERE, options=options)
        self._private = grpc.insecure_channel(operator or _NOWHERE, options=options)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._private)
        self._generation = generation_pb2_grpc.GenerationStub(self._public)
        self._cache = cache_pb2_grpc.CacheStub(self._private)
        self._health = health_pb2_grpc.HealthStub(self._public if address else self._private)

    def status(self, timeout: float = 2.0) -> cluster_pb2.GetStatusResponse:
        """Raises BatonError: Unavailable when no router answers."""
        with self._typed():
            return self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=timeout)

    def profile(self, process: str, steps: int = 0, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """Have a worker or store trace its next steps (0: the router's default). Raises BatonError: ProcessNotFound
        when none of that name is live, TraceConflict while another trace is made."""
        with self._typed():
            return self._cluster.Profile(cluster_pb2.ProfileRequest(process=process, steps=steps), timeout=timeout)

    def stop_profile(self, process: str, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """End the trace that a worker or store makes; what there is of it is written. Raises BatonError:
        ProcessNotFound when none of that name is live, TraceConflict when it makes none."""
        with self._typed():
            return self._cluster.Profile(cluster_pb2.ProfileRequest(process=process, stop=True), timeout=timeout)

    def drain(self, worker: str, *, now: bool = False, undo: bool = False, timeout: float = 5.0) -> cluster_pb2.Process:
        """Have a worker be given nothing new, or work again; returns how it is now. Raises BatonError: ProcessNotFound
        when none of that name is live."""
        with self._typed():
            asked = cluster_pb2.DrainRequest(worker=worker, now=now, undo=undo)
            return self._cluster.Drain(asked, timeout=timeout).worker

    def set_role(
        self, worker: str, role: WorkerRole, *, patience: float | None = None, timeout: float = 5.0
    ) -> cluster_pb2.Process:
        """Have a worker be the other kind of worker, with what it has moved elsewhere after `patience` seconds (none:
        the router's default); returns how it is now. Raises BatonError: ProcessNotFound, InvalidRequest."""
        wanted = cluster_pb2.ROLE_PREFILL if role == "prefill" else cluster_pb2.ROLE_DECODE
        patience_ms = None if patience is None else round(patience * 1_000)
        with self._typed():
            asked = cluster_pb2.SetRoleRequest(worker=worker, role=wanted, patience_ms=patience_ms)
            return self._cluster.SetRole(asked, timeout=timeout).worker

    def explain(self, request_id: str, timeout: float = 5.0) -> explain_pb2.ExplainResponse:
        """Why a recent request was served as it was. Raises BatonError: RequestNotFound when nobody remembers it."""
        with self._typed():
            return self._cluster.Explain(explain_pb2.ExplainRequest(request_id=request_id), timeout=timeout)

    def requests(self, last: int = 0, timeout: float = 5.0) -> list[explain_pb2.RequestSummary]:
        """The last requests, newest first (0: the router's default). Raises BatonError."""
        with self._typed():
            asked = explain_pb2.ListRequestsRequest(last=last)
            return list(self._cluster.ListRequests(asked, timeout=timeout).requests)

    def serving(self, timeout: float = 2.0) -> bool:
        """Whether the router says that the cluster serves; a router that does not answer doesn't."""
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
        """The stream of one request. Closing the iterator cancels it. Raises BatonError."""
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
        """Have a prefix computed and pinned; returns once it is. Raises BatonError."""
        with self._typed():
            return self._cache.PinPrefix(request, timeout=timeout)

    def unpin(self, pin: str, timeout: float = 5.0) -> None:
        """End a pin. Raises BatonError: PinNotFound when there is none of that name."""
        with self._typed():
            self._cache.UnpinPrefix(cache_pb2.UnpinPrefixRequest(id=pin), timeout=timeout)

    def pins(self, timeout: float = 5.0) -> list[cache_pb2.Pin]:
        """What is pinned, by name. Raises BatonError."""
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
    """The error that the router raised, told by its reason; without one, by its status."""
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
