"""The socket on which a router takes requests of its front processes, and a front's own HTTP APIs.

A process of the router's user says that it is a front. It names any client and any time of arrival, asks for the
dashboard's data, and otherwise does what a client of the public gRPC port does. Beside it, clients ask the real front,
whose requests come over the same socket.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import grpc

from baton.v1 import generation_pb2, generation_pb2_grpc
from router.frontend.dashboard_feed import DASHBOARD
from router.frontend.identity import IDENTITY
from router.tracing.origin import ORIGIN
from tests.fuzz import json_text, values
from tests.fuzz.case import Case
from tests.fuzz.grpc_api import ANY_REFUSAL, GENERATE, GrpcApi, mutate, valid_request
from tests.fuzz.http_api import HttpApi

_START = 180.0  # seconds in which the router's worker must have joined
_LIMIT = 60.0  # seconds of a call
_METADATA = 7_000  # bytes that gRPC takes of one call
_ORIGINS: tuple[Any, ...] = (
    {"operation": "chat", "received": 0.0}, {"operation": "", "received": -1e308}, {"operation": "x" * 900},
    {"operation": "text_completion", "received": 1e308}, {"operation": None, "received": "now"}, [], None,
)  # fmt: skip
_DEEP = (b"[" * 5_000, b'{"name":"","x":' + b"[" * 5_000, b'{"a":' * 1_000)
"""Nested more deeply than a decoder goes."""


class FrontLinkCalls(GrpcApi):
    """A front that holds to nothing."""

    threads = 2

    def __init__(self, address: str, operator: str, api: str) -> None:
        """`address` is the gRPC target of the router's link for fronts, `api` host:port of the front's HTTP APIs."""
        super().__init__(address, operator)
        self._http = HttpApi(api, operator)
        self._kinds = (*self._kinds, (30, self._identity), (25, self._dashboard), (40, self._through_the_front))

    def start(self) -> None:
        """Wait until a good request is served."""
        stub = generation_pb2_grpc.GenerationStub(grpc.insecure_channel(self._address))
        request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[5, 6, 7]), max_tokens=1)
        until, refused = time.monotonic() + _START, ""
        while time.monotonic() < until:
            try:
                list(stub.Generate(request, timeout=_LIMIT, metadata=tuple(self._credentials(random.Random(0)))))
                return
            except grpc.RpcError as error:
                refused = str(error)
                time.sleep(0.2)
        raise AssertionError(f"the router behind the link serves nothing: {refused}")

    def _credentials(self, rng: random.Random) -> list[tuple[str, str]]:
        """An identity such as a real front sends, of a client of any name and tenant."""
        client: dict[str, Any] = {"name": rng.choice(["", "", f"key-{rng.randrange(50)}"])}
        if rng.random() < 0.3:
            client |= {"tenant": f"tenant-{rng.randrange(200)}", "max_streams": rng.choice([None, 1, 8])}
        return [(IDENTITY, json.dumps(client))]

    def _identity(self, case: Case) -> str:
        """A good request of a client, or of an arrival, that no front of ours would tell of."""
        rng = case.rng
        identity: Any = rng.choice([
            {"name": ""}, {"name": values.text(rng, 200), "tenant": values.text(rng, 200)},
            {"name": "x", **{limit: values.integer(rng) for limit in ("max_streams", "max_prompt_tokens")}},
            {"name": "x", "max_body_bytes": 1, "max_prompt_tokens": 1, "max_streams": 1}, values.anything(rng),
        ])  # fmt: skip
        metadata = [(IDENTITY, _odd(rng, identity))] * rng.choice([1, 1, 1, 0, 2])
        if rng.random() < 0.5:
            metadata += [(ORIGIN, _odd(rng, rng.choice([*_ORIGINS, values.anything(rng)])))]
        case.notes.append(repr(metadata)[:400])
        request = valid_request(rng)
        mutate(rng, request, rng.choice([0, 0, 1]))
        request.request_id = f"fuzz-{case.number}-{rng.random()}"
        call = self._stream(GENERATE)(case.sending(request.SerializeToString()), timeout=_LIMIT, metadata=metadata)
        code, details = grpc.StatusCode.OK, ""
        try:
            for number, _ in enumerate(call):
                if number > 20:
                    call.cancel()
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        return f"identity {_known(code, details)}"

    def _dashboard(self, case: Case) -> str:
        """Any question about the page's data."""
        rng = case.rng
        part = rng.choice(["snapshot", "history", "request", "request", "x"])
        asked = json.dumps({"part": part, "request": values.text(rng, 60).encode("utf-8", "replace").decode()}).encode()
        if rng.random() < 0.5:
            asked = rng.choice(
                [values.damaged(rng, asked), values.data(rng, 400), json_text.encode(json_text.odd(rng)), *_DEEP]
            )
        read: Any = self._channel().unary_unary(DASHBOARD, request_serializer=bytes, response_deserializer=bytes)
        code, details, answer = grpc.StatusCode.OK, "", b""
        try:
            answer = read(case.sending(asked), timeout=_LIMIT, metadata=self._credentials(rng))
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.OK:
            assert isinstance(json.loads(answer), dict), f"an answer of {answer[:200]!r}"
        return f"dashboard {_known(code, details)}"

    def _through_the_front(self, case: Case) -> str:
        return f"http {self._http.run(case)}"


def _odd(rng: random.Random, said: Any) -> str:
    """JSON as metadata can hold it, whole or damaged."""
    raw = json.dumps(said).encode()
    if rng.random() < 0.3:
        raw = rng.choice([values.damaged(rng, raw), *_DEEP])
    return "".join(chr(byte) for byte in raw if 32 <= byte < 127)[:_METADATA]


def _known(code: grpc.StatusCode, details: str) -> str:
    assert code in ANY_REFUSAL, f"{code}: {details}"
    for word in ("Traceback", "internal error", "object at 0x", 'File "/'):
        assert word not in details, details
    return code.name
