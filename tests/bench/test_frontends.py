"""Fronts before the fake engine: what the engine gives, what clients count. vLLM is not needed."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest

from bench import random_model
from bench.peers import environments
from bench.peers.adapter import PeerFailed
from bench.peers.environments import VLLM
from bench.peers.fake_engine import FakeEngine, NextToken
from bench.router import frontends, fronts
from bench.router.front_clients import Client, HttpClient, Order, StreamFailed
from bench.router.fronts import Front

_SECONDS = 10.0  # until a test has failed
_EVENTS = b"".join(b"data: {}\n\n" for _ in range(3))
_ANSWER = b"HTTP/1.1 200 OK\r\n\r\n1e\r\n" + _EVENTS + b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _unread(*streams: str):
    return lambda stream: int(stream in streams)


def test_each_stream_gets_all_of_its_tokens_and_is_told_of_the_last() -> None:
    async def run() -> list[NextToken[str]]:
        engine = FakeEngine[str]([7, 8])
        engine.add("a", 3)
        engine.add("b", 1)
        return [each for _ in range(3) for each in await engine.step(_unread())]

    tokens = asyncio.run(asyncio.wait_for(run(), _SECONDS))
    assert [(one.stream, one.last) for one in tokens] == [("a", False), ("b", True), ("a", False), ("a", True)]
    assert {one.token for one in tokens} == {7, 8}


async def test_at_an_interval_tokens_come_whether_they_are_read_or_not_and_the_first_at_once() -> None:
    engine = FakeEngine[str]([7])
    engine.pace(0.001)
    engine.add("slow", 5)
    assert [each.stream for each in await engine.step(_unread("slow"))] == ["slow"]
    engine.pace(_SECONDS)  # no step is due before the test has failed
    engine.add("new", 5)
    assert "new" in [each.stream for each in await engine.step(_unread("slow"))]
    engine.pace(0.001)
    assert [each.stream for each in await engine.step(_unread("slow"))] == ["slow", "new"]
    engine.pace(None)


@asynccontextmanager
async def _answering(parts: Sequence[bytes]) -> AsyncIterator[str]:
    """A server that answers every request with these parts; its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"}"):  # the body's end
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, len(_ANSWER)])
async def test_the_client_counts_events_however_they_are_cut(size: int) -> None:
    async with _answering([_ANSWER[at : at + size] for at in range(0, len(_ANSWER), size)]) as address:
        with closing(await HttpClient.connect(address)) as client:
            for _ in range(2):
                stream = await client.ask(3)
                assert len(stream.times) == 3
                assert stream.first >= 0
                assert len(stream.gaps) == 2
                assert len((await client.chat(b"{}")).times) == 1, "the end alone"


@pytest.mark.slow
def test_the_doors_serve_all_tokens_of_the_fake_engine(tmp_path: Path) -> None:
    checkpoint = random_model.write(tmp_path)
    words = fronts.words(checkpoint)
    with ExitStack() as stack, closing(Client()) as client:
        http, grpc = (fronts.baton(door, checkpoint, words, stack) for door in ("http", "grpc"))
        for front in (Front("HTTP", "http", http), Front("gRPC", "grpc", grpc)):
            before = front.cpu_seconds()
            for interval in (None, 0.001):
                front.pace(interval)
                streams = client.round(Order(front.door, front.address, 2, 5))
                assert len(streams) == 4
                # With an interval the front may send several tokens at once, if this machine is busy.
                counts = {len(stream.times) for stream in streams}
                assert counts == {5} if interval is None else max(counts) <= 5
            assert front.cpu_seconds() > before
        figures = frontends.take_turns(client, [Front("HTTP", "http", http)], 1, Order("", "", 2, 5))
        assert [len(values) for values in vars(figures["HTTP"]).values()] == [1] * 6, "the first round is not counted"


def test_each_turn_of_a_chat_begins_with_the_turn_before() -> None:
    (turns,) = fronts.conversations("model", 1, 3, 0)
    messages = [json.loads(body)["messages"] for body in turns]
    for before, after in itertools.pairwise(messages):
        assert after[: len(before)] == before
        assert len(str(after)) > len(str(before)) > 200_000
    assert fronts.conversations("model", 1, 3, 1)[0] != turns


@pytest.mark.slow
def test_a_front_that_is_not_there_fails_the_round() -> None:
    with socket.socket() as silent, closing(Client()) as client:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(StreamFailed, match="failed"):
            client.round(Order("http", f"127.0.0.1:{silent.getsockname()[1]}", 1, 1))


def test_vllm_is_left_out_where_it_is_not_installed(tmp_path: Path) -> None:
    assert not environments.prepared(VLLM, tmp_path)
    VLLM.folder(tmp_path).mkdir()
    assert not environments.prepared(VLLM, tmp_path), "an environment that is not whole"
    with ExitStack() as stack, pytest.raises((PeerFailed, FileNotFoundError)):
        fronts.vllm(tmp_path, [1], tmp_path, stack)
