"""Hostile clients and strangers, each a process of its own, for `tests/soak/hostile_clients.py`.

    python -m tests.soak.attacks ATTACK ARGUMENTS       arguments as JSON

An attack goes on until its stdin closes. Then it prints one line of JSON: its counts by kind. It runs at a low
priority, because an attacker has a machine of its own. Some attacks first switch to another user (uid 65534) without
any files here.

A reply that a hostile request must not get (an unknown status, a Python class name, success) ends the attack with an
error, which fails the soak.
"""

import encodings.idna  # noqa: F401 - another user may not be able to read the library it is loaded from
import http.client
import json
import os
import random
import select
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import zmq

from baton.v1 import generation_pb2, generation_pb2_grpc
from tests.soak.grpc_attacks import closed, held_streams, unspoken_connections

STRANGER = 65_534
_NICENESS = 10
_GENERATE = "/baton.v1.Generation/Generate"
_OPERATOR = ("/baton.v1.Cluster/GetStatus", "/baton.v1.Cluster/Drain", "/baton.v1.Cache/PinPrefix")
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_PATIENCE = 40.0  # seconds after which a reader that never reads looks at what became of its stream
_NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]


def _going_on() -> bool:
    """Whether the attack should continue: its stdin is still open."""
    return not select.select([sys.stdin], [], [], 0)[0]


def long_inputs(grpc_address: str) -> Iterator[str]:
    """Send texts and token lists far beyond any context, plain and compressed, and bytes that are no request."""
    rng = random.Random(1)
    words = " ".join(rng.choice(["ba", "ce", "dor", "fun", "gil"]) for _ in range(200))
    texts = [words * (size // len(words)) for size in (40_000, 400_000, 3 * 2**20, 15 * 2**20)]
    requests = [generation_pb2.GenerateRequest(text=text, max_tokens=1) for text in texts]
    many = generation_pb2.TokenIds(ids=[5] * 3_000_000)
    requests.append(generation_pb2.GenerateRequest(token_ids=many, max_tokens=1))
    messages = [(request.SerializeToString(), request.WhichOneof("prompt") or "") for request in requests]
    messages += [(os.urandom(size), "garbage") for size in (10, 1_000, 100_000)]
    channel = grpc.insecure_channel(grpc_address, options=_NO_LIMIT)
    call = channel.unary_stream(_GENERATE, request_serializer=bytes, response_deserializer=bytes)
    while True:
        for message, kind in messages:
            for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
                yield _refused(call, message, kind, compression)


def _refused(call: grpc.UnaryStreamMultiCallable, message: bytes, kind: str, compression: grpc.Compression) -> str:
    try:
        for _ in call(message, timeout=60, compression=compression):
            raise AssertionError(f"a hostile {kind} of {len(message)} bytes was served")
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
        assert code in _REFUSED, f"a hostile {kind} of {len(message)} bytes got {code}: {details}"
        assert "class" not in details, details
        assert len(details) < 2_000, f"{len(details)} characters of details"
        return f"{kind} {code.name}"
    raise AssertionError(f"a hostile {kind} of {len(message)} bytes ended without a status")


def operator_calls(grpc_address: str, operator_path: str) -> Iterator[str]:
    """As another user: call the operator's methods on the public port, and connect to the operator's socket."""
    os.setuid(STRANGER)
    channel = grpc.insecure_channel(grpc_address, options=_NO_LIMIT)
    while True:
        for method in _OPERATOR:
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            code = _status(call)
            assert code is grpc.StatusCode.UNIMPLEMENTED, f"{method} got {code} on the public port"
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(operator_path)
            except PermissionError:
                pass
            else:
                raise AssertionError(f"another user reached {operator_path}")
        time.sleep(0.05)
        yield "operator calls refused"


def _status(call: grpc.UnaryUnaryMultiCallable) -> grpc.StatusCode:
    try:
        call(b"", timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def slow_readers(grpc_address: str, count: int) -> Iterator[str]:
    """Start streams with large messages and read nothing for long. Then each must have been cancelled."""
    # A small window: the reader's own machine must not buffer the stream.
    options = [*_NO_LIMIT, ("grpc.http2.lookahead_bytes", 1_024), ("grpc.http2.bdp_probe", 0)]
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(grpc_address, options=[*options, ("grpc.slow_reader", number)]))
            for number in range(count)
        ]
        stubs = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]
        calls: list[Any] = [None] * count
        begun = [0.0] * count
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=range(5, 60)),
            max_tokens=2_000, temperature=0, ignore_eos=True, logprobs=20,
        )  # fmt: skip
        while True:
            for number, stub in enumerate(stubs):
                call = calls[number]
                if call is not None and time.monotonic() - begun[number] < _PATIENCE:
                    continue
                if call is not None:
                    yield f"told {_rest(call).name}"
                calls[number], begun[number] = stub.Generate(request, timeout=120), time.monotonic()
                yield "started"
            time.sleep(0.2)
            yield ""


def _rest(call: Any) -> grpc.StatusCode:
    """Read what there is left of a stream: how it ended."""
    with suppress(grpc.RpcError):
        for _ in call:
            pass
    code = call.code()
    assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED), f"a slow reader got {code}"
    return code


def idle_connections(addresses: Sequence[str], each: int) -> Iterator[str]:
    """Keep so many connections open to every address without a word; replace those that the other end closes."""
    open_ones: dict[str, list[socket.socket]] = {address: [] for address in addresses}
    while True:
        for address, sockets in open_ones.items():
            host, _, port = address.rpartition(":")
            for one in [one for one in sockets if closed(one)]:
                one.close()
                sockets.remove(one)
                yield "closed by the server"
            for _ in range(min(20, each - len(sockets))):
                with suppress(OSError):
                    sockets.append(socket.create_connection((host, int(port)), timeout=1))
                    sockets[-1].setblocking(False)
                    yield "opened"
        yield ""


def store_connects(store_address: str) -> Iterator[str]:
    """As another user: connect to the store's Unix socket and close, as fast as it goes."""
    os.setuid(STRANGER)
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(b"\0" + store_address.encode())
                connection.send(b"x" * 100)
            except OSError:
                yield "store turned away"
            else:
                yield "store connected"


def zmq_strangers(endpoints: Sequence[str]) -> Iterator[str]:
    """As another user: flood ZMQ ports with messages and with bytes that are no ZMQ, without the cluster's keys."""
    os.setuid(STRANGER)
    context = zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in endpoints]
    for dealer, endpoint in zip(dealers, endpoints, strict=True):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 10_000)
        dealer.connect(endpoint)
    while True:
        for dealer, endpoint in zip(dealers, endpoints, strict=True):
            for _ in range(200):
                with suppress(zmq.Again):
                    dealer.send(b"x", zmq.NOBLOCK)
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as connection:
                connection.sendall(b"\xff" + b"\0" * 8 + b"\x7f" + b"junk" * 100)
            assert not dealer.poll(0), f"{endpoint} answered a stranger"
            yield "floods"


def scrapes(http_addresses: Sequence[str]) -> Iterator[str]:
    """Ask every metrics port for its page, without a pause."""
    while True:
        for address in http_addresses:
            host, _, port = address.rpartition(":")
            try:
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    while connection.recv(65_536):
                        pass
            except OSError:
                yield "scrape refused"
            else:
                yield "scrape"


def http_requests(api_address: str) -> Iterator[str]:
    """Send HTTP requests that must be refused: of other sites' pages, for other hosts, too large, without an end."""
    get = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
    post, chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    once = {
        "cross-site": (post + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}", b"403"),
        "rebound name": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        "two hosts": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400"),
        "tiny headers": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000, b"431"),
        "large body": (post + b"Content-Length: 16777216\r\n\r\n" + b" " * 2**24, b"413"),
        "large chunked body": (post + chunked + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 16, b"413"),
        "pipelined": ((get + b"\r\n") * 10_000, b"200"),
    }
    endless = {
        "trailers": (post + chunked + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 10_000),
        "trailers of a path that reads none": (get + chunked + b"0\r\na: ", b"b" * 2**16),
        "chunk extensions": (post + chunked + b"2;", b"a" * 2**16),
        "a body of a path that reads none": (get + chunked, b"1\r\n \r\n" * 2**13),
    }
    while True:
        for name, (sent, status) in once.items():
            answer = _exchange(api_address, sent)
            assert answer[9:12] in (status, b""), f"{name} got {answer[:200]!r}"
            yield name if answer else f"{name} gave way"
        for name, (head, more) in endless.items():
            _exchange(api_address, head, more)
            yield f"endless {name}"


def _exchange(address: str, sent: bytes, again: bytes = b"") -> bytes:
    """Send bytes, then `again` without an end, and return the first part of the answer. Raises AssertionError if the
    bytes are taken for longer than a minute."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + 60
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(sent)
            while again:
                connection.sendall(again)
                assert time.monotonic() < end, f"{len(again)} bytes are still taken again and again after {sent[:80]!r}"
        with suppress(OSError):
            return connection.recv(65_536)
    return b""


def held_connections(api_address: str, count: int) -> Iterator[str]:
    """Hold connections that are new, idle, in the middle of a head, or whose answers are not read, more than there are
    places. Health must be told meanwhile."""
    live = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    starts = (b"", live, b"GET /live HTTP/1.1\r\nA: ", live.replace(b"/live", b"/openapi.json") * 30)
    host, _, port = api_address.rpartition(":")
    held: deque[socket.socket] = deque()
    while True:
        for start in starts:
            with suppress(OSError):
                held.append(socket.create_connection((host, int(port)), timeout=5))
                held[-1].sendall(start)
        while len(held) > count:
            held.popleft().close()
        yield "held"
        answer = _exchange(api_address, live.replace(b"/live", b"/health"))
        assert answer[9:12] in (b"200", b""), f"health is {answer[:200]!r}"
        yield "healthy" if answer else "health was reset"


def large_bodies(api_address: str) -> Iterator[str]:
    """Send bodies that take as much work as a body can. Larger ones than 640 KiB may be refused unread."""
    word, ids, allowed = "abcdefghij" * 96, list(range(20, 320)), [number % 99 for number in range(2**17)]
    bodies = {
        "bad words": {"prompt": "x", "max_tokens": 1, "bad_words": [f"{word}{number}" for number in range(650)]},
        "samples": {"prompt": ids, "max_tokens": 1, "n": 128},
        "prompts": {"prompt": ["hello world"] * 2_048, "max_tokens": 1},
        "lists": {"prompt": "x", "max_tokens": 1, "unknown": [[] for _ in range(100_000)]},
        "messages": {"messages": [{"role": "user", "content": "a"} for _ in range(18_000)], "max_tokens": 1},
        "allowed tokens": {"prompt": "x", "max_tokens": 1, "allowed_token_ids": allowed},
    }
    encoded = {name: json.dumps(body).encode() for name, body in bodies.items()}
    host, _, port = api_address.rpartition(":")
    while True:
        for name, body in encoded.items():
            path = "chat/completions" if name == "messages" else "completions"
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            try:
                connection.request("POST", f"/v1/{path}", body)
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException):
                status = 0  # its connection gave way to others
            finally:
                connection.close()
            assert status in (0, 200, 400, 429, 503), f"{name} got {status}"
            yield f"{name} {status}"


PACED, PACE = frozenset({"http_requests", "held_connections", "large_bodies"}), 0.25  # seconds between two of its steps

ATTACKS: Mapping[str, Callable[..., Iterator[str]]] = {
    function.__name__: function
    for function in (
        long_inputs, operator_calls, slow_readers, idle_connections, store_connects, zmq_strangers, scrapes,
        held_streams, unspoken_connections,
        http_requests, held_connections, large_bodies,
    )
}  # fmt: skip


def main() -> None:
    os.nice(_NICENESS)
    attack = ATTACKS[sys.argv[1]](**json.loads(sys.argv[2]))
    counts: Counter[str] = Counter()
    while _going_on():
        if kind := next(attack):
            counts[kind] += 1
        if attack.__name__ in PACED:  # a stranger's share of the cores is not what the soak measures
            time.sleep(PACE)
    print(json.dumps(counts), flush=True)
    os._exit(0)  # threads of gRPC may still wait for a stream that is never read


if __name__ == "__main__":
    main()
