"""The public gRPC port: mutated messages, metadata and calls, clients that go away, and bytes that are no HTTP/2."""

import random
import struct
import threading
import time
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from baton.client import Client
from baton.errors import BatonError
from baton.v1 import generation_pb2
from tests.fuzz import sockets, values
from tests.fuzz.case import Case

_PATIENCE = 8.0  # seconds until a client goes away from a stream that goes on
_LIMIT = 60.0  # seconds in which a call that has no deadline of its own must have ended
GENERATE = "/baton.v1.Generation/Generate"
_METHODS = (
    "/baton.v1.Generation/Nothing", "/baton.v1.Cluster/GetStatus", "/baton.v1.Cluster/Drain", "/a/b", "/", "//", "",
    "/baton.v1.Generation/", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/x" * 2_000,
)  # fmt: skip
_CODES = grpc.StatusCode
ANY_REFUSAL = frozenset(
    {
        _CODES.OK, _CODES.INVALID_ARGUMENT, _CODES.NOT_FOUND, _CODES.RESOURCE_EXHAUSTED, _CODES.OUT_OF_RANGE,
        _CODES.FAILED_PRECONDITION, _CODES.CANCELLED, _CODES.UNIMPLEMENTED, _CODES.UNAUTHENTICATED,
        _CODES.PERMISSION_DENIED,
    }
)  # fmt: skip
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class GrpcApi:
    """A client that holds to nothing."""

    threads = 4

    def __init__(self, address: str, operator: str) -> None:
        self._address, self._operator = address, operator
        self._local = threading.local()
        self._kinds = (
            (45, self._request), (12, self._bytes), (10, self._method), (10, self._metadata), (13, self._going_away),
            (10, self._http2),
        )  # fmt: skip

    def run(self, case: Case) -> str:
        weights, kinds = zip(*self._kinds, strict=True)
        (kind,) = case.rng.choices(kinds, weights)
        return kind(case)

    def _credentials(self, rng: random.Random) -> list[tuple[str, str]]:
        """Metadata that every call brings."""
        return []

    # --- calls -------------------------------------------------------------------------------------------------------

    def _request(self, case: Case) -> str:
        rng = case.rng
        request = valid_request(rng)
        mutate(rng, request, rng.choice([1, 1, 2, 3, 6]))
        request.request_id = name = request.request_id if rng.random() < 0.05 else f"fuzz-{case.number}-{rng.random()}"
        return f"request {self._call(case, GENERATE, request.SerializeToString(), name=name)}"

    def _bytes(self, case: Case) -> str:
        """Bytes that are no request, or almost one."""
        rng = case.rng
        raw = valid_request(rng).SerializeToString()
        raw = values.damaged(rng, raw) if rng.random() < 0.7 else values.data(rng)
        return f"bytes {self._call(case, GENERATE, raw)}"

    def _method(self, case: Case) -> str:
        """Calls of methods that there are not, or that are not of this kind."""
        rng = case.rng
        method = rng.choice([*_METHODS, "/" + values.text(rng, 30).encode("ascii", "ignore").decode()])
        raw = rng.choice([b"", health_pb2.HealthCheckRequest(service=rng.choice(["", "x"])).SerializeToString()])
        raw = rng.choice([raw, valid_request(rng).SerializeToString(), values.data(rng, 400)])
        deadline = 2.0 if method.endswith(("Watch", "Info")) else None
        return f"method {self._call(case, method, raw, deadline)}"

    def _metadata(self, case: Case) -> str:
        """Metadata of any size, and deadlines that have passed."""
        rng = case.rng
        keys = [
            "x-request-id",
            "authorization",
            "x-api-key",
            "x",
            "baton-reason",
            "grpc-foo",
            "te-x",
            "k-bin",
            "a" * 300,
        ]
        metadata = [
            (key, rng.randbytes(rng.randrange(300)) if key.endswith("-bin") else rng.choice(["", "v", "z" * 700]))
            for key in (rng.choice(keys) for _ in range(rng.choice([1, 2, 10])))
        ]
        deadline = rng.choice([None, None, 0.0, 1e-6, 0.001, 0.05, 1e6])
        name = f"fuzz-{case.number}-{rng.random()}"
        raw = generation_pb2.GenerateRequest(token_ids=_ids(rng), max_tokens=8, request_id=name).SerializeToString()
        return f"metadata {self._call(case, GENERATE, raw, deadline, metadata, name)}"

    def _going_away(self, case: Case) -> str:
        """A stream that is cancelled at a random moment."""
        rng = case.rng
        request = generation_pb2.GenerateRequest(
            token_ids=_ids(rng), max_tokens=600, ignore_eos=True, logprobs=rng.choice([0, 5, 20])
        )
        raw = case.sending(request.SerializeToString())
        call = self._stream(GENERATE)(raw, timeout=_LIMIT, metadata=self._credentials(rng))
        timer = threading.Timer(rng.choice([0.0, 0.002, 0.02, 0.1, 0.6]), call.cancel)
        timer.start()
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            timer.cancel()
        finally:
            timer.join()
        code = call.code()
        assert code in (_CODES.OK, _CODES.CANCELLED, _CODES.RESOURCE_EXHAUSTED), f"{code}: {call.details()}"
        return f"gone {code.name}"

    def _call(
        self,
        case: Case,
        method: str,
        raw: bytes,
        deadline: float | None = None,
        metadata: list[tuple[str, Any]] | None = None,
        name: str = "",
    ) -> str:
        """Make a call to its end, or leave it once it has generated for long enough."""
        case.sending(raw)
        limit = _LIMIT if deadline is None else min(deadline, _LIMIT)
        call = self._stream(method)(raw, timeout=deadline, metadata=[*self._credentials(case.rng), *(metadata or [])])
        left, known = threading.Event(), list[bool]()
        asks = deadline is None and bool(name) and method == GENERATE
        read = 0

        def leave() -> None:
            if asks and not read:
                known.append(self._known(case, name, call))
            left.set()
            call.cancel()

        timers = [threading.Timer(_PATIENCE, leave)]
        for timer in timers:
            timer.start()
        start = time.monotonic()
        try:
            for piece in call:
                read += len(piece)
            code, details = call.code(), call.details() or ""
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        finally:
            for timer in timers:
                timer.cancel()
        took = time.monotonic() - start
        assert took < limit + 30 + _LIMIT, f"{method} took {took:.1f} s"
        if left.is_set():
            assert all(known), f"a call had no answer, and the router does not know of it: {name}"
            return "left"
        if deadline is not None and code is _CODES.DEADLINE_EXCEEDED:
            return "late"
        assert code in ANY_REFUSAL, f"{method} got {code}: {details}"
        assert code is not _CODES.CANCELLED, f"{method} was cancelled: {details}"
        for word in ("Traceback", "internal error", "object at 0x", 'File "/'):
            assert word not in details, f"{method} got {details}"
        return code.name

    def _known(self, case: Case, name: str, call: Any) -> bool:
        """Whether the router knows a call that had no word until now, or has answered it meanwhile. It is not cancelled
        before: a call that ends while a busy machine has not read it yet is never known."""
        until = time.monotonic() + _LIMIT
        with Client(operator=self._operator) as client:
            while time.monotonic() < until and not call.done():
                try:
                    return client.explain(name, timeout=30).request.state != "unspecified"
                except BatonError as error:
                    case.notes.append(f"a call had no answer, and the router says {error}")
                    time.sleep(0.5)
        return call.done()

    def _stream(self, method: str) -> Any:
        return self._channel().unary_stream(method, request_serializer=bytes, response_deserializer=bytes)

    def _channel(self) -> grpc.Channel:
        """This thread's channel, now and then a new one."""
        channel: grpc.Channel | None = getattr(self._local, "channel", None)
        if channel is None or self._local.calls > 200:
            if channel is not None:
                channel.close()
            options = [
                ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0),
                ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
            ]  # fmt: skip
            channel = self._local.channel = grpc.insecure_channel(self._address, options=options)
            self._local.calls = 0
        self._local.calls += 1
        return channel

    # --- HTTP/2 ------------------------------------------------------------------------------------------------------

    def _http2(self, case: Case) -> str:
        """Frames that are none, or not in turn. The server may close at once, and must when our side is closed."""
        rng = case.rng
        raw = _PREFACE if rng.random() < 0.9 else values.data(rng)
        raw += frame(4, 0, 0, b"") if rng.random() < 0.8 else b""
        for _ in range(rng.choice([1, 2, 5, 40])):
            raw += _odd_frame(rng)
        if rng.random() < 0.3:
            raw = values.damaged(rng, raw)
        with sockets.connect(self._address) as connection:
            sockets.send(case, connection, raw)
            with suppress(OSError):
                connection.shutdown(1)
            sockets.drain(connection)
        return "http2"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _odd_frame(rng: random.Random) -> bytes:
    stream = rng.choice([0, 1, 1, 3, 2, 2**31 - 1, rng.randrange(100)])
    match rng.randrange(9):
        case 0:  # DATA without a stream
            return frame(0, rng.choice([0, 1, 8, 9]), stream, values.data(rng, 300))
        case 1:  # HEADERS, some of them of gRPC
            block = b"\x83\x86\x44\x1f" + GENERATE.encode() if rng.random() < 0.5 else values.data(rng, 200)
            return frame(1, rng.choice([0, 4, 5, 0x25]), stream, block)
        case 2:  # RST_STREAM
            return frame(3, 0, stream, rng.randbytes(rng.choice([4, 4, 3, 0])))
        case 3:  # SETTINGS, with values out of range
            settings = b"".join(
                struct.pack(">HI", rng.randrange(8), rng.choice([0, 1, 2**31, 2**32 - 1])) for _ in "ab"
            )
            return frame(4, rng.choice([0, 1]), rng.choice([0, 0, stream]), settings)
        case 4:  # PING
            return frame(6, rng.choice([0, 1]), 0, rng.randbytes(rng.choice([8, 8, 7])))
        case 5:  # WINDOW_UPDATE, also beyond any window
            return frame(8, 0, stream, struct.pack(">I", rng.choice([0, 1, 2**31 - 1])))
        case 6:  # CONTINUATION of nothing
            return frame(9, rng.choice([0, 4]), stream, values.data(rng, 100))
        case 7:  # PUSH_PROMISE, PRIORITY, GOAWAY
            return frame(rng.choice([2, 5, 7]), 0, stream, values.data(rng, 60))
        case _:
            return frame(rng.randrange(256), rng.randrange(256), stream, values.data(rng, 500))


# --- messages ---------------------------------------------------------------------------------------------------------


def _ids(rng: random.Random) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(ids=[rng.randrange(3, 1_000) for _ in range(rng.choice([1, 16, 17, 40, 100]))])


def valid_request(rng: random.Random) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(max_tokens=rng.choice([1, 4, 12]))
    if rng.random() < 0.7:
        request.token_ids.CopyFrom(_ids(rng))
    else:
        request.text = "bonfan korles dimin taras"
    return request


def mutate(rng: random.Random, message: Any, times: int) -> None:
    """Give fields of a message values at their edges, or clear them. Fields that come later are found as well."""
    for _ in range(times):
        field: FieldDescriptor = rng.choice(list(message.DESCRIPTOR.fields))
        if rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            _set(rng, message, field)


def _set(rng: random.Random, message: Any, field: FieldDescriptor) -> None:
    kind: Descriptor | None = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        entries = getattr(message, field.name)
        for _ in range(rng.choice([1, 3, 2_000])):
            with suppress(TypeError, ValueError):
                entries[_scalar(rng, kind.fields_by_name["key"])] = _scalar(rng, kind.fields_by_name["value"])
    elif kind is not None and field.is_repeated:
        for _ in range(rng.choice([1, 2, 30])):
            mutate(rng, getattr(message, field.name).add(), 2)
    elif kind is not None:
        inner: Message = getattr(message, field.name)
        inner.SetInParent()
        mutate(rng, inner, rng.randrange(4))
    elif field.is_repeated:
        values_of = getattr(message, field.name)
        del values_of[:]
        values_of.extend(_scalar(rng, field) for _ in range(rng.choice([0, 1, 2, 17, 300, 5_000])))
    else:
        setattr(message, field.name, _scalar(rng, field))


_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _BOUNDS:
        low, high = _BOUNDS[kind]
        return min(max(values.integer(rng), low), high)
    match kind:
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return values.real(rng)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([0, 1, 2, 3, 99, 2**31 - 1])
        case _ if field.type == FieldDescriptor.TYPE_BYTES:
            return values.data(rng)
        case _:
            return values.text(rng).encode("utf-8", "replace").decode()
