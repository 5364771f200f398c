"""What a client without a key can hold of the HTTP port, at a real router's socket: every bound, and RFC 9112."""

import asyncio
import json
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import baton
from baton import api_keys
from baton.api_keys import Identity
from bench.processes import Memory
from router.frontend.api import gates, server
from router.frontend.api.server import MAX_HEADERS, SPARE
from tests.router.served import Served, served, settings_for
from tests.router.strangers import HOST, PATIENCE, Stranger, get, post, say
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

BODY = json.dumps({"prompt": list(range(20, 40)), "max_tokens": 12, "seed": 4}).encode()
STREAM = json.dumps({"prompt": [20, 21, 22], "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
MOST = 2**27  # bytes of which a stranger gets rid before a test gives up
GROWTH = 2**26  # bytes that a process may grow by, whatever comes


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.5)
    monkeypatch.setattr(gates, "_BODY_SECONDS", 1.0)


def is_held(server: int, client: int) -> bool:
    """Whether a process holds the server's end of the connection between these ports."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = (f":{server:04X}", f":{client:04X}")
    return any(line[1].endswith(ends[0]) and line[2].endswith(ends[1]) and line[9] != "0" for line in lines)


async def ready(router: Served) -> None:
    router.start("decode", "decode-0")

    async def is_ready() -> bool:
        return (await say(router.addresses.api, get("/ready"))).statuses == [200]

    await eventually_async(is_ready)


HEADS = {
    "a body is read": b"POST /v1/completions HTTP/1.1\r\n",
    "health": b"GET /health HTTP/1.1\r\n",
    "no route": b"POST /nothing HTTP/1.1\r\n",
    "no method": b"DELETE /v1/completions HTTP/1.1\r\n",
    "no key": b"POST /v1/completions HTTP/1.1\r\nX-No-Key: 1\r\n",
}
ENDLESS = {
    "trailers": (b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 10_000),
    "one trailer": (b"2\r\n{}\r\n0\r\na: ", b"b" * 2**16),
    "a trailer's name": (b"2\r\n{}\r\n0\r\n", b"b" * 2**16),
    "chunk extensions": (b"2;", b"a=b;" * 2**14),
    "a body": (b"", b"10000\r\n" + b" " * 2**16 + b"\r\n"),
    "tiny chunks": (b"", b"1\r\n \r\n" * 2**14),
    "blank lines before a size": (b"", b"\r\n" * 2**15),
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("where", HEADS)
async def test_what_follows_a_head_is_bounded(tmp_path: Path, quick: None, where: str, what: str) -> None:
    if where == "no key":
        api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    start, more = ENDLESS[what]
    async with served(settings_for(tmp_path)) as router:
        before = Memory.of(os.getpid()).anonymous
        stranger = await Stranger.connect(router.addresses.api)
        await stranger.send(HEADS[where] + HOST + CHUNKED + start)
        reading = asyncio.create_task(stranger.rest())
        sent, most = 0, 0
        while sent < MOST and not reading.done() and await stranger.send(more):
            sent += len(more)
            most = max(most, Memory.of(os.getpid()).anonymous - before)
            await asyncio.sleep(0)
        reply = await reading
        assert most < GROWTH, f"{most} bytes for {sent}"
        # A client that never stops sending may find its answer destroyed. Others read one.
        assert len(reply.statuses) <= 1
        assert all(status in (200, 400, 401, 404, 405, 408, 413, 431, 503) for status in reply.statuses)
        assert (await say(router.addresses.api, get("/live"))).statuses == [200]


@pytest.mark.parametrize("length", [b"Content-Length: 100000\r\n\r\n", CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("where", HEADS)
async def test_a_body_that_comes_in_drops_holds_a_connection_for_a_bounded_time(
    tmp_path: Path, quick: None, where: str, length: bytes
) -> None:
    if where == "no key":
        api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    async with served(settings_for(tmp_path)) as router:
        stranger = await Stranger.connect(router.addresses.api)
        await stranger.send(HEADS[where] + HOST + length)
        reading = asyncio.create_task(stranger.rest())
        async with asyncio.timeout(PATIENCE):
            while not reading.done():
                await stranger.send(b"1\r\n \r\n")
                await asyncio.sleep(0.05)
        expected = {"a body is read": 408, "health": 503, "no route": 404, "no method": 405, "no key": 401}
        reply = await reading
        assert reply.statuses == [expected[where]]
        assert b"connection: close" in reply.raw


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (get("/live", *[b"a: b"] * (MAX_HEADERS - 2)), 200),
        (get("/live", *[b"a: b"] * (MAX_HEADERS + 1)), 431),
        (get("/live", b"a: " + b"b" * 2**17), 431),
        (get("/live?" + "a" * 2**17), 431),
        (b"GET /live HTTP/1.1\r\n\r\n", 400),
        (get("/live", b"Host: localhost"), 400),
        (b"GET /live HTTP/1.0\r\n\r\n", 200),
        (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (get("/live", b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"0\r\n\r\n", 400),
        (get("/live", b"Content-Length: 5", b"Content-Length: 6") + b"hello", 400),
        (get("/live", b"Content-Length: " + b"9" * 4_000), 400),
        (get("/live", b"Transfer-Encoding: chunked, gzip"), 400),
        (get("/live", b"a: b\0c"), 400),
        (get("/live", b": b"), 400),
        (get("/live", b"a : b"), 400),
        (get("/live") + b"x" * 2**17, 200),
        (get("/\xff"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_a_head_is_one_or_the_client_reads_why_not(tmp_path: Path, sent: bytes, status: int) -> None:
    async with served(settings_for(tmp_path)) as router:
        reply = await say(router.addresses.api, sent)
        assert reply.statuses == [status]
        assert len(reply.raw) < 1_000


async def test_heads_that_never_end_are_ended(tmp_path: Path, quick: None) -> None:
    async with served(settings_for(tmp_path)) as router:
        silent, dripping, blank, used = [await Stranger.connect(router.addresses.api) for _ in range(4)]
        await used.send(get("/live", close=False))
        assert b" 200 " in await used.head()
        endings = [asyncio.create_task(one.rest()) for one in (silent, dripping, blank, used)]
        await dripping.send(b"GET /live HTTP/1.1\r\nA: ")
        async with asyncio.timeout(PATIENCE):
            while not all(ending.done() for ending in endings):
                await dripping.send(b"b")
                await blank.send(b"\r\n")
                await used.send(b"\r\n")  # blank lines between two requests
                await asyncio.sleep(0.05)
        replies = [await ending for ending in endings]
        assert [reply.statuses for reply in replies] == [[], [408], [408], [408]]


async def test_headers_of_many_unfinished_heads_take_little(tmp_path: Path) -> None:
    async with served(settings_for(tmp_path)) as router:
        before = Memory.of(os.getpid()).anonymous
        strangers = [await Stranger.connect(router.addresses.api) for _ in range(200)]
        for stranger in strangers:
            await stranger.send(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000)
        assert (await say(router.addresses.api, get("/live"))).statuses == [200]
        assert Memory.of(os.getpid()).anonymous - before < GROWTH
        assert {tuple((await stranger.rest()).statuses) for stranger in strangers} == {(431,)}


@pytest.mark.parametrize("framing", ["length", "chunked", "expect", "expect of a client that does not wait"])
async def test_the_answer_to_a_body_that_is_too_large_can_be_read(tmp_path: Path, framing: str) -> None:
    """The client reads only after it has sent everything, as Python's http.client does."""
    size = 32 * 2**20
    async with served(settings_for(tmp_path)) as router:
        stranger = await Stranger.connect(router.addresses.api)
        more = CHUNKED if framing == "chunked" else b"Content-Length: %d\r\n\r\n" % size
        more = (b"Expect: 100-continue\r\n" if "expect" in framing else b"") + more
        await stranger.send(b"POST /v1/completions HTTP/1.1\r\n" + HOST + more)
        if framing == "expect":
            assert (await stranger.head()).startswith(b"HTTP/1.1 413 ")
            assert (await stranger.rest()).statuses == []
            return
        piece = b" " * 2**20
        for _ in range(size // len(piece)):
            assert await stranger.send(b"%x\r\n%s\r\n" % (len(piece), piece) if framing == "chunked" else piece)
        assert (await stranger.rest()).statuses == [413]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_a_wish_for_another_protocol_is_ignored(tmp_path: Path, piece: int) -> None:
    h2c = (b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    ways = [
        post("/v1/completions", BODY, *h2c, b"Connection: Upgrade, HTTP2-Settings"),
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n" + CHUNKED
        + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
        get("/live", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: x"),
        get("/live", b"Upgrade: h2c", b"Connection: Upgrade", close=False) + get("/live"),
    ]  # fmt: skip
    async with served(settings_for(tmp_path)) as router:
        await ready(router)
        for sent in ways:
            stranger = await Stranger.connect(router.addresses.api)
            for at in range(0, len(sent), piece):
                await stranger.send(sent[at : at + piece])
                await asyncio.sleep(0)
            reply = await stranger.rest()
            assert set(reply.statuses) == {200}, reply.raw
            assert len(reply.statuses) == 1 + sent.count(b"GET /live HTTP") // 2
            assert (b'"text":' in reply.raw) == sent.startswith(b"POST")


async def test_http_1_0_gets_no_chunks(tmp_path: Path) -> None:
    async with served(settings_for(tmp_path)) as router:
        await ready(router)
        for body, end in ((BODY, b"}"), (STREAM, b"data: [DONE]\n\n")):
            sent = post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0").replace(HOST, b"")
            reply = await say(router.addresses.api, sent)
            assert reply.statuses == [200]
            head, _, rest = reply.raw.partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert rest.endswith(end)
            assert rest.startswith((b"{", b"data: {", b": keep-alive\n\n"))  # the last where the first token is late
            assert (b"content-length: %d" % len(rest) in head) == (body is BODY)


async def test_pipelined_requests_are_bounded_and_answered(tmp_path: Path) -> None:
    async with served(settings_for(tmp_path)) as router:
        reply = await say(router.addresses.api, get("/live", close=False) * 20 + get("/live"))
        assert reply.statuses == [200] * 21
        reply = await say(router.addresses.api, get("/live", close=False) * 10_000)
        assert 32 <= len(reply.statuses) < 100
        assert set(reply.statuses) == {200}
        assert b"connection: close" in reply.raw
        # What is no request ends the connection after the answers before it.
        reply = await say(router.addresses.api, get("/live", close=False) + b"\0\r\n\r\n")
        assert reply.statuses == [200]


async def test_idle_connections_give_way_and_served_ones_do_not(tmp_path: Path) -> None:
    most = 8
    async with served(settings_for(tmp_path, max_concurrent_rpcs=most)) as router, AsyncExitStack() as stack:
        await ready(router)
        api = router.addresses.api
        served_one = await Stranger.connect(api)
        router.step_seconds = 0.05
        await served_one.send(post("/v1/completions", STREAM))
        assert b" 200 " in await served_one.head()
        idle = [await Stranger.connect(api) for _ in range(2 * (most + SPARE))]
        for number, stranger in enumerate(idle):
            stack.callback(stranger.close)
            if number % 2:
                await stranger.send(get("/live", close=False) if number % 4 == 1 else b"GET /live HT")
        assert (await say(api, post("/v1/completions", BODY))).statuses == [200]
        assert (await say(api, get("/health"))).statuses == [200]
        assert all([await stranger.gone() for stranger in idle[:most]])
        assert not await idle[-1].gone()
        router.step_seconds = 0.002
        assert (await served_one.rest()).raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_health_is_answered_while_all_places_are_taken(tmp_path: Path) -> None:
    most = 3
    async with served(settings_for(tmp_path, max_concurrent_rpcs=most)) as router:
        await ready(router)
        api = router.addresses.api
        router.step_seconds = 0.05
        streams = [await Stranger.connect(api) for _ in range(most)]
        for stream in streams:
            await stream.send(post("/v1/completions", STREAM))
            assert b" 200 " in await stream.head()
        refused = await say(api, post("/v1/completions", BODY))
        assert refused.statuses == [429]
        assert b"router.max_concurrent_rpcs" in refused.raw
        for path in ("/health", "/live", "/metrics"):
            assert (await say(api, get(path))).statuses == [200]
        for stream in streams:
            stream.close()

        async def free() -> bool:
            return (await say(api, post("/v1/completions", BODY))).statuses == [200]

        await eventually_async(free)


@pytest.mark.parametrize("last", [True, False], ids=["at the end", "before more"])
async def test_an_answer_that_is_not_read_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """The answers are more than the kernel buffers. Where they are the last ones, the server has closed behind them."""
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.5)
    monkeypatch.setattr(server, "LAST_UNREAD_SECONDS", 0.5)
    size = 2**24
    monkeypatch.setattr(baton, "__version__", "9" * size)
    async with served(settings_for(tmp_path)) as router:
        host, _, port = router.addresses.api.rpartition(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect((host, int(port)))
            mine = deaf.getsockname()[1]
            deaf.sendall(get("/version", close=last) * (1 if last else 3))

            async def ended() -> bool:
                return not is_held(int(port), mine)

            await eventually_async(lambda: asyncio.to_thread(is_held, int(port), mine))
            await eventually_async(ended)
        slow = await Stranger.connect(router.addresses.api)  # a slow client gets all of it
        await slow.send(get("/version"))
        read = 0
        while piece := await slow.reader.read(2**18):
            read += len(piece)
            await asyncio.sleep(0.02)
        slow.close()
        assert read > size


async def test_a_long_number_is_not_echoed(tmp_path: Path) -> None:
    async with served(settings_for(tmp_path)) as router:
        await ready(router)
        fields = (
            "max_tokens", "n", "best_of", "top_k", "min_tokens", "logprobs", "seed", "priority", "temperature",
            "prompt", "ttft_ms", "prompt_logprobs", "truncate_prompt_tokens",
        )  # fmt: skip
        for digits in (40, 4_000, 100_000):
            for field in fields:
                number = "9" * digits
                value = f"[{number}]" if field == "prompt" else number
                body = '{"prompt": [20], "max_tokens": 2}' if field == "seed" else '{"prompt": [20]}'
                reply = await say(
                    router.addresses.api, post("/v1/completions", (body[:-1] + f', "{field}": {value}}}').encode())
                )
                assert reply.statuses in ([200], [400]), f"{field} of {digits} digits: {reply.raw[:500]!r}"
                assert b"9" * 100 not in reply.raw, field
