"""The HTTP API: mutated bodies on every path, broken HTTP, and clients that stop, stall or go away."""

import http.client
import json
import random
import secrets
import time
from contextlib import suppress
from typing import Any

from baton.client import Client
from baton.errors import BatonError
from tests.fuzz import json_text, sockets, values
from tests.fuzz.case import Case
from tests.fuzz.json_text import Schema, encode, mutated

_PATIENCE = 8.0  # seconds until a client goes away from an answer that still comes
_WORDS = "bonfan korles dimin taras"
_MESSAGES = [{"role": "system", "content": "ba"}, {"role": "user", "content": _WORDS}]
_BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": _WORDS, "max_tokens": 6, "seed": 1},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_completion_tokens": 6},
    "/v1/messages": {"model": "", "messages": _MESSAGES[1:], "max_tokens": 6},
    "/v1/responses": {"input": _WORDS, "max_output_tokens": 6},
    "/tokenize": {"prompt": _WORDS},
    "/detokenize": {"tokens": [5, 6, 7]},
}
_PARAMETERS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}}
_FUNCTION = {"name": "f", "description": _WORDS, "parameters": _PARAMETERS}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required",
        "messages": [
            *_MESSAGES, {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning": _WORDS},
            {"role": "tool", "tool_call_id": "c", "content": _WORDS},
        ],
    },
    "/v1/messages": {
        "tools": [{"name": "f", "input_schema": _PARAMETERS}], "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 1_024},
        "messages": [
            *_MESSAGES[1:],
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": _WORDS, "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": _WORDS}]},
        ],
    },
    "/v1/responses": {
        "tools": [{"type": "function", **_FUNCTION}], "tool_choice": {"type": "function", "name": "f"},
        "input": [
            {"role": "user", "content": _WORDS},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": _WORDS}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": _WORDS},
        ],
    },
}  # fmt: skip
_METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "PATCH",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "get",
    "X",
    "",
    "PRI",
    "P\0",
)
_HEADERS = (
    "Content-Type", "Content-Length", "Transfer-Encoding", "Host", "Connection", "Expect", "Upgrade", "X-Request-Id",
    "X-Session-ID", "Authorization", "x-api-key", "Cookie", "Accept-Encoding", "Content-Encoding", "Range", "Origin",
    "anthropic-version", "Via", "Forwarded", "X-Forwarded-For", "TE", "Trailer", "Keep-Alive", "HTTP2-Settings",
)  # fmt: skip
_VALUES = (
    "", " ", "0", "-1", "1e3", "99999999999999999999", "chunked", "gzip, chunked", "identity", "close", "keep-alive",
    "100-continue", "websocket", "h2c", "application/json", "text/plain", "application/json; charset=utf-16",
    "\xe9\xff", "a" * 9_000, "bytes=0-", "Bearer x", "*", "\t", "x\x0by",
)  # fmt: skip


class HttpApi:
    """A client that holds to nothing."""

    threads = 4

    def __init__(self, address: str, operator: str) -> None:
        """`operator` tells whether a request whose answer has not ended is really being served."""
        self._address = address
        self._operator = operator
        host, _, port = address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/openapi.json")
        self._schema = Schema(json.loads(connection.getresponse().read()))
        connection.close()
        self._posts = [path for path in self._schema.paths if self._schema.body_of(path)]
        self._paths = [*self._schema.paths, "/openapi.json", "/v1/models/x"]
        self._kinds = (
            (45, self._body), (8, self._bytes), (12, self._head), (8, self._route), (5, self._pipelined),
            (8, self._framing), (8, self._going_away), (6, self._slow),
        )  # fmt: skip

    def run(self, case: Case) -> str:
        weights, kinds = zip(*self._kinds, strict=True)
        (kind,) = case.rng.choices(kinds, weights)
        return kind(case)

    # --- whole requests ----------------------------------------------------------------------------------------------

    def _body(self, case: Case) -> str:
        """A body with fields that are not as they must be. The server must answer, whatever it says."""
        path = case.rng.choice(self._posts)
        return f"{path} {self._exchange(case, path, self._json(case.rng, path))}"

    def _bytes(self, case: Case) -> str:
        """A body that is no JSON."""
        rng, path = case.rng, case.rng.choice(self._posts)
        body = encode(self._base(rng, path))
        match rng.randrange(4):
            case 0:
                body = values.damaged(rng, body)
            case 1:
                body = values.data(rng)
            case 2:
                body = body.decode().encode(rng.choice(["utf-16", "utf-32", "utf-7", "utf-8-sig", "cp500"]))
            case _:
                body = body[: rng.randrange(len(body))]
        return f"no JSON {self._exchange(case, path, body)}"

    def _route(self, case: Case) -> str:
        """Any method on any path."""
        rng = case.rng
        method = rng.choice(_METHODS[:8])
        path = rng.choice(self._paths)
        if rng.random() < 0.4:
            path = rng.choice([
                path + "/", path + "?" + "a=b&" * rng.randrange(50), path + "%00", path + "/../x", "//" + path,
                "*", "/", path.upper(), "/" + "a" * rng.randrange(9_000), "/%ff%fe",
                "/v1/models/" + "%2e%2e%2f" * 9, "http://x/y",
            ])  # fmt: skip
        with sockets.connect(self._address) as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"
            if not sockets.send(case, connection, head.encode() + b"{}"):
                return "route closed"
            answer = sockets.reply(connection, method)
        if answer is None:
            return "route closed"
        assert answer.status, f"{method} {path} had no answer"
        sockets.check(answer)
        return f"route {answer.status}"

    def _exchange(self, case: Case, path: str, body: bytes) -> str:
        name = f"fuzz-{case.number}-{secrets.token_hex(3)}"
        with sockets.connect(self._address) as connection:
            sockets.send(case, connection, _head(path, len(body), name) + body)
            end = time.monotonic() + _PATIENCE
            answer = sockets.reply(connection, patience=lambda: max(0.01, end - time.monotonic()))
            if answer is None:
                raise AssertionError("the connection was closed without an answer")
            if not answer.whole:
                self._served(case, name, connection, answer)
                return "left"
        sockets.check(answer)
        if "x-request-id" in answer.headers or path in self._posts:
            assert answer.headers.get("x-request-id") == name, f"x-request-id is {answer.headers.get('x-request-id')}"
        return str(answer.status)

    def _served(self, case: Case, name: str, connection: Any, answer: sockets.Reply) -> None:
        """Check that a request without an end is one that the router works at; or its answer comes now."""
        sockets.check(answer)
        until = time.monotonic() + sockets.SILENCE
        while True:
            with Client(operator=self._operator) as client:
                try:
                    state = client.explain(name, timeout=30).request.state
                except BatonError as error:
                    state, case.notes = "unspecified", [*case.notes, str(error)]
            if state in ("queued", "running"):
                return
            connection.settimeout(1.0)
            with suppress(TimeoutError):
                if not connection.recv(65_536) or answer.status == 0:
                    return  # it had been about to answer: a busy machine
            assert time.monotonic() < until, f"{name} is {state} and its answer has no end: {answer.body[:200]!r}"

    # --- broken HTTP -------------------------------------------------------------------------------------------------

    def _head(self, case: Case) -> str:
        """A head that is none, or that contradicts itself."""
        rng = case.rng
        path = rng.choice(self._paths)
        lines = [f"{rng.choice(_METHODS)} {path} HTTP/{rng.choice(['1.1', '1.1', '1.0', '0.9', '2.0', '9', ''])}"]
        lines += [f"{rng.choice(_HEADERS)}: {rng.choice(_VALUES)}" for _ in range(rng.choice([1, 3, 8, 120]))]
        raw = rng.choice(["\r\n", "\r\n", "\r\n", "\n", "\r"]).join([*lines, "", ""]).encode("latin-1")
        if rng.random() < 0.4:
            raw = values.damaged(rng, raw)
        if rng.random() < 0.1:
            raw = values.data(rng, 90_000)
        return f"head {self._garbage(case, raw)}"

    def _framing(self, case: Case) -> str:
        """A body whose length is told wrongly, in chunks that are none, or twice."""
        rng, path = case.rng, case.rng.choice(self._posts)
        body = encode(self._base(rng, path))
        start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        chunk = f"{len(body):x}".encode() + b"\r\n" + body + b"\r\n"
        length = f"Content-Length: {len(body)}\r\n".encode()
        chunked = b"Transfer-Encoding: chunked\r\n"
        raw = rng.choice([
            start + length + length + b"\r\n" + body,
            start + f"Content-Length: {len(body) + 7}\r\n\r\n".encode() + body,
            start + f"Content-Length: {max(0, len(body) - 7)}\r\n\r\n".encode() + body,
            start + b"Content-Length: -1\r\n\r\n" + body,
            start + length + chunked + b"\r\n" + chunk + b"0\r\n\r\n",
            start + chunked + b"\r\n" + chunk + b"0\r\n\r\n",
            start + chunked + b"\r\n" + chunk + b"0\r\nX-Trailer: 1\r\n\r\n",
            start + chunked + b"\r\n" + b"FFFFFFFFFFFFFFFFF\r\n" + body,
            start + chunked + b"\r\n" + b"zz\r\n" + chunk,
            start + chunked + b"\r\n" + b";" * 5_000 + chunk,
            start + chunked + b"\r\n" + b"".join(b"1\r\n" + bytes([each]) + b"\r\n" for each in body) + b"0\r\n\r\n",
            start + b"Transfer-Encoding: gzip\r\n\r\n" + chunk,
            start + b"Expect: 100-continue\r\n" + length + b"\r\n" + body,
        ])  # fmt: skip
        if rng.random() < 0.2:
            raw = values.damaged(rng, raw)
        return f"framing {self._garbage(case, raw)}"

    def _garbage(self, case: Case, raw: bytes) -> str:
        """Send it in pieces, then close our side. Any answer below 500 will do, and so does a closed connection."""
        with sockets.connect(self._address) as connection:
            for piece in _pieces(case.rng, raw):
                if not sockets.send(case, connection, piece):
                    break
            with suppress(OSError):
                connection.shutdown(1)
            read = sockets.drain(connection)
        statuses = _statuses(read)
        assert all(status < 500 for status in statuses), f"{statuses}: {read[:2_000]!r}"
        assert b"Traceback" not in read, read[:2_000]
        return str(statuses[0]) if statuses else "closed"

    def _pipelined(self, case: Case) -> str:
        """Several requests at once, of which some may be broken."""
        rng = case.rng
        parts: list[bytes] = []
        for _ in range(rng.randrange(2, 12)):
            path = rng.choice([*self._posts, "/version", "/live", "/v1/models"])
            body = (
                self._json(rng, path) if path in self._posts and rng.random() < 0.3 else encode(self._base(rng, path))
            )
            if path in self._posts:
                parts.append(_head(path, len(body), "pipelined") + body)
            else:
                parts.append(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        raw = b"".join(parts)
        if rng.random() < 0.2:
            raw = values.damaged(rng, raw)
        return f"pipelined {self._garbage(case, raw)}"

    # --- clients that go away, or are slow ---------------------------------------------------------------------------

    def _going_away(self, case: Case) -> str:
        """A client that closes while it sends, while it waits, or in the middle of an answer."""
        rng = case.rng
        path = rng.choice([path for path in self._posts if path.startswith("/v1/")])
        field = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}
        fields = self._base(rng, path) | {field.get(path, "max_tokens"): 400, "stream": rng.random() < 0.8}
        if path in ("/v1/completions", "/v1/chat/completions"):
            fields |= {"n": rng.choice([1, 1, 2, 5]), "ignore_eos": True}
        body = encode(fields)
        raw = _head(path, len(body), f"gone-{case.number}") + body
        with sockets.connect(self._address) as connection:
            if rng.random() < 0.25:
                sockets.send(case, connection, raw[: rng.randrange(len(raw))])
                kind = "half sent"
            else:
                sockets.send(case, connection, raw)
                kind = "left"
                until = time.monotonic() + rng.choice([0.0, 0.01, 0.1, 0.5, 1.5])
                while time.monotonic() < until:
                    connection.settimeout(max(0.001, until - time.monotonic()))
                    with suppress(TimeoutError, OSError):
                        if not connection.recv(4_096):
                            break
            if rng.random() < 0.5:
                connection.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of 0 s: a reset instead of an end
        return f"gone {kind}"

    def _slow(self, case: Case) -> str:
        """A client that sends its request a few bytes at a time, and reads the answer so."""
        rng = case.rng
        path = rng.choice(self._posts)
        body = self._json(rng, path)[:20_000]
        raw = _head(path, len(body), f"slow-{case.number}") + body
        with sockets.connect(self._address) as connection:
            at, size = 0, max(1, len(raw) // rng.randrange(3, 40))
            while at < len(raw):
                if not sockets.send(case, connection, raw[at : at + size]):
                    return "slow closed"
                at += size
                time.sleep(rng.uniform(0, 0.03))
            until, read = time.monotonic() + 3.0, bytearray()
            while time.monotonic() < until:
                connection.settimeout(0.5)
                try:
                    piece = connection.recv(rng.choice([1, 7, 64]))
                except TimeoutError:
                    continue
                except OSError:
                    break
                if not piece:
                    break
                read += piece
        assert all(status < 500 for status in _statuses(bytes(read))), bytes(read[:2_000])
        return "slow"

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _base(self, rng: random.Random, path: str) -> dict[str, Any]:
        """A valid body for that path."""
        if (base := _BASES.get(path)) is None:
            body = self._schema.body_of(path) if path in self._posts else None
            base = self._schema.value(rng, body) if body else {}
        more = {"stream": True} if path.startswith("/v1/") and rng.random() < 0.4 else {}
        tools = _WITH_TOOLS.get(path, {}) if rng.random() < 0.4 else {}
        return {**base, **more, **tools}

    def _json(self, rng: random.Random, path: str) -> bytes:
        body = self._schema.body_of(path)
        assert body is not None
        value = mutated(rng, self._base(rng, path), self._schema, body)
        if path != "/detokenize" and isinstance(value, dict) and rng.random() < 0.15:
            self._odd_chat(rng, value)
        return encode(value)

    def _odd_chat(self, rng: random.Random, chat: dict[str, Any]) -> None:
        """Messages, inputs and tools that have almost the right shape."""
        name = rng.choice(["messages", "input", "tools", "system", "response_format", "structured_outputs", "prompt"])
        part = {"type": rng.choice(["text", "input_text", "image_url", "tool_use", "tool_result", "x"]), "text": _WORDS}
        message = {"role": rng.choice(values.STRINGS[-16:]), "content": rng.choice([_WORDS, [part], None, part, [[]]])}
        if rng.random() < 0.4:
            message[values.text(rng, 20)] = json_text.odd(rng)
        chat[name] = rng.choice([[message] * rng.choice([1, 2, 500]), message, [part], [message, json_text.odd(rng)]])


def _head(path: str, length: int, name: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        f"X-Request-Id: {name}\r\nConnection: close\r\n\r\n"
    ).encode()


def _pieces(rng: random.Random, raw: bytes) -> list[bytes]:
    if rng.random() < 0.6 or len(raw) < 2:
        return [raw]
    cuts = sorted(rng.randrange(1, len(raw)) for _ in range(rng.randrange(1, 5)))
    return [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


def _statuses(read: bytes) -> list[int]:
    """The status of every answer on a connection."""
    return [int(line[9:12]) for line in read.split(b"\r\n") if line.startswith(b"HTTP/1.1 ") and line[9:12].isdigit()]
