"""Attacks of `tests/soak/attacks.py` on the gRPC port by clients without a key: what they hold must stay bounded."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.http2 import PREFACE, Http2Client

_WATCH = "/grpc.health.v1.Health/Watch"
# The last one where many are refused at a time: gRPC for Python ends some before their status is sent.
_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
_BEGINNINGS = (b"", PREFACE[:10], PREFACE, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


def held_streams(grpc_address: str, connections: int, each: int) -> Iterator[str]:
    """Hold so many Watch and reflection streams on each of so many connections; begin anew what the router ends. As
    many connections more watch and read nothing."""
    channels = [grpc.insecure_channel(grpc_address, options=[*_OWN, ("n", n)]) for n in range(connections)]
    deaf = [Http2Client(grpc_address) for _ in range(connections)]
    for client in deaf:
        for number in range(each):
            client.call(_WATCH, b"", 2 * number + 1)
    health: list[Any] = [health_pb2_grpc.HealthStub(channel) for channel in channels]
    reflection: list[Any] = [reflection_pb2_grpc.ServerReflectionStub(channel) for channel in channels]
    probe = health_pb2.HealthCheckRequest()
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    calls: dict[int, Any] = {}
    while True:
        for number in range(connections * each):
            call = calls.get(number)
            if call is not None and call.is_active():
                continue
            if call is not None:
                code = call.code()
                assert code in _REFUSED, code
                yield f"ended {code.name}"
            here = number % connections
            talk = number % 3 == 0
            calls[number] = (
                reflection[here].ServerReflectionInfo(iter([question])) if talk else health[here].Watch(probe)
            )
            yield "begun"
        time.sleep(1.0)
        yield ""


def unspoken_connections(grpc_address: str, count: int) -> Iterator[str]:
    """Keep so many connections open that never get as far as HTTP/2; replace those that the router closes."""
    host, _, port = grpc_address.rpartition(":")
    sockets: list[socket.socket] = []
    beginnings = cycle(_BEGINNINGS)
    while True:
        for one in [one for one in sockets if closed(one)]:
            one.close()
            sockets.remove(one)
            yield "closed by the router"
        for _ in range(min(20, count - len(sockets))):
            with suppress(OSError):
                sockets.append(socket.create_connection((host.strip("[]"), int(port)), timeout=1))
                sockets[-1].sendall(next(beginnings))
                sockets[-1].setblocking(False)
                yield "opened"
        time.sleep(0.1)
        yield ""


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection; what it has sent is dropped."""
    try:
        return connection.recv(4_096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
