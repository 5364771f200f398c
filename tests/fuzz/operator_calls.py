"""The operator's Unix socket: mutated calls of its API, and bytes that are no HTTP.

The user's own calls may drain a worker and change its role. So a worker is named here by no name that it has, and pins
are of short life.
"""

import random
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import msgspec

from baton.operator_api import CALLS, GetStatus, OperatorCall, PinPrefix
from tests.fuzz import sockets, values
from tests.fuzz.case import Case
from tests.fuzz.json_text import Pairs, Schema, encode, mutated

_TTL_MS = (1_500, 1_500, 1_500, -1, 0, 999, 2**70, "x", 1e300)  # of no pin that outlasts the run
_TIMEOUT_MS = 5_000


class OperatorCalls:
    """An operator that holds to nothing."""

    threads = 2

    def __init__(self, operator: str) -> None:
        self._operator = operator
        _, components = msgspec.json.schema_components(CALLS, ref_template="#/components/schemas/{name}")
        self._kinds: dict[str, Any] = dict(components)
        self._schema = Schema({"paths": {}, "components": {"schemas": self._kinds}})

    def run(self, case: Case) -> str:
        return self._no_http(case) if case.rng.random() < 0.1 else self._call(case)

    def _call(self, case: Case) -> str:
        rng = case.rng
        kind = rng.choice([*CALLS])
        path = CALLS[kind][1]
        raw = _request(rng, kind, self._fields(rng, kind))
        with sockets.connect(self._operator) as connection:
            sockets.send(case, connection, raw)
            answer = sockets.reply(connection, raw.partition(b" ")[0].decode())
        assert answer is not None, f"{path} was closed without an answer"
        assert answer.whole, f"{path} had no answer in time"
        if not (kind is PinPrefix and answer.status == 504):
            sockets.check(answer)
        assert answer.status == 200 or "baton-reason" in answer.headers or answer.status == 431, answer
        return f"{path} {answer.status}"

    def _fields(self, rng: random.Random, kind: type[OperatorCall[Any]]) -> Any:
        base: dict[str, Any] = {}
        if kind is PinPrefix:
            base["token_ids"] = [rng.randrange(3, 1_000) for _ in range(rng.choice([16, 40, 100]))]
        fields = mutated(rng, base, self._schema, self._kinds[kind.__name__])
        if isinstance(fields, Pairs):
            fields = dict(fields.pairs) if kind is PinPrefix else fields
        if kind is PinPrefix and isinstance(fields, dict):
            fields |= {"ttl_ms": rng.choice(_TTL_MS), "timeout_ms": _TIMEOUT_MS}
        return fields

    def _no_http(self, case: Case) -> str:
        rng = case.rng
        with sockets.connect(self._operator) as connection:
            raw = _request(rng, GetStatus, {})
            sockets.send(case, connection, values.damaged(rng, raw) if rng.random() < 0.7 else values.data(rng))
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            sockets.drain(connection)
        return "no HTTP"


def _request(rng: random.Random, kind: type[OperatorCall[Any]], fields: Any) -> bytes:
    method, path, _ = CALLS[kind]
    body = b""
    if method == "GET":
        pairs = fields.pairs if isinstance(fields, Pairs) else tuple(fields.items()) if isinstance(fields, dict) else ()
        path += "?" + urlencode([(key, str(each)[:4_000]) for key, each in pairs], errors="surrogatepass")
    else:
        body = encode(fields)
    if rng.random() < 0.03:
        method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD"])
    host = rng.choice(["localhost", "localhost", "localhost", "baton", "[::1]:5", "example.org", ""])
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
