"""The operator's Unix socket: mutated calls of `Cluster` and `Cache`, and bytes that are no HTTP/2.

The user's own calls may drain a worker and change its role. So a worker is named here by no name that it has, and pins
are of short life.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Any

import grpc

from baton.v1 import cache_pb2, cluster_pb2, explain_pb2
from tests.fuzz import sockets, values
from tests.fuzz.case import Case
from tests.fuzz.grpc_api import ANY_REFUSAL, frame, mutate

_LIMIT = 60.0  # seconds of a call
_CLUSTER, _CACHE = "/baton.v1.Cluster/", "/baton.v1.Cache/"
_CALLS: dict[str, Any] = {
    f"{_CLUSTER}GetStatus": cluster_pb2.GetStatusRequest,
    f"{_CLUSTER}Profile": cluster_pb2.ProfileRequest,
    f"{_CLUSTER}Explain": explain_pb2.ExplainRequest,
    f"{_CLUSTER}ListRequests": explain_pb2.ListRequestsRequest,
    f"{_CLUSTER}Drain": cluster_pb2.DrainRequest,
    f"{_CLUSTER}SetRole": cluster_pb2.SetRoleRequest,
    f"{_CACHE}PinPrefix": cache_pb2.PinPrefixRequest,
    f"{_CACHE}UnpinPrefix": cache_pb2.UnpinPrefixRequest,
    f"{_CACHE}ListPins": cache_pb2.ListPinsRequest,
}
_TTL_MS = 1_500


class OperatorCalls:
    """An operator that holds to nothing."""

    threads = 2

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._channel = grpc.insecure_channel(operator, options=[("grpc.max_receive_message_length", -1)])

    def run(self, case: Case) -> str:
        return self._http2(case) if case.rng.random() < 0.1 else self._call(case)

    def _call(self, case: Case) -> str:
        rng = case.rng
        method = rng.choice(list(_CALLS))
        message = _CALLS[method]()
        if method.endswith("PinPrefix") and not method.endswith("UnpinPrefix"):
            message.token_ids.ids.extend(rng.randrange(3, 1_000) for _ in range(rng.choice([16, 40, 100])))
        fields = message.DESCRIPTOR.fields
        mutate(rng, message, rng.randrange(5) if fields else 0)
        if isinstance(message, cache_pb2.PinPrefixRequest) and _lasts_long(message):
            message.ttl_ms = _TTL_MS
        raw = message.SerializeToString()
        if rng.random() < 0.1 and not method.endswith(("Drain", "SetRole", "PinPrefix")):
            raw = values.damaged(rng, raw)
        call = self._channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        deadline = rng.choice([_LIMIT, _LIMIT, _LIMIT, 0.01])
        code, details = grpc.StatusCode.OK, ""
        try:
            call(case.sending(raw), timeout=deadline)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline < _LIMIT:
            return f"{method} late"
        assert code in ANY_REFUSAL, f"{method} got {code}: {details}"
        assert "internal error" not in details, f"{method} got {details}"
        return f"{method} {code.name}"

    def _http2(self, case: Case) -> str:
        rng = case.rng
        with sockets.connect(self._operator) as connection:
            raw = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + _frames(rng)
            sockets.send(case, connection, values.damaged(rng, raw) if rng.random() < 0.5 else raw)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            sockets.drain(connection)
        return "http2"


def _lasts_long(message: cache_pb2.PinPrefixRequest) -> bool:
    """Whether a pin would outlast the run."""
    return not message.HasField("ttl_ms") or _TTL_MS < message.ttl_ms <= 7 * 24 * 3_600_000


def _frames(rng: random.Random) -> bytes:
    return b"".join(
        frame(rng.randrange(12), rng.randrange(256), rng.choice([0, 1, 3]), values.data(rng, 200))
        for _ in range(rng.randrange(9))
    )
