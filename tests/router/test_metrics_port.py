"""The router's HTTP port against strangers: idle, slow and many connections."""

import asyncio
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import pytest

from baton import metrics_server
from baton.metrics import Metrics
from router.frontend import metrics_port
from tests.router.served import Served, served, settings_for

PATIENCE = 60.0


async def connect(router: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = router.addresses.http.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def scrape(router: Served) -> str:
    url = f"http://{router.addresses.http}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_the_oldest_connections_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE", PATIENCE)
    async with served(settings_for(tmp_path)) as router:
        idle = [await connect(router) for _ in range(2 * metrics_server.MAX_CONNECTIONS)]
        for reader, _ in idle[: metrics_server.MAX_CONNECTIONS]:
            assert await ended(reader)
        await scrape(router)
        assert await ended(idle[metrics_server.MAX_CONNECTIONS][0])
        for _, writer in idle:
            writer.close()
    assert not [record for record in caplog.records if record.name in ("asyncio", "baton.metrics_server")]


async def test_idle_and_slow_connections_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE", 0.5)
    async with served(settings_for(tmp_path)) as router:
        idle, idle_writer = await connect(router)
        slow, slow_writer = await connect(router)

        async def trickle() -> None:
            slow_writer.write(b"GET /metrics HTTP/1.1\r\nX: ")
            while True:
                slow_writer.write(b"y")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert await ended(idle)
        assert await ended(slow)
        trickling.cancel()
        idle_writer.close()
        slow_writer.close()
        await scrape(router)


async def test_a_connection_carries_one_request_and_rubbish_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(settings_for(tmp_path)) as router:
        for sent, expected in (
            (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50, b" 503 "),
            (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n", b" 501 "),
            (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 404 "),
            (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 431 "),
            (b"\xff\xfe\r\n\r\n", b" 400 "),
        ):
            reader, writer = await connect(router)
            writer.write(sent)
            answer = await reader.read()
            assert answer.count(b"HTTP/1.") == 1
            assert expected in answer.split(b"\r\n")[0]
            writer.close()
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_error_of_ours_is_logged_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Metrics) -> bytes:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Metrics, "text", fail)
    async with (
        served(settings_for(tmp_path)) as router,
        aiohttp.ClientSession(f"http://{router.addresses.http}") as session,
        session.get("/metrics") as answer,
    ):
        assert answer.status == 500
    assert "a mistake of ours" in caplog.text


async def test_a_loop_that_stands_still_is_told_apart_from_a_router_that_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "_PATIENCE", 0.1)
    async with served(settings_for(tmp_path)) as router:
        url = f"http://{router.addresses.http}"
        with urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:  # noqa: ASYNC210 - the loop stands still meanwhile
            assert b"baton_loop_age_seconds" in answer.read()
        for page in ("/healthz", "/discovery"):
            with pytest.raises(HTTPError, match="504"):
                urlopen(f"{url}{page}", timeout=PATIENCE)  # noqa: ASYNC210 - as above


async def test_a_flood_of_scrapes_renders_twice_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    text = Metrics.text

    def render(metrics: Metrics) -> bytes:
        threads.append(threading.current_thread())
        return text(metrics)

    monkeypatch.setattr(Metrics, "text", render)
    async with served(settings_for(tmp_path)) as router:
        started = asyncio.get_running_loop().time()
        for _ in range(10):
            pages = await asyncio.gather(*(scrape(router) for _ in range(8)))
            assert all("baton_peers" in page for page in pages)
        seconds = asyncio.get_running_loop().time() - started
        assert len(threads) <= 2 + 2 * seconds
        assert threading.main_thread() not in threads  # the loop's
