"""The router's log: one line for a request that was served, and few for those that a client makes fail."""

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from baton.logs import RateLimit, RateLimitedLog
from baton.messages import Hello, Peer, Started, ToDecode
from baton.v1 import generation_pb2, generation_pb2_grpc
from baton.wire import RouterSocket
from router.events import Log
from router.frontend import router_driver
from tests.router.lab import Lab
from tests.router.served import served, settings_for


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is left out because of another test."""
    monkeypatch.setattr(router_driver, "limited", RateLimitedLog(router_driver.log, RateLimit(burst=20)))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(("router", "baton"))]


def test_a_served_request_has_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lab = Lab()
    (decode,) = lab.colocated()
    before = len(lab.log)
    lab.accepted(prompt=10, max_tokens=1)
    lab.say(decode, Started("r", 1))
    lab.tokens(decode, "r", 1, 10, 50, computed=10, finish="length")
    for command in lab.log[before:]:
        if isinstance(command, Log):
            router_driver._write(command)
    assert lines(caplog) == ["request=r finished: length, 10 prompt tokens, 0 cached, 1 generated"]


def test_lines_that_a_client_or_peer_causes_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in range(1_000):
        router_driver._write(
            Log("failed: invalid_request: " + "x" * 10_000, f"r{number}", kind="failed: invalid_request")
        )
        router_driver._write(Log(f"finished {number}", f"s{number}"))
    router_driver._write(Log("store-0 is gone: silent", warning=True, kind="gone"))
    written = lines(caplog)
    assert sum("failed" in line for line in written) == 20
    assert sum("finished" in line for line in written) == 1_000
    assert any("is gone" in line for line in written)  # a flood of one kind hides no other
    assert max(map(len, written)) <= 500


async def test_a_flood_of_nonsense_writes_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hellos that are rejected, and requests that can't be served, on real sockets."""
    caplog.set_level(logging.INFO)
    async with served(settings_for(tmp_path)) as router, grpc.aio.insecure_channel(router.addresses.grpc) as channel:
        before = len(lines(caplog))
        links = []
        for number in range(200):
            peer = Peer("router", f"n{number}", "a", f"n{number}.1", 1)
            links.append(RouterSocket[ToDecode](router.addresses.internal, peer, ToDecode))
            links[-1].send("", Hello(peer))
        client = generation_pb2_grpc.GenerationStub(channel)
        for _ in range(200):
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in client.Generate(generation_pb2.GenerateRequest(text="x", model="none\nforged")):
                    pass
        for link in links:
            while not list(link.receive()):  # noqa: ASYNC110 a link has no event to wait for
                await asyncio.sleep(0.01)
        for link in links:
            link.close()
        written = lines(caplog)[before:]
        assert len(written) <= 100
        assert not any("\n" in line for line in written)
